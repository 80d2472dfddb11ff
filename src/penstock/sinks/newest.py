"""Which of several states of a vector is the newest.

Keys and revisions of all rows are looked at first, in bounded memory per row; the vectors
themselves are then streamed, and only the rows that won are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


def vector_keys(table: pa.Table | pa.RecordBatch) -> pa.Array:
    """One string per row that stands for (namespace, vector_id)."""
    joined = pc.binary_join_element_wise(table["namespace"], table["vector_id"], "\0")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def newest(keys: pa.Array | pa.ChunkedArray, revisions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True for one row of each key: the one with the highest revision, of equals the last."""
    encoded = keys.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((revisions, codes))
    sorted_codes = codes[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = sorted_codes[1:] != sorted_codes[:-1]
    chosen = np.zeros(len(order), np.bool_)
    chosen[order[last]] = True
    return chosen


def newest_of(states: pa.Table) -> pa.Table:
    """STATES with the newest row of each vector only."""
    chosen = newest(vector_keys(states), states["revision"].to_numpy())
    return states if chosen.all() else states.filter(pa.array(chosen))


def winners(batches: Iterable[pa.RecordBatch]) -> NDArray[np.bool_]:
    """`newest` over a stream of rows with namespace, vector_id and revision."""
    keys: list[pa.Array] = []
    revisions: list[NDArray[np.int64]] = []
    for batch in batches:
        keys.append(vector_keys(batch).cast(pa.large_utf8()))
        revisions.append(batch["revision"].to_numpy())
    if not keys:
        return np.zeros(0, np.bool_)
    return newest(pa.chunked_array(keys), np.concatenate(revisions))


def chosen_rows(
    batches: Iterable[pa.RecordBatch], chosen: NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """The chosen rows of a stream, which must come in the order in which they were judged."""
    at = 0
    for batch in batches:
        mask = chosen[at : at + len(batch)]
        at += len(batch)
        if mask.all():
            yield batch
        elif mask.any():
            yield batch.filter(pa.array(mask))
