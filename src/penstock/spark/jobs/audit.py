"""The audit: proof that the log is whole and that every sink holds what the log adds up to.

    log ── Spark, a task per partition: CRC, gapless, chain; fold ──► states, released deltas
                                                                          │ compared with
    sinks ── scan ────────────────────────────────────────────────────────┘

The log is folded up to where it ends when the audit begins. A sink that the pipeline has brought up
to there must be equal. A difference may have an *excuse*: the sink is `behind` the log (it is told
as *lagging*, with its lag), or `ahead` of the fold because the log has grown meanwhile. What a sink
refused and its dead letters hold is excused as `dead`. A sink is compared by what it keeps:

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

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import NotFound, Unavailable, Unsupported
from penstock.model.batch import Batch
from penstock.sinks.lake import LakeSink
from penstock.sinks.schema import DELTAS
from penstock.sinks.topics import Notice, dead_letter_topic
from penstock.spark.delivery.delivery import RoutedSink, node_of
from penstock.spark.delivery.worker import SinkRoutes
from penstock.spark.fold.partition_step import read_deltas
from penstock.spark.jobs.log_fold import PartitionFold, log_ranges, loss_of
from penstock.spark.jobs.stores import (
    KEY,
    Keys,
    PipelineProgress,
    folded_log,
    keys_of,
    opened_sink,
    read_progress,
)
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import ReadRange
from penstock.spark.source.rows import deltas_of, pieces

Excuse = Literal["behind", "ahead", "dead"]
Verdict = Literal["equal", "lagging", "different", "unavailable", "unproven"]
POLL_S: Final = 0.2
# A sink that nobody can read back does not speak against the others; it is named.
_FINE: Final[frozenset[Verdict]] = frozenset({"equal", "unproven"})
_NO_HISTORY: Final = DELTAS.empty_table()
SHOWN_MAX: Final = 20  # differences that are described one by one; all are counted
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]
_NAMED: Final = ("namespace", "vector_id")
COMPARED: Final = [name for name in DELTAS.names if name != "payload"]
_COMPARED_SCHEMA: Final = pa.schema([DELTAS.field(n).with_nullable(True) for n in COMPARED])
_SHOWN: Final = ("topic", "partition", "ordinal", "sequence", *_NAMED)
_notices: Final = msgspec.msgpack.Decoder(Notice)


@dataclass
class Comparison:
    """Differences by the excuses that each of them has; one of them is enough."""

    expected: int = 0
    compared: int = 0
    _counts: Counter[tuple[frozenset[Excuse], str]] = field(default_factory=Counter)
    _shown: dict[tuple[frozenset[Excuse], str], list[dict[str, Any]]] = field(default_factory=dict)

    def differ(
        self, kind: str, rows: Any, describe: Callable[[Any], dict[str, Any]], *excuses: Excuse
    ) -> None:
        """Count the differing rows, and keep the first of them, as described, for people."""
        if len(rows):
            key = frozenset(excuses), kind
            self._counts[key] += len(rows)
            shown = self._shown.setdefault(key, [])
            shown += ({"kind": kind, **describe(r)} for r in rows[: SHOWN_MAX - len(shown)])

    def wrong(self, excused: Set[Excuse] = frozenset()) -> Counter[str]:
        """The differences by kind that none of the accepted excuses covers."""
        total = Counter[str]()
        for (excuses, kind), count in self._counts.items():
            if not excuses & excused:
                total[kind] += count
        return total

    def pending(self, excused: Set[Excuse]) -> int:
        return self._counts.total() - self.wrong(excused).total()

    def to_dict(self, excused: Set[Excuse] = frozenset()) -> dict[str, Any]:
        document: dict[str, Any] = {"expected": self.expected, "compared": self.compared}
        if pending := self.pending(excused):
            document["pending"] = pending
        if wrong := self.wrong(excused):
            shown = [one for (e, _), some in self._shown.items() if not e & excused for one in some]
            document |= {"differences": dict(wrong), "first_differences": shown[:SHOWN_MAX]}
        return document


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
        keys = np.concatenate([np.empty(0, KEY), *map(keys_of, self._tables)])
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
        show = _shown(self._tables[self._table[place]], *_NAMED, "topic", "partition")
        return show(self._row[place])


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
    show = _shown(batch, *_NAMED)
    found.differ("extra", np.flatnonzero(places < 0), show, "ahead")
    known = np.flatnonzero(places >= 0)
    np.add.at(met, places[known], 1)
    gap = _numbers(batch, "revision")[known] - expected.revision[places[known]]
    refused = dead[places[known]]

    def revision(row: int) -> dict[str, Any]:
        told = _shown(batch, *_NAMED, "revision")(row)
        return told | {"expected": int(expected.revision[places[row]])}

    found.differ("revision", known[(gap < 0) & ~refused], revision, "behind")
    found.differ("revision", known[(gap < 0) & refused], revision, "behind", "dead")
    found.differ("revision", known[gap > 0], revision, "ahead")
    same = known[gap == 0]
    alive = expected.alive[places[same]]
    found.differ("deleted but present", same[~alive], show)
    rows = same[alive]
    for table, theirs, index in expected.groups(places[rows]):
        _compare_contents(batch, rows[index], table, theirs, found)


def _compare_contents(
    batch: pa.RecordBatch, rows: Places, table: pa.Table, wanted_rows: Places, found: Comparison
) -> None:
    """Rows of one revision: values bit for bit, metadata byte for byte."""
    show = _shown(batch, *_NAMED)
    actual, wanted = _values(batch)[rows], _values(table)[wanted_rows]
    if actual.shape[1] != wanted.shape[1]:
        detail = {"dimensions": actual.shape[1], "expected": wanted.shape[1]}
        found.differ("dimensions", rows, lambda row: show(row) | detail)
        return
    unequal = np.flatnonzero((actual != wanted).any(axis=1))
    found.differ("values", unequal, lambda at: show(rows[at]) | _component(actual[at], wanted[at]))
    mine, theirs = batch["metadata"].take(rows), table["metadata"].take(wanted_rows)
    found.differ("metadata", rows[_metadata(mine) != _metadata(theirs)], show)


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


def _shown(table: pa.Table | pa.RecordBatch, *names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda row: {name: table[name][int(row)].as_py() for name in names}


def compare_history(expected: pa.Table, actual: pa.Table, found: Comparison) -> None:
    """Add what differs between the two to `found`. `expected` is in the order of release."""
    # A lake has fewer types than DELTAS.
    actual = actual.select(COMPARED).cast(_COMPARED_SCHEMA)
    found.expected += expected.num_rows
    found.compared += actual.num_rows
    rows = find_sorted(expected["ordinal"].to_numpy(), actual["ordinal"].to_numpy())
    found.differ("extra", np.flatnonzero(rows < 0), _shown(actual, *_SHOWN), "ahead")
    times = np.bincount(rows[rows >= 0], minlength=expected.num_rows)
    show = _shown(expected, *_SHOWN)
    found.differ("missing", np.flatnonzero(times == 0), show, "behind")
    found.differ("twice", np.flatnonzero(times > 1), show)
    known, wanted = actual.filter(pa.array(rows >= 0)), expected.select(COMPARED)
    rows = rows[rows >= 0]
    if not np.array_equal(rows, np.arange(wanted.num_rows)):
        wanted = wanted.take(pa.array(rows))
    for name in COMPARED:
        unequal = np.flatnonzero(_unequal(known[name], wanted[name]))
        found.differ(f"column {name}", unequal, _shown(known, *_SHOWN))


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


def compare_forwarded(
    released: Sequence[pa.Table], held: Keys, found: Comparison, *, only_ours: bool
) -> None:
    """Add what differs to `found`. `held` are the ids in the destination; if it has `only_ours`,
    others do not belong there."""
    ids = [id_ for table in released for id_ in table["delta_id"].to_pylist()]
    expected = np.frombuffer(b"".join(ids), KEY)
    found.expected += len(expected)
    found.compared += len(held)
    distinct, times = np.unique(held, return_counts=True)
    found.differ("missing", expected[~np.isin(expected, distinct)], _named, "behind")
    ours = np.isin(distinct, expected)
    found.differ("twice", distinct[ours & (times > 1)], _named)
    if only_ours:
        found.differ("extra", distinct[~ours], _named, "ahead")


def _delta_ids(batches: Sequence[Batch]) -> Keys:
    deltas = deltas_of(pieces(batches, first=0, last=1 << 62))
    return as_keys(deltas.delta_id)


def _notice_ids(batches: Sequence[Batch]) -> Keys:
    payloads = [p for batch in batches for p in batch.columns().binary("payload") or ()]
    return np.frombuffer(b"".join(_notices.decode(p).delta_id for p in payloads), KEY)


def _ids_in(access: NodeAccess, topic: str, ids: Callable[[Sequence[Batch]], Keys]) -> Keys:
    found = [np.empty(0, KEY)]
    for status in access.log_status(topic):
        if status.sequence_first > 1:
            raise Unsupported(f"the log of {topic} no longer goes back to its beginning")
        for batches in access.read_range(topic, status.partition, 1, status.readable):
            if any(batch.compacted for batch in batches):
                raise Unsupported(f"the log of {topic} was compacted: settled messages are gone")
            found.append(ids(batches))
    return np.concatenate(found)


# Sinks that keep no vectors but pass deltas on: how the ids in their topic are read, its name.
_FORWARDING: Final[dict[str, tuple[Callable[[Sequence[Batch]], Keys], str]]] = {
    "remote": (_delta_ids, "{topic}"),
    "notify": (_notice_ids, "{topic}-changes"),
}


def as_keys(pairs: NDArray[np.uint64]) -> Keys:
    """Rows of two numbers, as hashes and ids of a `DeltaBatch` are, by their sixteen bytes."""
    return np.ascontiguousarray(pairs).view(KEY).reshape(-1)


def _named(one: bytes) -> dict[str, str]:
    return {"delta_id": one.ljust(16, b"\0").hex()}  # numpy leaves out zeros at the end


class Audit:
    def __init__(self, spark: Any, settings: PipelineSettings, *, wait_s: float = 0.0) -> None:
        self._spark, self._settings, self._wait_s = spark, settings, wait_s
        self._node = node_of(settings)
        self._ranges: list[ReadRange] = []
        self._folds: list[PartitionFold] = []

    def run(self) -> dict[str, Any]:
        """The whole audit; `ok` is whether everything that can be proved was."""
        with folded_log(self._spark, self._settings, whole=False, deltas=True) as folds:
            self._folds, self._ranges = folds, [fold.range for fold in folds]
            reasons = list(_unsound(folds))
            sinks = {} if reasons else self._sinks()
        proved = all(sink["verdict"] in _FINE for sink in sinks.values())
        return {
            "ok": not reasons and proved,
            "pipeline": self._settings.name,
            "partitions": [partition_document(fold) for fold in folds],
            "sinks": sinks,
            **({"reasons": reasons} if reasons else {}),
        }

    def _sinks(self) -> dict[str, Any]:
        names = [sink.name for sink in self._settings.sinks]
        deadline = time.monotonic() + self._wait_s
        progress = read_progress(self._settings.store.open(), names)
        while not all(progress.reached(name, self._ranges) for name in names):
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
            progress = read_progress(self._settings.store.open(), names)
        return {one.name: self._sink(one, progress) for one in self._settings.sinks}

    def _sink(self, one: SinkSettings, progress: PipelineProgress) -> dict[str, Any]:
        """A sink that cannot be reached or read is no reason not to look at the others."""
        about = {"kind": one.kind}
        try:
            with opened_sink(self._settings, one) as attached:
                parts = self._compare(one, attached)
        except Unsupported as error:
            return about | {"verdict": "unproven", "reason": error.message}
        except (Unavailable, NotFound) as error:
            return about | {"verdict": "unavailable", "reason": error.message}
        excused = self._excuses(one.name, progress)
        lagging = "behind" in excused
        if attached.routes.judge_states_by_deltas:
            # It rightly holds older states: a later change need not match its route.
            excused.add("behind")
        different = any(part.wrong(excused) for part in parts.values())
        verdict: Verdict = "different" if different else "lagging" if lagging else "equal"
        document: dict[str, Any] = {**about, "verdict": verdict}
        if lagging:
            document["lag"] = progress.lag(one.name, self._ranges)
        return document | {name: part.to_dict(excused) for name, part in parts.items()}

    def _excuses(self, sink: str, progress: PipelineProgress) -> set[Excuse]:
        """What may explain a difference. The log is looked at after the comparison."""
        excuses: set[Excuse] = {"dead"}
        if not progress.reached(sink, self._ranges):
            excuses.add("behind")
        now = log_ranges(self._node, self._settings.topics)
        if any(later.last > one.last for later, one in zip(now, self._ranges, strict=True)):
            excuses.add("ahead")
        return excuses

    # --- one sink ---

    def _compare(self, one: SinkSettings, attached: RoutedSink) -> dict[str, Comparison]:
        if one.kind in _FORWARDING:
            return {"messages": self._compare_messages(one, attached.routes)}
        parts = {"vectors": self._compare_vectors(one, attached)}
        if isinstance(attached.sink, LakeSink):
            parts["history"] = self._compare_history(attached.sink, attached.routes)
        return parts

    def _compare_vectors(self, one: SinkSettings, attached: RoutedSink) -> Comparison:
        expected = self._expected
        if one.route:
            routes = attached.routes
            judged = routes.judge_states_by_deltas
            expected = Expected(
                [routes.states(f.states(), f.released() if judged else None) for f in self._folds]
            )
        dead = np.isin(expected.keys, self._refused(one.name))
        return compare_states(expected, attached.sink.scan(), dead=dead)

    @cached_property
    def _expected(self) -> Expected:
        return Expected([fold.states() for fold in self._folds])

    def _refused(self, sink: str) -> Keys:
        access, found = self._node.access(), [np.empty((0, 2), np.uint64)]
        for topic in self._settings.topics:
            letters = dead_letter_topic(topic, sink)
            try:
                partitions = access.log_status(letters)
            except NotFound:
                continue  # nothing was ever refused
            for status in partitions:
                place, first, last = status.partition, status.sequence_first, status.readable
                reading = read_deltas(access, letters, place, first=first, last=last)
                found += [deltas.vector for deltas, _ in reading]
        return as_keys(np.concatenate(found))

    def _compare_history(self, lake: LakeSink, routes: SinkRoutes) -> Comparison:
        """A log partition at a time: that much is in memory."""
        found = Comparison()
        for fold in self._folds:
            where = (pc.field("topic") == fold.range.topic) & (
                pc.field("partition") == fold.range.partition
            )
            held = list(lake.history.batches(COMPARED, where=where))
            actual = pa.Table.from_batches(held) if held else _NO_HISTORY
            compare_history(routes.deltas(fold.released()), actual, found)
        return found

    def _compare_messages(self, one: SinkSettings, routes: SinkRoutes) -> Comparison:
        read, usual = _FORWARDING[one.kind]
        by_topic: dict[str, list[pa.Table]] = {}
        for fold in self._folds:
            target = one.options.get("topic") or usual.format(topic=fold.range.topic)
            by_topic.setdefault(target, []).append(routes.deltas(fold.released()))
        node = self._node
        if "url" in one.options:
            node = Connecting(
                url=one.options["url"],
                api_key=one.options.get("api_key"),
                api_key_file=one.options.get("api_key_file"),
                tls=one.options.get("ca"),
            )
        found = Comparison()
        for topic, released in by_topic.items():
            held = _ids_in(node.access(), topic, read)
            compare_forwarded(released, held, found, only_ours=one.kind == "notify")
        return found


def _unsound(folds: Sequence[PartitionFold]) -> Iterator[str]:
    for fold in folds:
        one = fold.range
        if fold.damage is not None:
            yield f"{one.topic}/{one.partition} is damaged: {fold.damage['reason']}"
        elif loss := loss_of(one):
            yield loss


def partition_document(fold: PartitionFold) -> dict[str, Any]:
    return {
        "topic": fold.range.topic,
        "partition": fold.range.partition,
        "ok": fold.damage is None,
        "first": fold.range.first,
        "last": fold.range.last,
        "batches": fold.check.batches,
        "messages": fold.check.messages,
        "bytes": fold.check.bytes,
        "chain": None if fold.check.chain is None else f"{fold.check.chain:016x}",
        "digest": None if fold.digest is None else f"{fold.digest:016x}",
        **fold.counts,
        **({} if fold.damage is None else {"damage": fold.damage}),
    }
