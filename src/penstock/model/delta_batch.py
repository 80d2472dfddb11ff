"""The columns of many deltas, read in place from their payloads.

A `DeltaBatch` is a blob and where each payload starts in it; the fixed part of every payload (the
header and its own clock entry, 112 bytes) is gathered once into a structured array. The ragged
parts (components, clocks) are gathered when asked for, group by group of rows of one shape, so
that no step runs row by row. Taking rows copies no payload.

Sizes are checked when a batch is made, so nothing below can read outside of a payload, whatever
its bytes. What the bytes *say* is checked by `penstock.model.delta_checks.validate`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Binary, Buffer, Columns
from penstock.model.delta import CLOCK, HAS_INDICES, HEADER, VERSION, check, decode, refuse

T = TypeVar("T", bound=np.generic)
Rows = NDArray[np.int64]
PAIR: Final = ("<u8", (2,))  # 16 bytes as two numbers: equality is cheap, zeros are kept
CLOCK_DTYPE: Final = np.dtype([("origin", *PAIR), ("counter", "<u8")])
FIXED: Final = np.dtype(
    [
        ("version", "u1"), ("op", "u1"), ("priority", "u1"), ("source", "u1"),
        ("n", "<u2"), ("clocks", "u1"), ("flags", "u1"),
        ("delta_id", *PAIR), ("parent", *PAIR), ("origin", *PAIR), ("time", "<i8"),
        ("vector", *PAIR), ("namespace_bytes", "<u2"), ("vector_id_bytes", "<u2"),
        ("metadata_bytes", "<u4"), ("own", *PAIR), ("counter", "<u8"),
    ]
)  # fmt: skip

FEW: Final = 24  # rows up to which reading them one by one is quicker than setting columns up
_SIZES: Final = struct.Struct("<BxxxHBB72xHHI")  # of the header: what says how long a payload is
_VALUE_BYTES: Final = np.int64(4)  # and two more with the flag of indices, which happens to be 2


class FixedColumn(Generic[T]):
    """A column of the fixed parts, by the name under which a batch has it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: DeltaBatch, owner: type) -> NDArray[T]:
        column: NDArray[T] = batch.fixed[self._name]
        return column


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """Deltas in the order of their log, or in the order in which they were taken."""

    blob: Buffer
    starts: Rows  # of each payload in the blob
    fixed: NDArray[Any]  # dtype FIXED
    sequences: NDArray[np.uint64]
    log_times_ms: NDArray[np.int64]
    headers: Binary | None = None  # the messages' headers, for routing
    _parts: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(
        payloads: Binary | Sequence[bytes], *, sequences: NDArray[np.uint64] | None = None,
        log_times_ms: NDArray[np.int64] | None = None, headers: Binary | None = None,
    ) -> DeltaBatch:  # fmt: skip
        """Columns over payloads; raises `InvalidArgument` where sizes do not add up."""
        if not isinstance(payloads, Binary):
            payloads = Binary.of(payloads)
        count = len(payloads)
        starts, fixed, parts = _few(payloads) if count <= FEW else _many(payloads)
        if count and not payloads.offsets[0] and payloads.offsets[-1] == len(payloads.blob):
            parts["payloads"] = payloads
        if sequences is None:
            sequences = np.arange(1, count + 1, dtype=np.uint64)
        if log_times_ms is None:
            log_times_ms = np.zeros(count, np.int64)
        return DeltaBatch(payloads.blob, starts, fixed, sequences, log_times_ms, headers, parts)

    @staticmethod
    def empty() -> DeltaBatch:
        return _EMPTY

    def __len__(self) -> int:
        return len(self.starts)

    op = FixedColumn[np.uint8]()
    priority = FixedColumn[np.uint8]()
    source = FixedColumn[np.uint8]()
    n = FixedColumn[np.uint16]()
    delta_id = FixedColumn[np.uint64]()  # (rows, 2): an id's sixteen bytes as two numbers
    parent = FixedColumn[np.uint64]()
    origin = FixedColumn[np.uint64]()
    vector = FixedColumn[np.uint64]()
    time = FixedColumn[np.int64]()
    counter = FixedColumn[np.uint64]()  # of each delta's own origin in its clock

    # --- the ragged parts ---

    def components(self) -> tuple[Rows, NDArray[np.uint16], NDArray[np.float32]]:
        """(offsets, indices, values); a row without indices gets 0, 1, 2 …"""
        found = self._parts.get("components")
        if found is None:
            found = self._parts["components"] = _components(self)
        return found

    def clocks(self) -> tuple[Rows, NDArray[np.uint64], NDArray[np.uint64]]:
        """(offsets, origins (entries, 2), counters), the own origin first in each row."""
        found = self._parts.get("clocks")
        if found is None:
            found = self._parts["clocks"] = _clocks(self)
        return found

    @property
    def names_at(self) -> Rows:
        """Where each namespace starts in the blob; the vector_id follows, then the metadata."""
        n = self.n.astype(np.int64)
        indexed = (self.fixed["flags"] & HAS_INDICES) != 0
        ragged: Rows = CLOCK.size * self.fixed["clocks"].astype(np.int64) + n * (4 + 2 * indexed)
        return self.starts + HEADER.size + ragged

    def names(self) -> list[tuple[bytes, bytes]]:
        """Namespace and vector id of each row."""
        payloads = self.payloads
        blob, at = bytes(payloads.blob), self.names_at - self.starts + payloads.offsets[:-1]
        middle = at + self.fixed["namespace_bytes"]
        end = middle + self.fixed["vector_id_bytes"]
        cuts = zip(at.tolist(), middle.tolist(), end.tolist(), strict=True)
        return [(blob[a:b], blob[b:c]) for a, b, c in cuts]

    def metadata(self, row: int) -> bytes:
        """The msgpack map of a row, empty where it has none."""
        return self.metadata_of(np.array([row]))[0]

    def metadata_of(self, rows: Rows) -> list[bytes]:
        """The msgpack maps of these rows."""
        fixed = self.fixed[rows]
        ends = self.starts[rows] + _sizes(fixed)
        starts = ends - fixed["metadata_bytes"]
        view = memoryview(self.blob)
        cuts = zip(starts.tolist(), ends.tolist(), strict=True)
        return [view[a:b].tobytes() for a, b in cuts]

    @property
    def sizes(self) -> Rows:
        found = self._parts.get("sizes")
        if found is None:
            found = self._parts["sizes"] = _sizes(self.fixed)
        return found

    def payload(self, row: int) -> bytes:
        start = int(self.starts[row])
        return bytes(self.blob[start : start + int(_sizes(self.fixed[row : row + 1])[0])])

    @property
    def payloads(self) -> Binary:
        """The payloads one behind the other; a copy, unless they already lie so."""
        found = self._parts.get("payloads")
        if found is None:
            found = self._parts["payloads"] = packed(self.blob, self.starts, self.sizes)
        return found

    def pieces(self, rows: Rows) -> list[Buffer]:
        """The payloads of these rows, not copied."""
        view, starts = memoryview(self.blob), self.starts[rows]
        cuts = zip(starts.tolist(), (starts + self.sizes[rows]).tolist(), strict=True)
        return [view[a:b] for a, b in cuts]

    def headers_of(self, rows: Rows) -> list[bytes]:
        return [b""] * len(rows) if self.headers is None else self.headers.take(rows)

    def delta_ids(self) -> list[bytes]:
        return sixteens(self.delta_id)

    # --- other batches ---

    def take(self, rows: NDArray[Any]) -> DeltaBatch:
        """These rows (numbers or a mask) in that order, over the same blob."""
        if rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        headers = self.headers
        if headers is not None:
            ends = headers.offsets.astype(np.int64)
            headers = packed(headers.blob, ends[rows], ends[rows + 1] - ends[rows])
        taken = DeltaBatch(
            self.blob, self.starts[rows], self.fixed[rows], self.sequences[rows],
            self.log_times_ms[rows], headers,
        )  # fmt: skip
        if "sizes" in self._parts:
            taken._parts["sizes"] = self.sizes[rows]
        return taken

    @staticmethod
    def joined(
        pieces: Sequence[Buffer], *, sequences: NDArray[np.uint64],
        log_times_ms: NDArray[np.int64], headers: Binary | None,
    ) -> DeltaBatch:  # fmt: skip
        """Payloads of other batches, one behind the other in a buffer of their own."""
        blob = b"".join(pieces)
        ends = np.fromiter(accumulate(map(len, pieces), initial=0), np.int64, len(pieces) + 1)
        # Joining records would be slow: numpy compares their types for each part.
        fixed = gather(blob, ends[:-1], FIXED)
        return DeltaBatch(blob, ends[:-1], fixed, sequences, log_times_ms, headers)

    @staticmethod
    def concat(batches: Sequence[DeltaBatch]) -> DeltaBatch:
        full = [batch for batch in batches if len(batch)]
        if len(full) <= 1:
            return full[0] if full else DeltaBatch.empty()
        headers = None
        if any(batch.headers is not None for batch in full):
            headers = joined([batch.headers or blank(len(batch)) for batch in full])
        payloads = joined([batch.payloads for batch in full])
        starts = payloads.offsets[:-1].astype(np.int64)
        return DeltaBatch(
            payloads.blob,
            starts,
            # numpy compares the types of records field by field for each part that it joins
            gather(payloads.blob, starts, FIXED),
            np.concatenate([batch.sequences for batch in full]),
            np.concatenate([batch.log_times_ms for batch in full]),
            headers,
        )

    def decoded(self) -> list[Any]:
        """The rows as `Delta`s, for people and tests."""
        return [decode(payload) for payload in self.payloads]


_EMPTY: Final = DeltaBatch(
    b"", np.empty(0, np.int64), np.empty(0, FIXED), np.empty(0, np.uint64), np.empty(0, np.int64)
)


# --- making one ---


def _many(payloads: Binary) -> tuple[Rows, NDArray[Any], dict[str, Any]]:
    """Where payloads start, their fixed parts, and what else is known by then."""
    ends = payloads.offsets.astype(np.int64)
    starts, sizes = ends[:-1], ends[1:] - ends[:-1]
    _check_bounds(payloads, sizes)
    fixed = gather(payloads.blob, starts, FIXED)
    _check_sizes(payloads, fixed, sizes)
    return starts, fixed, {"sizes": sizes}


def _few(payloads: Binary) -> tuple[Rows, NDArray[Any], dict[str, Any]]:
    """What `_many` gives, found row by row. If a row is wrong, `_many` is asked to say how."""
    ends = payloads.offsets.tolist()
    blob, width, unpack = payloads.blob, FIXED.itemsize, _SIZES.unpack_from
    if ends[0] < 0 or ends[-1] > len(blob):
        return _many(payloads)
    sizes = []
    for start, end in pairwise(ends):
        if end - start < width:
            return _many(payloads)
        sizes.append(end - start)
        version, n, clocks, flags, namespace, vector_id, metadata = unpack(blob, start)
        size = HEADER.size + CLOCK.size * clocks + n * (4 + (flags & HAS_INDICES))
        size += namespace + vector_id + metadata
        if version != VERSION or not clocks or size != end - start:
            return _many(payloads)
    starts = ends[:-1]
    heads = b"".join([blob[start : start + width] for start in starts])
    known = {"sizes": np.array(sizes, np.int64)}
    return np.array(starts, np.int64), np.frombuffer(heads, FIXED), known


def _sizes(fixed: NDArray[Any]) -> Rows:
    """How long each payload is by its header."""
    total: Rows = fixed["metadata_bytes"].astype(np.int64)
    total += fixed["n"] * (_VALUE_BYTES + (fixed["flags"] & np.uint8(HAS_INDICES)))
    total += CLOCK.size * fixed["clocks"].astype(np.int64)
    total += fixed["namespace_bytes"]
    total += fixed["vector_id_bytes"]
    total += HEADER.size
    return total


def _check_bounds(payloads: Binary, sizes: Rows) -> None:
    """No payload is shorter than the fixed part, nor outside of the blob."""
    if not len(sizes):
        return
    if int(sizes.min()) < FIXED.itemsize:
        row = int(np.argmax(sizes < FIXED.itemsize))
        raise refuse(
            f"delta {row}: it has {max(0, int(sizes[row]))} bytes, less than its header and clock",
            "payload",
            FIXED.itemsize,
        )
    if payloads.offsets[0] < 0 or payloads.offsets[-1] > len(payloads.blob):
        raise refuse("payloads lie outside of their blob", "payload")


def _check_sizes(payloads: Binary, fixed: NDArray[Any], sizes: Rows) -> None:
    bad = (fixed["clocks"] == 0) | (_sizes(fixed) != sizes) | (fixed["version"] != VERSION)
    if bad.any():
        row = int(np.argmax(bad))
        explain(payloads[row], row)
        raise refuse(f"delta {row}: its sizes do not add up", "payload")


def explain(payload: bytes, row: int, **bounds: int) -> None:
    """Raise what `check` says of a payload, with the row in front."""
    try:
        check(payload, **bounds)
    except InvalidArgument as error:
        raise refuse(f"delta {row}: {error.message}", error.field, error.limit) from None


# --- ragged columns, by groups of rows of one shape ---


def _components(batch: DeltaBatch) -> tuple[Rows, NDArray[np.uint16], NDArray[np.float32]]:
    n = batch.n.astype(np.int64)
    offsets = np.zeros(len(n) + 1, np.int64)
    np.cumsum(n, out=offsets[1:])
    indexed = (batch.fixed["flags"] & HAS_INDICES) != 0
    starts = batch.starts + HEADER.size + CLOCK.size * batch.fixed["clocks"].astype(np.int64)
    indices = np.empty(offsets[-1], np.uint16)
    values = np.empty(offsets[-1], np.float32)
    for shape, rows in groups(n * 2 + indexed):
        width, has_indices = shape >> 1, shape & 1
        if not width:
            continue
        kind = np.dtype([("i", "<u2", (width,)), ("v", "<f4", (width,))][not has_indices :])
        found = gather(batch.blob, starts[rows], kind)
        at = slice(None) if len(rows) == len(n) else offsets[rows][:, None] + np.arange(width)
        values[at] = found["v"].reshape(-1) if isinstance(at, slice) else found["v"]
        named = found["i"] if has_indices else np.broadcast_to(np.arange(width), (len(rows), width))
        indices[at] = named.reshape(-1) if isinstance(at, slice) else named
    return offsets, indices, values


def _clocks(batch: DeltaBatch) -> tuple[Rows, NDArray[np.uint64], NDArray[np.uint64]]:
    count = batch.fixed["clocks"].astype(np.int64)
    offsets = np.zeros(len(count) + 1, np.int64)
    np.cumsum(count, out=offsets[1:])
    entries = np.empty(offsets[-1], CLOCK_DTYPE)
    for width, rows in groups(count):
        found = gather(batch.blob, batch.starts[rows] + HEADER.size, _row_of(CLOCK_DTYPE, width))
        entries[offsets[rows][:, None] + np.arange(width)] = found["x"]
    return offsets, entries["origin"], entries["counter"]


def _row_of(dtype: np.dtype[Any], width: int) -> np.dtype[Any]:
    return np.dtype([("x", dtype, (width,))])


# --- out of the batches of a log ---


def deltas_of(batches: Sequence[Batch]) -> DeltaBatch:
    """The deltas in these batches of a log, in its order."""
    return DeltaBatch.concat(
        [deltas_in(batch, batch.columns()) for batch in batches if batch.kind is Kind.ENQ]
    )


def deltas_in(batch: Batch, columns: Columns) -> DeltaBatch:
    """The deltas of one ENQ batch, whose columns are at hand."""
    payloads = columns.binary("payload")
    if payloads is None:
        return DeltaBatch.empty()
    sequences = np.arange(batch.first, batch.first + batch.entries, dtype=np.uint64)
    if batch.compacted:
        sequences = columns.fixed("sequence")
    return DeltaBatch.of(
        payloads,
        sequences=sequences,
        log_times_ms=np.full(len(payloads), batch.time_ms, np.int64),
        headers=columns.binary("headers"),
    )


# --- pieces of a buffer, wherever they lie, without a loop over rows ---


def gather(blob: Buffer, starts: Rows, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The records of `dtype` that begin at `starts`: one copy each, wherever they lie."""
    if not len(starts):
        return np.empty(0, dtype)
    size = dtype.itemsize
    places = len(blob) - size + 1
    everywhere: NDArray[Any] = np.ndarray((places,), f"V{size}", blob, strides=(1,))
    return everywhere[starts].view(dtype)


def sixteens(pairs: NDArray[np.uint64]) -> list[bytes]:
    """Rows of two numbers as the sixteen bytes that they were read from."""
    data = np.ascontiguousarray(pairs).tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def halves(pairs: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Two numbers per row as two columns."""
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def packed(blob: Buffer, starts: Rows, sizes: Rows) -> Binary:
    """Pieces of a blob one behind the other, joined by stretches that already lie so."""
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise refuse("a batch of deltas holds at most 2 GiB", "payload", np.iinfo(np.int32).max)
    ends = starts + sizes
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    firsts = np.concatenate(([0], breaks)) if len(starts) else breaks
    lasts = np.concatenate((breaks, [len(starts)])) if len(starts) else breaks
    view = memoryview(blob)
    cuts = zip(starts[firsts].tolist(), ends[lasts - 1].tolist(), strict=True)
    pieces = [view[a:b] for a, b in cuts]
    return Binary(offsets.astype(np.int32), pieces[0] if len(pieces) == 1 else b"".join(pieces))


def joined(parts: list[Binary]) -> Binary:
    sizes = np.concatenate([np.diff(part.offsets).astype(np.int64) for part in parts])
    blob = b"".join([memoryview(p.blob)[p.offsets[0] : p.offsets[-1]] for p in parts])
    return packed(blob, np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes)


def blank(count: int) -> Binary:
    return Binary(np.zeros(count + 1, np.int32), b"")


def groups(shapes: Rows) -> list[tuple[int, Rows]]:
    """Each shape that occurs, with the rows that have it."""
    if not len(shapes):
        return []
    if (shapes == shapes[0]).all():
        return [(int(shapes[0]), np.arange(len(shapes)))]
    order = np.argsort(shapes, kind="stable")
    ranked = shapes[order]
    cuts = [0, *(np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist(), len(ranked)]
    return [(int(ranked[a]), order[a:b]) for a, b in pairwise(cuts)]
