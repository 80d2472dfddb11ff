"""Whether a topic accepts deltas, many at once by their columns.

`check` of `penstock.model.delta` is the authority; what is here only says yes sooner.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.delta import (
    AHEAD_MS_MAX,
    CLOCK_ORIGINS_MAX,
    COUNTER_MAX,
    HAS_INDICES,
    HAS_METADATA,
    HAS_PARENT,
    LOGICAL_BITS,
    NAMESPACE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    TIME_MAX,
    VECTOR_ID_BYTES_MAX,
    Op,
    PriorityClass,
    Source,
    check_origin,
    value_counts,
)
from penstock.model.delta_batch import DeltaBatch, Rows, explain, halves, sixteens
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
    """Which rows have the shape and the numbers of a delta of `dimensions`. For readers of a log:
    the rest was checked when the rows were written, and is merely passed on."""
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
def shapes(dimensions: int) -> tuple[Rows, Rows]:
    """`value_counts` as columns, by op and `_INDEXED`; an impossible pair has most < 0."""
    least, most = np.ones(16, np.int64), np.full(16, _ANY, np.int64)
    for (op, indexed), counts in value_counts(dimensions).items():
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
    return all(map(_origin_fits, set(sixteens(origins))))


def _repeats(offsets: Rows, origins: NDArray[np.uint64]) -> bool:
    """Whether a clock may name an origin twice: `check` will tell."""
    low, high = halves(origins)
    row = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    mixed = ((low * _A ^ high) * _B ^ row) * _A
    mixed.sort()
    return bool((mixed[1:] == mixed[:-1]).any())


@lru_cache(maxsize=4096)
def _origin_fits(origin: bytes) -> bool:
    try:
        check_origin(origin, "origin")
    except InvalidArgument:
        return False
    return True


def _names_fit(batch: DeltaBatch) -> bool:
    names = [namespace + b"\0" + vector_id for namespace, vector_id in batch.names()]
    text = b"".join(names)
    if not text.isascii() or text.count(0) != len(names):
        return False
    hashes = b"".join(map(xxhash.xxh3_128_digest, names))
    return hashes == np.ascontiguousarray(batch.vector).tobytes()


def _metadata_fits(batch: DeltaBatch) -> bool:
    rows = np.flatnonzero(batch.fixed["metadata_bytes"])
    found = batch.metadata_of(rows) if len(rows) else ()
    return all(fault_of(data, values_max=METADATA_VALUES_MAX) is None for data in found)
