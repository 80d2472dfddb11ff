"""Many deltas at once: their columns (`DeltaBatch`), and whether a topic accepts them."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.delta_batch import FIXED, DeltaBatch, Rows, explain, gather, halves, sixteens
from penstock.model.delta_format import (
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
    metadata_of,
)

__all__ = ["FIXED", "DeltaBatch", "gather", "halves", "sixteens", "sound_rows", "validate"]

SMALL: Final = 8  # rows up to which checking one by one is quicker than setting columns up


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


_INDEXED: Final = 8  # above the op in the key of _shapes: HAS_INDICES, shifted
_ANY: Final = -1


@lru_cache
def _shapes(dimensions: int) -> tuple[Rows, Rows]:
    """Least and most values by op and whether it has indices; an impossible pair has most < 0."""
    least, most = np.ones(16, np.int64), np.full(16, _ANY, np.int64)
    for op, low, high in (
        (Op.CREATE, dimensions, dimensions),
        (Op.DENSE, dimensions, dimensions),
        (Op.SPARSE | _INDEXED, 1, dimensions),
        (Op.SCALE, 1, 1),
        (Op.OFFSET, dimensions, dimensions),
        (Op.OFFSET | _INDEXED, 1, dimensions),
        (Op.DELETE, 0, 0),
        (Op.METADATA, 0, 0),
    ):
        least[op], most[op] = low, high
    return least, most


_TAKES_METADATA: Final = np.isin(np.arange(8), (Op.CREATE, Op.DENSE, Op.METADATA))


def _shaped(batch: DeltaBatch, dimensions: int) -> NDArray[np.bool_]:
    """Rows whose operation, class, time and number of values are possible."""
    f = batch.fixed
    op, flags, n = f["op"], f["flags"], f["n"]
    least, most = _shapes(dimensions)
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
    op, flags, sizes = f["op"], f["flags"], f["metadata_bytes"] != 0
    parent, id_ = halves(batch.parent), halves(batch.delta_id)
    good: NDArray[np.bool_] = (flags <= 7) & (f["source"] < len(Source))
    good &= ((flags & HAS_PARENT) != 0) == ((parent[0] | parent[1]) != 0)
    good &= ((flags & HAS_METADATA) != 0) == sizes
    good &= (_TAKES_METADATA[op] | ~sizes) & ((op != Op.METADATA) | sizes)
    good &= ((id_[0] | id_[1]) != 0) & ((id_[0] != parent[0]) | (id_[1] != parent[1]))
    good &= f["clocks"] <= CLOCK_ORIGINS_MAX
    names = f["namespace_bytes"], f["vector_id_bytes"]
    good &= (names[0] <= NAMESPACE_BYTES_MAX) & (names[0] >= 1)
    good &= (names[1] <= VECTOR_ID_BYTES_MAX) & (names[1] >= 1)
    return bool(good.all()) and int(batch.sizes.max()) <= PAYLOAD_BYTES_MAX


def _numbers_fit(batch: DeltaBatch, dimensions: int) -> NDArray[np.bool_]:
    """Rows whose values are finite, and whose indices rise and stay below `dimensions`."""
    offsets, indices, values = batch.components()
    good = np.ones(len(batch), np.bool_)
    wrong = np.flatnonzero(~(np.isfinite(values) & (indices < dimensions)))
    good[np.searchsorted(offsets, wrong, side="right") - 1] = False
    begins = np.zeros(len(values) + 1, np.bool_)
    begins[offsets] = True
    falling = np.flatnonzero((indices[1:] <= indices[:-1]) & ~begins[1:-1]) + 1
    good[np.searchsorted(offsets, falling, side="right") - 1] = False
    return good


def _clocks_fit(batch: DeltaBatch) -> bool:
    offsets, origins, counters = batch.clocks()
    letters = np.ascontiguousarray(origins).view(np.uint8).reshape(-1, 16)
    if letters.max(initial=0) >= 0x80 or not letters[:, 0].all():
        return False  # not ASCII: let `check` see whether it is UTF-8
    zero = letters == 0
    if (zero[:, :-1] & ~zero[:, 1:]).any() or (batch.origin != batch.fixed["own"]).any():
        return False
    if counters.min(initial=1) < 1 or counters.max(initial=1) > COUNTER_MAX:
        return False
    if len(counters) == len(batch):
        return True
    row = np.repeat(np.arange(len(batch)), np.diff(offsets))
    order = np.lexsort((origins[:, 0], origins[:, 1], row))
    same = (origins[order[1:]] == origins[order[:-1]]).all(axis=1)
    return not bool((same & (row[order[1:]] == row[order[:-1]])).any())


def _names_fit(batch: DeltaBatch) -> bool:
    namespaces, vector_ids = batch.name_bytes()
    names = [n + b"\0" + v for n, v in zip(namespaces, vector_ids, strict=True)]
    text = b"".join(names)
    if not text.isascii() or text.count(0) != len(names):
        return False
    hashes = b"".join(map(xxhash.xxh3_128_digest, names))
    return hashes == np.ascontiguousarray(batch.vector).tobytes()


def _metadata_fits(batch: DeltaBatch) -> bool:
    for row in np.flatnonzero(batch.fixed["metadata_bytes"]).tolist():
        try:
            metadata_of(batch.metadata(row))
        except InvalidArgument:
            return False
    return True
