"""Whether a topic accepts deltas: many at once by their columns, and one at a time.

`check` of `penstock.model.delta_format` is the authority; what is here only says yes sooner.
`validate` asks the columns of a whole batch. `PlainDeltas` looks at one payload: most deltas have
one clock entry, names in ASCII, no metadata and few values, and for these it asks all that `check`
asks, in a few microseconds. Its no means nothing but that `check` has to say. It lays out such a
delta as quickly, and leaves every other one to `encode`.
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from operator import lt
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.delta import Delta
from penstock.model.delta_batch import DeltaBatch, Rows, explain, halves, sixteens
from penstock.model.delta_format import (
    AHEAD_MS_MAX,
    CLOCK_ORIGINS_MAX,
    COUNTER_MAX,
    HAS_INDICES,
    HAS_METADATA,
    HAS_PARENT,
    LOGICAL_BITS,
    NAMESPACE_BYTES_MAX,
    NO_ID,
    ORIGIN_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    TIME_MAX,
    VECTOR_ID_BYTES_MAX,
    VERSION,
    Op,
    PriorityClass,
    Source,
    check_origin,
)
from penstock.model.plain import METADATA_VALUES_MAX, fault_of

SMALL: Final = 4  # rows up to which checking one by one is quicker than setting columns up


def validate(batch: DeltaBatch, *, dimensions: int, now_ms: int) -> None:
    """Raise `InvalidArgument` for the first row that a topic of `dimensions` refuses.

    The columns answer quickly whether all is well; where they have a doubt, `check` reads the
    payloads one by one and says what is wrong.
    """
    if len(batch) > SMALL and _sound(batch, dimensions, now_ms):
        return
    for row in range(len(batch)):
        explain(batch.payload(row), row, dimensions=dimensions, now_ms=now_ms)


def sound_rows(batch: DeltaBatch, *, dimensions: int) -> NDArray[np.bool_]:
    """Which rows have the shape and the numbers of a delta of `dimensions`.

    For readers of a log: the rest was checked when the rows were written, and is merely passed on.
    """
    found = _shaped(batch, dimensions)
    found &= _numbers_fit(batch, dimensions)
    return found


def _sound(batch: DeltaBatch, dimensions: int, now_ms: int) -> bool:
    return (
        bool(_shaped(batch, dimensions).all())
        and _headers_fit(batch)
        and bool((batch.time >> LOGICAL_BITS).max() <= now_ms + AHEAD_MS_MAX)
        and bool(_numbers_fit(batch, dimensions).all())
        and _clocks_fit(batch)
        and _names_fit(batch)
        and _metadata_fits(batch)
    )


_INDEXED: Final = 8  # above the op in the key of shapes: HAS_INDICES, shifted
_ANY: Final = -1


@lru_cache
def _value_counts(dimensions: int) -> dict[tuple[Op, bool], tuple[int, int]]:
    """Least and most values by op and whether it has indices; a pair that is missing cannot be."""
    whole, some = (dimensions, dimensions), (1, dimensions)
    return {
        (Op.CREATE, False): whole, (Op.DENSE, False): whole, (Op.SPARSE, True): some,
        (Op.SCALE, False): (1, 1), (Op.OFFSET, False): whole, (Op.OFFSET, True): some,
        (Op.DELETE, False): (0, 0), (Op.METADATA, False): (0, 0),
    }  # fmt: skip


@lru_cache
def shapes(dimensions: int) -> tuple[Rows, Rows]:
    """`_value_counts` as columns, by op and `_INDEXED`; an impossible pair has most < 0."""
    least, most = np.ones(16, np.int64), np.full(16, _ANY, np.int64)
    for (op, indexed), counts in _value_counts(dimensions).items():
        key = op | _INDEXED * indexed
        least[key], most[key] = counts
    return least, most


# By op, and whether there is metadata: METADATA must have some, CREATE and DENSE may.
_METADATA_FITS: Final = np.isin(
    np.arange(16),
    [*(op for op in Op if op != Op.METADATA), *(8 + Op.CREATE, 8 + Op.DENSE, 8 + Op.METADATA)],
)
_ONE: Final = np.uint16(1)
_A: Final = np.uint64(0x9E3779B97F4A7C15)  # odd: multiplying by it loses nothing
_B: Final = np.uint64(0xC2B2AE3D27D4EB4F)


def _shaped(batch: DeltaBatch, dimensions: int) -> NDArray[np.bool_]:
    """Rows whose operation, class, time and number of values are possible."""
    f = batch.fixed
    op, flags, n = f["op"], f["flags"], f["n"]
    least, most = shapes(dimensions)
    shape = (op & 7) | (flags & HAS_INDICES) << 2
    good: NDArray[np.bool_] = (n >= least[shape]) & (n <= most[shape])
    good &= op < len(Op)
    good &= f["priority"] < len(PriorityClass)
    time = np.ascontiguousarray(f["time"])
    good &= (time >= 1) & (time <= TIME_MAX)
    return good


def _headers_fit(batch: DeltaBatch) -> bool:
    """The rest of the headers is within bounds, and flags say what there is."""
    f = batch.fixed
    parent, id_ = halves(batch.parent), halves(batch.delta_id)
    metadata = f["metadata_bytes"] != 0
    flags = ((parent[0] | parent[1]) != 0) * np.uint8(HAS_PARENT) | metadata * np.uint8(
        HAS_METADATA
    )
    good: NDArray[np.bool_] = (f["flags"] & ~np.uint8(HAS_INDICES)) == flags
    good &= _METADATA_FITS[f["op"] | metadata << 3]
    good &= ((id_[0] | id_[1]) != 0) & ((id_[0] != parent[0]) | (id_[1] != parent[1]))
    good &= (f["source"] < len(Source)) & (f["clocks"] <= CLOCK_ORIGINS_MAX)
    # These are unsigned: nothing less one is a lot.
    good &= (f["namespace_bytes"] - _ONE) < NAMESPACE_BYTES_MAX
    good &= (f["vector_id_bytes"] - _ONE) < VECTOR_ID_BYTES_MAX
    return bool(good.all()) and int(batch.sizes.max()) <= PAYLOAD_BYTES_MAX


def _numbers_fit(batch: DeltaBatch, dimensions: int) -> NDArray[np.bool_]:
    """Rows whose values are finite, and whose indices rise and stay below `dimensions`."""
    offsets, indices, values = batch.components()
    good = np.ones(len(batch), np.bool_)
    fine = np.isfinite(values)
    if indices.max(initial=0) >= dimensions:
        fine &= indices < dimensions
    rising = indices[1:] > indices[:-1]
    begins = offsets[1:-1]
    rising[begins[(begins > 0) & (begins < len(values))] - 1] = True  # where the next row begins
    fine[1:] &= rising
    if not fine.all():
        wrong = np.flatnonzero(~fine)
        good[np.searchsorted(offsets, wrong, side="right") - 1] = False
    return good


def _clocks_fit(batch: DeltaBatch) -> bool:
    if int(batch.fixed["clocks"].max()) == 1:
        origins, counters = batch.fixed["own"], batch.counter
    else:
        offsets, origins, counters = batch.clocks()
        if _repeats(offsets, origins):
            return False
    if batch.origin.tobytes() != batch.fixed["own"].tobytes():
        return False
    if not 1 <= int(counters.min()) <= int(counters.max()) <= COUNTER_MAX:
        return False
    return all(map(origin_fits, set(sixteens(origins))))


def _repeats(offsets: Rows, origins: NDArray[np.uint64]) -> bool:
    """Whether a clock may name an origin twice: `check` will tell."""
    low, high = halves(origins)
    row = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    mixed = ((low * _A ^ high) * _B ^ row) * _A
    mixed.sort()
    return bool((mixed[1:] == mixed[:-1]).any())


@lru_cache(maxsize=4096)
def origin_fits(origin: bytes) -> bool:
    try:
        check_origin(origin, "origin")
    except InvalidArgument:
        return False
    return True


def _names_fit(batch: DeltaBatch) -> bool:
    names = batch.hashed_names()
    text = b"".join(names)
    if not text.isascii() or text.count(0) != len(names):
        return False
    hashes = b"".join(map(xxhash.xxh3_128_digest, names))
    return hashes == np.ascontiguousarray(batch.vector).tobytes()


def _metadata_fits(batch: DeltaBatch) -> bool:
    rows = np.flatnonzero(batch.fixed["metadata_bytes"])
    found = batch.metadata_of(rows) if len(rows) else ()
    return all(fault_of(data, values_max=METADATA_VALUES_MAX) is None for data in found)


# --- one delta ---

WIDE: Final = 32  # values above which an array is quicker than numbers
_FIXED: Final = struct.Struct("<BBBBHBB16s16s16sq16sHHI16sQ")  # the header and its own clock entry
_CLASSES, _SOURCES = len(PriorityClass), len(Source)


class PlainDeltas:
    """The quick look at deltas for topics of so many `dimensions`."""

    __slots__ = ("_dimensions", "_shapes")

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        counts = _value_counts(dimensions)
        # A delta of the metadata alone has some, and is never plain.
        self._shapes = {shape: counts[shape] for shape in counts if shape[0] != Op.METADATA}

    def sure(self, payload: bytes, *, now_ms: int) -> bool:
        """Whether a payload is a plain delta that `check` would surely accept."""
        if len(payload) < _FIXED.size:
            return False
        (
            version, op, priority, source, n, clocks, flags, id_, parent, origin, time, vector,
            namespace_bytes, vector_id_bytes, metadata_bytes, own, counter,
        ) = _FIXED.unpack_from(payload)  # fmt: skip
        indexed = bool(flags & HAS_INDICES)
        least, most = self._shapes.get((op, indexed), (1, 0))
        names_at = _FIXED.size + n * (6 if indexed else 4)
        return (
            version == VERSION
            and least <= n <= most
            and priority < _CLASSES
            and source < _SOURCES
            and clocks == 1
            and metadata_bytes == 0
            and flags & ~HAS_INDICES == (0 if parent == NO_ID else HAS_PARENT)
            and id_ not in (NO_ID, parent)
            and own == origin
            and 1 <= counter <= COUNTER_MAX
            and 1 <= time <= TIME_MAX
            and time >> LOGICAL_BITS <= now_ms + AHEAD_MS_MAX
            and 1 <= namespace_bytes <= NAMESPACE_BYTES_MAX
            and 1 <= vector_id_bytes <= VECTOR_ID_BYTES_MAX
            and len(payload) == names_at + namespace_bytes + vector_id_bytes
            and origin_fits(origin)
            and _plain_names_fit(payload[names_at:], namespace_bytes, vector)
            and self._numbers_fit(payload, n, indexed=indexed)
        )

    def encode(self, delta: Delta) -> bytes | None:
        """The payload of a delta that is plain and surely valid; None: `delta.encode` has to say.

        What it gives is what that gives.
        """
        if delta.metadata is not None or len(delta.clock) != 1:
            return None
        indices, values = _few(delta.indices, "iu"), _few(delta.values, "iuf")
        id_, parent, time = delta.delta_id, delta.parent, delta.time
        counter = delta.clock.get(delta.origin)
        if indices is None or values is None or counter is None:
            return None
        indexed, n = delta.indices is not None, len(values)
        least, most = self._shapes.get((delta.op, indexed), (1, 0))
        names = _plain_names(delta)
        if (
            names is None
            or not least <= n <= most
            or (indexed and not (len(indices) == n and self._rise(indices)))
            or not (0 <= delta.priority < _CLASSES and 0 <= delta.source < _SOURCES)
            or not (type(time) is type(counter) is int)
            or not (1 <= time <= TIME_MAX and 1 <= counter <= COUNTER_MAX)
            or not (_is_id(id_) and (parent is None or (_is_id(parent) and parent != id_)))
        ):
            return None
        namespace, vector_id, origin = names
        flags = HAS_INDICES * indexed | HAS_PARENT * (parent is not None)
        digest = xxhash.xxh3_128_digest(namespace + b"\0" + vector_id)
        try:
            head = _FIXED.pack(
                VERSION, delta.op, delta.priority, delta.source, n, 1, flags, id_, parent or NO_ID,
                origin, time, digest, len(namespace), len(vector_id), 0, origin, counter,
            )  # fmt: skip
            numbers = _numbers(n, indexed).pack(*indices, *values)
        except (struct.error, OverflowError):
            return None
        total = sum(values)
        return head + numbers + namespace + vector_id if total - total == 0 else None

    def _rise(self, indices: list[int]) -> bool:
        within = not indices or (indices[0] >= 0 and indices[-1] < self._dimensions)
        return within and all(map(lt, indices, indices[1:]))

    def _numbers_fit(self, payload: bytes, n: int, *, indexed: bool) -> bool:
        """Indices rise and stay below the dimensions, values are finite."""
        if n > WIDE:
            return self._many_fit(payload, n, indexed=indexed)
        numbers = _numbers(n, indexed).unpack_from(payload, _FIXED.size)
        if indexed:
            indices, numbers = numbers[:n], numbers[n:]
            if indices[-1] >= self._dimensions or not all(map(lt, indices, indices[1:])):
                return False
        total = sum(numbers)
        return bool(total - total == 0)  # one that is not finite leaves a trace in the sum

    def _many_fit(self, payload: bytes, n: int, *, indexed: bool) -> bool:
        at = _FIXED.size
        if indexed:
            indices = np.frombuffer(payload, "<u2", n, at)
            at += 2 * n
            if indices[-1] >= self._dimensions or not (indices[1:] > indices[:-1]).all():
                return False
        return bool(np.isfinite(np.frombuffer(payload, "<f4", n, at)).all())


def _few(numbers: Any, kinds: str) -> list[Any] | None:
    """A few numbers as a list; None: they are many, or of another kind."""
    if numbers is None:
        return []
    plain = isinstance(numbers, np.ndarray) and numbers.ndim == 1 and len(numbers) <= WIDE
    return numbers.tolist() if plain and numbers.dtype.kind in kinds else None


def _is_id(id_: object) -> bool:
    return type(id_) is bytes and len(id_) == len(NO_ID) and id_ != NO_ID


def _plain_names(delta: Delta) -> tuple[bytes, bytes, bytes] | None:
    """The namespace, the vector_id and the padded origin, if they are plain text."""
    namespace, vector_id, origin = delta.namespace, delta.vector_id, delta.origin
    try:
        text = f"{namespace}\0{vector_id}\0{origin}".encode("ascii")
    except UnicodeEncodeError:
        return None
    parts = text.split(b"\0")
    if len(parts) != 3 or not all(parts):
        return None
    fits = (
        len(parts[0]) <= NAMESPACE_BYTES_MAX
        and len(parts[1]) <= VECTOR_ID_BYTES_MAX
        and len(parts[2]) <= ORIGIN_BYTES_MAX
        and type(namespace) is type(vector_id) is type(origin) is str
    )
    return (parts[0], parts[1], parts[2].ljust(ORIGIN_BYTES_MAX, b"\0")) if fits else None


def _plain_names_fit(names: bytes, namespace_bytes: int, vector: bytes) -> bool:
    """Whether the names are ASCII without zeros, and the vector's hash is that of the names."""
    if not names.isascii() or 0 in names:
        return False
    hashed = names[:namespace_bytes] + b"\0" + names[namespace_bytes:]
    return xxhash.xxh3_128_digest(hashed) == vector


@cache  # at most as many as there may be numbers, twice
def _numbers(n: int, indexed: bool) -> struct.Struct:
    return struct.Struct(f"<{n}H{n}f" if indexed else f"<{n}f")


@cache
def plain_deltas(dimensions: int) -> PlainDeltas:
    return PlainDeltas(dimensions)
