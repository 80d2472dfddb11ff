"""A fold's state as one number: equal for equal histories, however they were cut into feeds.

Numbers of vectors, chains and origins depend on the cuts, so rows are sorted by what they stand for
and origins go by their rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from penstock.propagation.table import Numbers

if TYPE_CHECKING:
    from penstock.propagation.partition import Propagator


def digest(fold: Propagator) -> int:
    """Over merged states, chains, remembered ids and pending deltas."""
    found = xxhash.xxh3_64()
    found.update(msgspec.msgpack.encode([fold.dimensions, fold.sequence, fold.ordinal]))
    _add_vectors(found, fold)
    _add_chains(found, fold)
    _add_ids(found, fold)
    for waiting in sorted(fold.pending.by_id.values()):
        found.update(waiting.payload)
    return found.intdigest()


def _add_vectors(found: Any, fold: Propagator) -> None:
    ledger, merge = fold.ledger, fold.merge
    vectors = _sorted_vectors(fold)
    vectors = vectors[merge.table["revision"][vectors] > 0]
    for name in ("low", "high"):
        found.update(ledger.vectors.table[name][vectors])
    for name in ("revision", "time", "sequence", "log_time_ms"):
        found.update(merge.table[name][vectors])
    table = merge.registers.table
    for name in ("values", "times", "existence", "existence_time", "metadata_time"):
        found.update(table[name][vectors])
    for name in ("writers", "existence_writer", "metadata_writer"):
        time = table["times" if name == "writers" else name.replace("writer", "time")][vectors]
        writer = table[name][vectors]
        found.update(np.where(time > 0, ledger.ranks[writer], 0))
    operations, metadata = merge.operations, merge.registers.metadata
    for vector in vectors.tolist():
        if vector in operations.lists or vector in operations.folds or vector in metadata:
            found.update(metadata.get(vector, b""))
            found.update(repr(operations.folds.get(vector)).encode())
            for operation in operations.lists.get(vector, ()):
                found.update(repr((operation.stamp, operation.scale)).encode())
                found.update(b"" if operation.indices is None else operation.indices.tobytes())
                found.update(operation.values.tobytes())


def _sorted_vectors(fold: Propagator) -> Numbers:
    fold.merge.reserve()
    table = fold.ledger.vectors.table
    return np.lexsort((table.rows("low"), table.rows("high")))


def _add_chains(found: Any, fold: Propagator) -> None:
    """Chains of which anything was seen, by vector and origin."""
    table = fold.ledger.chains.table
    chains = np.flatnonzero(table.rows("seen"))
    place = np.empty(len(fold.ledger.vectors), np.int64)
    place[_sorted_vectors(fold)] = np.arange(len(place))
    vector = place[table["low"][chains].view(np.int64)]
    rank = fold.ledger.ranks[table["high"][chains].view(np.int64)]
    order = np.lexsort((rank, vector))
    for column in (vector, rank, *(table[name][chains] for name in ("seen", "time", "head"))):
        found.update(np.ascontiguousarray(column[order]))


def _add_ids(found: Any, fold: Propagator) -> None:
    ledger, table = fold.ledger, fold.ledger.ids.table
    recent = table.rows("log_time_ms") >= ledger.time_ms - ledger.dedup_ms
    ids = np.flatnonzero((table.rows("vector") > 0) & recent)
    order = ids[np.lexsort((table["low"][ids], table["high"][ids]))]
    for name in ("low", "high", "log_time_ms"):
        found.update(table[name][order])
