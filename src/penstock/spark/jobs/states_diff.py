"""A sink's vectors held against the fold, a batch of the scan at a time.

The fold's states lie in one mapped table per log partition. A row of the scan is looked up by the
hash of its name and compared column by column: the revision, the bits of the values, the bytes of
the metadata. Each expected row counts how often it was met, so that at the end what was never met
is missing, and what was met twice is there twice. Memory is a few dozen bytes per vector.

A row of a lower revision than the fold's is behind, one of a higher revision is ahead. Two rows
of the same revision must be equal always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from penstock.spark.jobs.differences import Comparison, Excuse

Mask = NDArray[np.bool_]
Places = NDArray[np.int64]


class Expected:
    """The states of all partitions, found by the name of their vector."""

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        self._tables = [table.combine_chunks() for table in tables if table.num_rows]
        hashes = [keys_of(t["namespace"], t["vector_id"]) for t in self._tables]
        keys = np.concatenate([np.zeros((0, 2), np.uint64), *hashes])
        revision = np.concatenate(
            [np.zeros(0, np.int64), *(_numbers(t, "revision") for t in self._tables)]
        )
        deleted = np.concatenate(
            [np.zeros(0, np.bool_), *(_numbers(t, "deleted") for t in self._tables)]
        )
        table = np.repeat(np.arange(len(hashes)), [len(keys) for keys in hashes])
        row = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(keys)) for keys in hashes)])
        # Of a vector that two topics have, sinks keep the higher revision.
        order = np.lexsort((revision, keys[:, 1], keys[:, 0]))
        last = np.ones(len(order), np.bool_)
        last[:-1] = (keys[order][1:] != keys[order][:-1]).any(axis=1)
        kept = order[last]
        self._keys, self._table, self._row = keys[kept], table[kept], row[kept]
        self.revision, self.alive = revision[kept], ~deleted[kept]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: NDArray[np.uint64]) -> Places:
        """Where each key is, -1: nowhere."""
        at = np.searchsorted(self._keys[:, 0], keys[:, 0])
        found = np.full(len(keys), -1, np.int64)
        todo = np.arange(len(keys))
        while len(todo):  # once, but for keys that share their first half
            inside = at[todo] < len(self._keys)
            todo = todo[inside]
            todo = todo[self._keys[at[todo], 0] == keys[todo, 0]]
            hit = self._keys[at[todo], 1] == keys[todo, 1]
            found[todo[hit]] = at[todo[hit]]
            todo = todo[~hit]
            at[todo] += 1
        return found

    def among(self, keys: NDArray[np.uint64]) -> Mask:
        """Which of the rows have one of these keys."""
        mask = np.zeros(len(self), np.bool_)
        places = self.find(keys)
        mask[places[places >= 0]] = True
        return mask

    def groups(self, places: Places) -> Iterator[tuple[pa.Table, Places, Places]]:
        """(table, rows in it, index into `places`) for every table that has some of them."""
        for number in np.unique(self._table[places]):
            index = np.flatnonzero(self._table[places] == number)
            yield self._tables[number], self._row[places[index]], index

    def name(self, place: Any) -> dict[str, Any]:
        """Who a row is, for people."""
        table, row = self._tables[self._table[place]], int(self._row[place])
        fields = ("namespace", "vector_id", "topic", "partition")
        return {field: table[field][row].as_py() for field in fields}


def compare_states(
    expected: Expected, scan: Iterable[pa.RecordBatch], *, dead: Mask | None = None
) -> Comparison:
    """Compare a scan with the fold. `dead`: rows that the sink once refused, for dead letters."""
    dead = np.zeros(len(expected), np.bool_) if dead is None else dead
    found = Comparison(expected=int(np.count_nonzero(expected.alive)))
    met = np.zeros(len(expected), np.int64)
    for batch in scan:
        _compare_batch(expected, batch, dead=dead, met=met, found=found)
    twice = np.flatnonzero(met > 1)
    found.differ("twice", map(expected.name, twice), len(twice))
    # Not yet there, or there once and deleted since.
    missing = expected.alive & (met == 0)
    refused = np.flatnonzero(missing & dead)
    found.differ("missing", map(expected.name, refused), len(refused), "behind", "ahead", "dead")
    lost = np.flatnonzero(missing & ~dead)
    found.differ("missing", map(expected.name, lost), len(lost), "behind", "ahead")
    return found


def _compare_batch(
    expected: Expected,
    batch: pa.RecordBatch,
    *,
    dead: Mask,
    met: NDArray[np.int64],
    found: Comparison,
) -> None:
    found.compared += batch.num_rows
    places = expected.find(keys_of(batch["namespace"], batch["vector_id"]))
    unknown = np.flatnonzero(places < 0)
    found.differ("extra", (_row(batch, row) for row in unknown), len(unknown), "ahead")
    known = np.flatnonzero(places >= 0)
    np.add.at(met, places[known], 1)
    gap = _numbers(batch, "revision")[known] - expected.revision[places[known]]
    refused = dead[places[known]]
    apart: tuple[tuple[Places, tuple[Excuse, ...]], ...] = (
        (known[(gap < 0) & ~refused], ("behind",)),
        (known[(gap < 0) & refused], ("behind", "dead")),
        (known[gap > 0], ("ahead",)),
    )
    for rows, excuses in apart:
        described = (_revision(expected, batch, row, places) for row in rows)
        found.differ("revision", described, len(rows), *excuses)
    same = known[gap == 0]
    buried = same[~expected.alive[places[same]]]
    found.differ("deleted but present", (_row(batch, row) for row in buried), len(buried))
    rows = same[expected.alive[places[same]]]
    _compare_contents(expected, batch, rows=rows, places=places, found=found)


def _revision(
    expected: Expected, batch: pa.RecordBatch, row: int, places: Places
) -> dict[str, Any]:
    revision = {"revision": batch["revision"][int(row)].as_py()}
    return _row(batch, row) | revision | {"expected": int(expected.revision[places[row]])}


def _compare_contents(
    expected: Expected, batch: pa.RecordBatch, *, rows: Places, places: Places, found: Comparison
) -> None:
    """Rows of one revision: values bit for bit, metadata byte for byte."""
    for table, theirs, index in expected.groups(places[rows]):
        mine = rows[index]
        actual, wanted = _values(batch)[mine], _values(table)[theirs]
        if actual.shape[1] != wanted.shape[1]:
            detail = {"dimensions": actual.shape[1], "expected": wanted.shape[1]}
            place = _row(batch, mine[0]) | detail
            found.differ("dimensions", [place], len(mine))
            continue
        unequal = actual != wanted
        other = np.flatnonzero(unequal.any(axis=1))
        described = (
            _row(batch, mine[row]) | _component(actual[row], wanted[row], unequal[row])
            for row in other
        )
        found.differ("values", described, len(other))
        ours = _metadata(table["metadata"].take(pa.array(theirs)))
        other = np.flatnonzero(_metadata(batch["metadata"].take(pa.array(mine))) != ours)
        found.differ("metadata", (_row(batch, mine[row]) for row in other), len(other))


def keys_of(namespaces: Any, vector_ids: Any) -> NDArray[np.uint64]:
    """The hash of each vector's name, as two numbers."""
    pairs = zip(namespaces.to_pylist(), vector_ids.to_pylist(), strict=True)
    digests = [xxhash.xxh3_128_digest(f"{space}\0{name}".encode()) for space, name in pairs]
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def _numbers(table: pa.Table | pa.RecordBatch, column: str) -> NDArray[Any]:
    return np.asarray(table[column].to_numpy(zero_copy_only=False))


def _values(table: pa.Table | pa.RecordBatch) -> NDArray[np.uint32]:
    """The bits of the vectors, one row each. Lists of any kind will do if all have one length."""
    column = table["vector"]
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    bits: NDArray[np.uint32] = flat.view(np.uint32).reshape(len(column), -1)
    return bits


def _metadata(column: Any) -> NDArray[np.object_]:
    """Bytes, where none and null are the same."""
    return np.asarray(pc.fill_null(column, b"").to_numpy(zero_copy_only=False))


def _component(
    actual: NDArray[np.uint32], wanted: NDArray[np.uint32], unequal: Mask
) -> dict[str, Any]:
    at = int(np.flatnonzero(unequal)[0])
    return {
        "component": at,
        "value": float(actual.view(np.float32)[at]),
        "expected": float(wanted.view(np.float32)[at]),
        "components": int(np.count_nonzero(unequal)),
    }


def _row(batch: pa.RecordBatch, row: Any) -> dict[str, Any]:
    at = int(row)
    return {name: batch[name][at].as_py() for name in ("namespace", "vector_id")}
