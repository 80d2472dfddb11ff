"""What a sink holds, compared with what the log adds up to.

Time goes on while things are compared. A difference may have an *excuse*: the sink is `behind` the
log, or `ahead` of the place up to which the log was folded. Whether the excuse holds is for the
caller to know, who looks at cursors and at the log: at rest none does. What a sink refused and its
dead letters hold is excused as `dead`.

**Vectors** are held against the fold, a batch of the scan at a time. The fold's states lie in one
mapped table per log partition. A row of the scan is looked up by the hash of its name and compared
column by column: the revision, the bits of the values, the bytes of the metadata. Each expected row
counts how often it was met, so that at the end what was never met is missing, and what was met
twice is there twice. Memory is a few dozen bytes per vector.

A row of a lower revision than the fold's is behind, one of a higher revision is ahead. Two rows
of the same revision must be equal always.

**A history** of deltas must have what one log partition released, each of them once, unchanged.
Both sides are DELTAS tables of one partition. Released deltas are numbered (`ordinal`), so a row's
place is known, and a row that is missing, there twice or beyond the end is seen by counting.

**Messages** that a sink passed on to a topic must be what the log released, each of them once. A
remote topic holds the deltas themselves, and perhaps others from elsewhere; a queue of notices
holds nothing but notices. Both are read from their logs, whatever consumers have done since, and
compared by delta id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from penstock.errors import Unsupported
from penstock.model.batch import Batch
from penstock.sinks.schema import DELTAS
from penstock.sinks.topics import Notice
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.rows import deltas_of, pieces

SHOWN_MAX: Final = 20  # differences that are described one by one; all are counted
Excuse = Literal["behind", "ahead", "dead"]


@dataclass
class _Found:
    counts: Counter[str] = field(default_factory=Counter)  # by kind
    shown: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Comparison:
    """Differences by the excuses that each of them has; one of them is enough."""

    expected: int = 0
    compared: int = 0
    _found: dict[frozenset[Excuse], _Found] = field(default_factory=dict)

    def differ(
        self, kind: str, rows: Any, describe: Callable[[Any], dict[str, Any]], *excuses: Excuse
    ) -> None:
        """Count the differing rows, and keep the first of them, as described, for people."""
        if len(rows):
            found = self._found.setdefault(frozenset(excuses), _Found())
            found.counts[kind] += len(rows)
            found.shown += ({"kind": kind, **describe(r)} for r in rows[: self._room(found)])

    def _room(self, found: _Found) -> int:
        return max(0, SHOWN_MAX - len(found.shown))

    def wrong(self, excused: Set[Excuse] = frozenset()) -> Counter[str]:
        """The differences by kind that none of the accepted excuses covers."""
        total = Counter[str]()
        for excuses, found in self._found.items():
            if not excuses & excused:
                total += found.counts
        return total

    def pending(self, excused: Set[Excuse]) -> int:
        """How many differences there are that an accepted excuse covers."""
        found = (found.counts.total() for e, found in self._found.items() if e & excused)
        return sum(found)

    def to_dict(self, excused: Set[Excuse] = frozenset()) -> dict[str, Any]:
        document: dict[str, Any] = {"expected": self.expected, "compared": self.compared}
        if pending := self.pending(excused):
            document["pending"] = pending
        if wrong := self.wrong(excused):
            shown = [s for e, f in self._found.items() if not e & excused for s in f.shown]
            document |= {"differences": dict(wrong), "first_differences": shown[:SHOWN_MAX]}
        return document


Mask = NDArray[np.bool_]
Places = NDArray[np.int64]
Keys = NDArray[np.bytes_]  # sixteen bytes each
_KEY: Final = np.dtype("S16")


def find_sorted(held: NDArray[Any], wanted: NDArray[Any]) -> Places:
    """Where each value stands among those held, which ascend; -1: nowhere."""
    at = np.searchsorted(held, wanted)
    at[at == len(held)] = -1
    if len(held):
        at[held[at] != wanted] = -1
    return at


class Expected:
    """The states of all partitions, found by the name of their vector."""

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        self._tables = [table.combine_chunks() for table in tables if table.num_rows]
        counts = [table.num_rows for table in self._tables]
        keys = np.concatenate([np.empty(0, _KEY), *map(keys_of, self._tables)])
        revision, deleted = (
            np.concatenate([np.empty(0, kind), *(_numbers(t, name) for t in self._tables)])
            for name, kind in (("revision", np.int64), ("deleted", np.bool_))
        )
        # Of a vector that two topics have, sinks keep the higher revision.
        order = np.lexsort((revision, keys))
        last = np.ones(len(order), np.bool_)
        last[:-1] = keys[order][1:] != keys[order][:-1]
        kept = order[last]
        self._table = np.repeat(np.arange(len(counts)), counts)[kept]
        self._row = np.concatenate([np.empty(0, np.int64), *map(np.arange, counts)])[kept]
        self.keys, self.revision, self.alive = keys[kept], revision[kept], ~deleted[kept]

    def __len__(self) -> int:
        return len(self.keys)

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
    found.differ("twice", np.flatnonzero(met > 1), expected.name)
    # Not yet there, or there once and deleted since.
    missing = expected.alive & (met == 0)
    refused, lost = np.flatnonzero(missing & dead), np.flatnonzero(missing & ~dead)
    found.differ("missing", refused, expected.name, "behind", "ahead", "dead")
    found.differ("missing", lost, expected.name, "behind", "ahead")
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
    places = find_sorted(expected.keys, keys_of(batch))
    found.differ("extra", np.flatnonzero(places < 0), lambda row: _row(batch, row), "ahead")
    known = np.flatnonzero(places >= 0)
    np.add.at(met, places[known], 1)
    gap = _numbers(batch, "revision")[known] - expected.revision[places[known]]
    refused = dead[places[known]]

    def revision(row: int) -> dict[str, Any]:
        told = {"revision": batch["revision"][int(row)].as_py()}
        return _row(batch, row) | told | {"expected": int(expected.revision[places[row]])}

    found.differ("revision", known[(gap < 0) & ~refused], revision, "behind")
    found.differ("revision", known[(gap < 0) & refused], revision, "behind", "dead")
    found.differ("revision", known[gap > 0], revision, "ahead")
    same = known[gap == 0]
    alive = expected.alive[places[same]]
    found.differ("deleted but present", same[~alive], lambda row: _row(batch, row))
    rows = same[alive]
    for table, theirs, index in expected.groups(places[rows]):
        _compare_contents(batch, rows[index], table, theirs, found)


def _compare_contents(
    batch: pa.RecordBatch, rows: Places, table: pa.Table, wanted_rows: Places, found: Comparison
) -> None:
    """Rows of one revision: values bit for bit, metadata byte for byte."""
    actual, wanted = _values(batch)[rows], _values(table)[wanted_rows]
    if actual.shape[1] != wanted.shape[1]:
        detail = {"dimensions": actual.shape[1], "expected": wanted.shape[1]}
        found.differ("dimensions", rows, lambda row: _row(batch, row) | detail)
        return
    unequal = np.flatnonzero((actual != wanted).any(axis=1))
    found.differ(
        "values", unequal, lambda at: _row(batch, rows[at]) | _component(actual[at], wanted[at])
    )
    mine, theirs = batch["metadata"].take(rows), table["metadata"].take(wanted_rows)
    other = rows[_metadata(mine) != _metadata(theirs)]
    found.differ("metadata", other, lambda row: _row(batch, row))


def keys_of(table: pa.Table | pa.RecordBatch) -> Keys:
    """The hash of each vector's name."""
    pairs = zip(table["namespace"].to_pylist(), table["vector_id"].to_pylist(), strict=True)
    digests = [xxhash.xxh3_128_digest(f"{space}\0{name}".encode()) for space, name in pairs]
    return np.frombuffer(b"".join(digests), _KEY)


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


def _component(actual: NDArray[np.uint32], wanted: NDArray[np.uint32]) -> dict[str, Any]:
    unequal = np.flatnonzero(actual != wanted)
    at = int(unequal[0])
    return {
        "component": at,
        "value": float(actual.view(np.float32)[at]),
        "expected": float(wanted.view(np.float32)[at]),
        "components": len(unequal),
    }


def _row(batch: pa.RecordBatch, row: Any) -> dict[str, Any]:
    at = int(row)
    return {name: batch[name][at].as_py() for name in ("namespace", "vector_id")}


COMPARED: Final = [name for name in DELTAS.names if name != "payload"]
_COMPARED_SCHEMA: Final = pa.schema([DELTAS.field(n).with_nullable(True) for n in COMPARED])
_SHOWN: Final = ("topic", "partition", "ordinal", "sequence", "namespace", "vector_id")


def compare_history(expected: pa.Table, actual: pa.Table, found: Comparison) -> None:
    """Add what differs between the two to `found`. `expected` is in the order of release."""
    # A lake has fewer types than DELTAS.
    actual = actual.select(COMPARED).cast(_COMPARED_SCHEMA)
    found.expected += expected.num_rows
    found.compared += actual.num_rows
    rows = find_sorted(expected["ordinal"].to_numpy(), actual["ordinal"].to_numpy())
    found.differ("extra", np.flatnonzero(rows < 0), lambda row: _shown(actual, row), "ahead")
    times = np.bincount(rows[rows >= 0], minlength=expected.num_rows)
    found.differ("missing", np.flatnonzero(times == 0), lambda r: _shown(expected, r), "behind")
    found.differ("twice", np.flatnonzero(times > 1), lambda row: _shown(expected, row))
    known, wanted = actual.filter(pa.array(rows >= 0)), expected.select(COMPARED)
    rows = rows[rows >= 0]
    if not np.array_equal(rows, np.arange(wanted.num_rows)):
        wanted = wanted.take(pa.array(rows))
    for name in COMPARED:
        unequal = np.flatnonzero(_unequal(known[name], wanted[name]))
        found.differ(f"column {name}", unequal, lambda row: _shown(known, row))


def _unequal(actual: pa.ChunkedArray, wanted: pa.ChunkedArray) -> NDArray[np.bool_]:
    if pa.types.is_list(actual.type):
        return _unequal_lists(actual.combine_chunks(), wanted.combine_chunks())
    nulls = pc.xor(actual.is_null(), wanted.is_null())
    other = pc.fill_null(pc.not_equal(actual, wanted), False)
    return np.asarray(pc.or_(nulls, other).to_numpy())


def _unequal_lists(actual: Any, wanted: Any) -> NDArray[np.bool_]:
    """Lists of numbers by their bits; null and empty are the same."""
    sizes = [pc.fill_null(pc.list_value_length(side), 0).to_numpy() for side in (actual, wanted)]
    unequal: NDArray[np.bool_] = sizes[0] != sizes[1]
    same = ~unequal
    if unequal.any():
        actual, wanted = (side.filter(pa.array(same)) for side in (actual, wanted))
    left, right = (_bits(side.flatten()) for side in (actual, wanted))
    owner = np.repeat(np.flatnonzero(same), sizes[0][same])
    unequal[owner[left != right]] = True
    return unequal


def _bits(values: Any) -> NDArray[Any]:
    numbers = values.to_numpy(zero_copy_only=False)
    return np.asarray(numbers.view(f"u{numbers.dtype.itemsize}"))


def _shown(table: pa.Table, row: Any) -> dict[str, Any]:
    return {name: table[name][int(row)].as_py() for name in _SHOWN}


_notices: Final = msgspec.msgpack.Decoder(Notice)


def compare_forwarded(
    released: Sequence[pa.Table], held: Keys, found: Comparison, *, only_ours: bool
) -> None:
    """Add what differs to `found`. `held` are the ids in the destination; if it has `only_ours`,
    others do not belong there."""
    ids = [id_ for table in released for id_ in table["delta_id"].to_pylist()]
    expected = np.frombuffer(b"".join(ids), _KEY)
    found.expected += len(expected)
    found.compared += len(held)
    distinct, times = np.unique(held, return_counts=True)
    found.differ("missing", expected[~np.isin(expected, distinct)], _named, "behind")
    ours = np.isin(distinct, expected)
    found.differ("twice", distinct[ours & (times > 1)], _named)
    if only_ours:
        found.differ("extra", distinct[~ours], _named, "ahead")


def delta_ids(access: NodeAccess, topic: str) -> Keys:
    """The ids of all deltas in a delta topic."""

    def ids(batches: Sequence[Batch]) -> Keys:
        deltas = deltas_of(pieces(batches, first=0, last=1 << 62))
        return as_keys(deltas.delta_id)

    return _read(access, topic, ids)


def notice_ids(access: NodeAccess, topic: str) -> Keys:
    """The ids that the notices in a queue topic speak of."""

    def ids(batches: Sequence[Batch]) -> Keys:
        payloads = [p for batch in batches for p in batch.columns().binary("payload") or ()]
        return np.frombuffer(b"".join(_notices.decode(p).delta_id for p in payloads), _KEY)

    return _read(access, topic, ids)


def _read(access: NodeAccess, topic: str, ids: Callable[[Sequence[Batch]], Keys]) -> Keys:
    found = [np.empty(0, _KEY)]
    for status in access.log_status(topic):
        if status.sequence_first > 1:
            raise Unsupported(f"the log of {topic} no longer goes back to its beginning")
        last = status.readable
        for batches in access.read_range(topic, status.partition, 1, last):
            if any(batch.compacted for batch in batches):
                raise Unsupported(f"the log of {topic} was compacted: settled messages are gone")
            found.append(ids(batches))
    return np.concatenate(found)


def as_keys(pairs: NDArray[np.uint64]) -> Keys:
    """Rows of two numbers, as hashes and ids of a `DeltaBatch` are, by their sixteen bytes."""
    return np.ascontiguousarray(pairs).view(_KEY).reshape(-1)


def _named(one: bytes) -> dict[str, str]:
    return {"delta_id": one.ljust(16, b"\0").hex()}  # numpy leaves out zeros at the end
