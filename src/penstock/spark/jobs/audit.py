"""The audit: proof that the log is whole and that every sink holds what the log adds up to.

    log ── a task per partition: CRC, gapless, chain; fold ──► digests ─┐
                                                                        ├─► a task per share
    sink ── a task per piece: scan ──────────────────────────► digests ─┘      compares

The log is folded up to where it ends when the audit begins. A sink that the pipeline has brought up
to there must be equal. A difference may have an excuse (`penstock.spark.jobs.comparison`): a sink
that is behind the log is told as *lagging*, with its lag.

The fold's digests are made once, and Spark keeps them on the executors' disks for all sinks. Those
of a sink are made where it is read, piece by piece (`PiecedSink`). Both go by their keys to the
tasks that compare. To the driver come counts, and of each kind of difference the first few.

A log whose beginning retention has deleted is proved from its first batch on, and folded from the
pipeline's snapshot: then a history is compared from there, and only vectors are compared whole.

A sink with a transform is held against what that makes of the fold's states, which are folded once
more for it.

Of values that differ the first components are told by a second look: the few vectors that are shown
are folded and scanned once more, for themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import xxhash

from penstock.errors import NotFound, Unavailable, Unsupported
from penstock.sinks.lake import LakeSink
from penstock.sinks.topics import dead_letter_topic
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec, node_of, transforms_of
from penstock.spark.delivery.transform import Transform, changed_states, frame_of
from penstock.spark.jobs.comparison import Comparison, Excuse, Kind, compare_share, total
from penstock.spark.jobs.digest_tasks import (
    FORWARDING,
    HISTORY,
    MESSAGES,
    REPORT,
    VECTORS,
    DigestOrder,
    buildable,
    dead_digests,
    fold_digests,
    folded_values,
    forwarded_digests,
    held_digests,
    held_values,
    history_digests,
    pieces_of,
    scan_digests,
    scanned_values,
    taken_states,
    transformed_digests,
)
from penstock.spark.jobs.log_fold import FoldReport, PlannedFold, fold_tasks, log_ranges
from penstock.spark.jobs.stores import (
    PipelineProgress,
    opened_sink,
    order_of,
    read_progress,
    with_snapshots,
)
from penstock.spark.jobs.tasks import Parcels, Tasks, shares_for, table_of
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import ReadRange

Verdict = Literal["equal", "lagging", "different", "unavailable", "unproven"]
POLL_S: Final = 0.2
SHARE_ROWS: Final = 500_000  # digests that one task compares, about
VECTOR_BYTES: Final = 200  # of a snapshot at least, for each vector in it
# A sink that nobody can read back does not speak against the others; it is named.
_FINE: Final[frozenset[Verdict]] = frozenset({"equal", "unproven"})
_WHAT: Final[dict[Kind, int]] = {"vectors": VECTORS, "history": HISTORY, "messages": MESSAGES}


class Audit:
    def __init__(
        self,
        spark: Any,
        settings: PipelineSettings,
        *,
        wait_s: float = 0.0,
        transform: Transform | Mapping[str, Transform] | None = None,
    ) -> None:
        """`transform` is what the pipeline was given in its program."""
        self._settings, self._wait_s = settings, wait_s
        self._spark, self._transform = spark, transform
        self._spark_tasks = Tasks(spark, f"audit of {settings.name}")
        self._node, self._order = node_of(settings), order_of(settings)
        self._ranges: list[ReadRange] = []
        self._tasks: list[PlannedFold] = []
        self._shares = 1
        self._folded: Parcels = None
        self._reports: list[FoldReport] = []

    def run(self) -> dict[str, Any]:
        """The whole audit; `ok` is whether everything that can be proved was."""
        with_snapshots(self._fold)
        try:
            reasons = list(self._unsound())
            sinks = {} if reasons else self._sinks()
        finally:
            self._folded.unpersist()
        proved = all(sink["verdict"] in _FINE for sink in sinks.values())
        return {
            "ok": not reasons and proved,
            "pipeline": self._settings.name,
            "partitions": [partition_document(report) for report in self._reports],
            "sinks": sinks,
            **({"reasons": reasons} if reasons else {}),
        }

    # --- the fold ---

    def _fold(self) -> None:
        self._plan()
        self._folded = self._digests()
        try:
            # In the order of the tasks, a report from each.
            self._reports = self._spark_tasks.collected(_only(self._folded, REPORT))
        except BaseException:
            self._folded.unpersist()
            raise

    def _plan(self) -> None:
        heads = read_progress(self._settings.store.open(), ()).heads
        ranges = log_ranges(self._node, self._settings.topics)
        self._ranges, self._tasks = list(ranges), fold_tasks(ranges, heads, use="if cut")
        rows = sum(one.last - one.first + 1 for one in ranges)
        heads_used = [task.head for task in self._tasks if task.origin == "snapshot"]
        rows += sum(head.base_bytes // VECTOR_BYTES for head in heads_used if head is not None)
        least = self._spark_tasks.parallelism
        self._shares = shares_for(rows, each=SHARE_ROWS, least=least)

    def _digests(self) -> Parcels:
        from pyspark import StorageLevel

        sinks = self._settings.sinks
        kinds = {MESSAGES if one.kind in FORWARDING else VECTORS for one in sinks}
        if any(one.kind == "lake" for one in sinks):
            kinds.add(HISTORY)
        order = DigestOrder(
            fold=self._order,
            shares=self._shares,
            routes=tuple(one.route for one in sinks),
            kinds=frozenset(kinds),
        )
        made = self._spark_tasks.make(partial(fold_digests, order), self._tasks)
        return made.persist(StorageLevel.DISK_ONLY)

    def _unsound(self) -> Iterator[str]:
        for report, task in zip(self._reports, self._tasks, strict=True):
            if report.damage is not None:
                place = f"{report.topic}/{report.partition}"
                yield f"{place} is damaged: {report.damage['reason']}"
            elif task.loss:
                yield task.loss

    # --- the sinks ---

    def _sinks(self) -> dict[str, Any]:
        names = [sink.name for sink in self._settings.sinks]
        deadline = time.monotonic() + self._wait_s
        progress = read_progress(self._settings.store.open(), names)
        while not all(progress.reached(name, self._ranges) for name in names):
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
            progress = read_progress(self._settings.store.open(), names)
        chosen = enumerate(self._settings.sinks)
        return {one.name: self._sink(one, number, progress) for number, one in chosen}

    def _sink(self, one: SinkSettings, number: int, progress: PipelineProgress) -> dict[str, Any]:
        """A sink that cannot be reached or read is no reason not to look at the others."""
        about = {"kind": one.kind}
        try:
            with opened_sink(self._settings, one) as attached:
                parts = self._compare(one, number, attached)
                excused = self._excuses(one.name, progress)
                lagging = "behind" in excused
                if attached.routes.judge_states_by_deltas:
                    # It rightly holds older states: a later change need not match its route.
                    excused.add("behind")
                if "vectors" in parts and self._transform_of(attached) is None:
                    self._look_again(attached, parts["vectors"].shown(excused))
        except Unsupported as error:
            return about | {"verdict": "unproven", "reason": error.message}
        except (Unavailable, NotFound) as error:
            return about | {"verdict": "unavailable", "reason": error.message}
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

    def _compare(
        self, one: SinkSettings, number: int, attached: RoutedSink
    ) -> dict[str, Comparison]:
        if one.kind in FORWARDING:
            return {"messages": self._compare_messages(one, number)}
        spec = attached.spec
        assert spec is not None, "made of settings"
        held, refused = self._held(attached, spec), self._refused(one.name)
        expected = self._transformed(attached)
        parts = {"vectors": self._judged("vectors", number, held, refused, expected=expected)}
        if isinstance(attached.sink, LakeSink):
            parts["history"] = self._compare_history(spec, attached.sink, number)
        return parts

    def _transform_of(self, attached: RoutedSink) -> Transform | None:
        found = transforms_of(self._settings, [attached], self._transform)
        return found.get(attached.sink.name)

    def _transformed(self, attached: RoutedSink) -> Parcels | None:
        """The digests of what a sink's transform makes of its states; None if it has none."""
        transform = self._transform_of(attached)
        if transform is None:
            return None
        read = partial(taken_states, self._order, [str(r) for r in attached.routes.routes])
        changed = changed_states(frame_of(self._spark, self._tasks), transform, read=read)
        digests = partial(transformed_digests, self._shares)
        packed = changed.mapInArrow(digests, "share int, packed binary")
        return packed.rdd.map(lambda row: (row.share, bytes(row.packed)))

    def _held(self, attached: RoutedSink, spec: SinkSpec) -> Parcels:
        sink, pieces = attached.sink, pieces_of(attached.sink)
        if self._in_tasks(spec):
            return self._spark_tasks.make(partial(scan_digests, spec, self._shares), pieces)
        digests = (one for piece in pieces for one in held_digests(sink, self._shares, piece))
        return self._spark_tasks.given(digests)

    def _in_tasks(self, spec: SinkSpec) -> bool:
        (found,) = self._spark_tasks.collected(self._spark_tasks.make(buildable, [spec]))
        return bool(found)

    def _judged(
        self,
        kind: Kind,
        number: int,
        *held: Parcels,
        topics: Sequence[str] | None = None,
        others: bool = False,
        expected: Parcels | None = None,
    ) -> Comparison:
        tasks = self._spark_tasks
        if expected is None:
            expected = _only(self._folded, _WHAT[kind], topics)
        together = tasks.by_share(tasks.together(expected, *held), self._shares)
        compare = partial(compare_share, kind=kind, taker=number, others=others)
        return total(tasks.answers(compare, together))

    def _refused(self, sink: str) -> Parcels:
        """The vectors that a sink refused, as its dead letters have them."""
        access, letters = self._node.access(), list[ReadRange]()
        for topic in self._settings.topics:
            try:
                letters += _whole_log(access, dead_letter_topic(topic, sink))
            except NotFound:
                continue  # nothing was ever refused
        return self._spark_tasks.make(partial(dead_digests, self._node, self._shares), letters)

    def _compare_history(self, spec: SinkSpec, lake: LakeSink, number: int) -> Comparison:
        begun = {report.place: report.ordinal for report in self._reports}
        scan = partial(history_digests, spec, self._shares, begun)
        held = self._spark_tasks.make(scan, lake.history.pieces())
        return self._judged("history", number, held)

    def _compare_messages(self, one: SinkSettings, number: int) -> Comparison:
        _, usual = FORWARDING[one.kind]
        sources: dict[str, list[str]] = {}
        for topic in self._settings.topics:
            target = one.options.get("topic") or usual.format(topic=topic)
            sources.setdefault(target, []).append(topic)
        node, found = _destination(one, self._node), Comparison()
        # Of what a shortened log has released before, the notices are still there.
        whole = all(report.origin == "log" for report in self._reports)
        for target, topics in sources.items():
            ranges = _whole_log(node.access(), target)
            if any(part.first > 1 for part in ranges):
                raise Unsupported(f"the log of {target} no longer goes back to its beginning")
            read = partial(forwarded_digests, node, one.kind, self._shares)
            held = self._spark_tasks.make(read, ranges)
            others = one.kind == "remote" or not whole
            found.add(self._judged("messages", number, held, topics=topics, others=others))
        return found

    # --- the second look ---

    def _look_again(self, attached: RoutedSink, shown: Sequence[dict[str, Any]]) -> None:
        """Say of the shown vectors whose values differ where they do."""
        differing = {_key(one): one for one in shown if one["kind"] == "values"}
        if not differing:
            return
        assert attached.spec is not None, "made of settings"
        names = frozenset(differing)
        homes = {(one["topic"], one["partition"]) for one in differing.values()}
        tasks = [t for t in self._tasks if (t.range.topic, t.range.partition) in homes]
        fold = self._spark_tasks.make(partial(folded_values, self._order, names), tasks)
        expected = self._values(fold)
        held = self._held_values(attached, attached.spec, names)
        for key, one in differing.items():
            (revision, wanted), actual = max(expected[key].items()), held.get(key, {})
            if revision in actual and len(actual[revision]) == len(wanted):
                one |= _component(actual[revision], wanted)

    def _held_values(
        self, attached: RoutedSink, spec: SinkSpec, names: frozenset[bytes]
    ) -> dict[bytes, dict[int, Any]]:
        sink, pieces = attached.sink, pieces_of(attached.sink)
        if self._in_tasks(spec):
            scan = partial(scanned_values, spec, names)
            return self._values(self._spark_tasks.make(scan, pieces))
        found = (one for piece in pieces for one in held_values(sink, names, piece))
        return self._values(self._spark_tasks.given(found))

    def _values(self, parcels: Parcels) -> dict[bytes, dict[int, Any]]:
        """The values of some vectors by key and revision."""
        found: dict[bytes, dict[int, Any]] = {}
        for packed in self._spark_tasks.collected(parcels):
            for row in table_of(packed).to_pylist():
                values = np.array(row["vector"], np.float32)
                found.setdefault(_key(row), {})[row["revision"]] = values
        return found


def _only(folded: Parcels, what: int, topics: Sequence[str] | None = None) -> Parcels:
    chosen = folded.filter(lambda one: one[0] == what and (topics is None or one[1] in topics))
    return chosen.map(lambda one: one[2])


def _whole_log(access: NodeAccess, topic: str) -> list[ReadRange]:
    found = access.log_status(topic)
    return [ReadRange(topic, s.partition, s.sequence_first, s.readable) for s in found]


def _destination(one: SinkSettings, node: Connecting) -> Connecting:
    """The node that a forwarding sink writes to."""
    if "url" not in one.options:
        return node
    return Connecting(
        url=one.options["url"],
        api_key=one.options.get("api_key"),
        api_key_file=one.options.get("api_key_file"),
        tls=one.options.get("ca"),
    )


def _key(named: dict[str, Any]) -> bytes:
    name = f"{named['namespace']}\0{named['vector_id']}"
    return xxhash.xxh3_128_digest(name.encode())


def _component(actual: Any, wanted: Any) -> dict[str, Any]:
    unequal = np.flatnonzero(actual.view(np.uint32) != wanted.view(np.uint32))
    at = int(unequal[0])
    return {
        "component": at,
        "value": float(actual[at]),
        "expected": float(wanted[at]),
        "components": len(unequal),
    }


def partition_document(report: FoldReport) -> dict[str, Any]:
    """What is told of a partition; `from` is what its fold began from."""
    begun: dict[str, Any] = {"from": report.origin}
    if report.origin == "snapshot":
        begun["snapshot_sequence"] = report.begin - 1
    return {
        "topic": report.topic,
        "partition": report.partition,
        "ok": report.damage is None,
        "first": report.first,
        "last": report.last,
        **begun,
        "batches": report.batches,
        "messages": report.messages,
        "bytes": report.bytes,
        "chain": None if report.chain is None else f"{report.chain:016x}",
        "digest": None if report.digest is None else f"{report.digest:016x}",
        **report.counts,
        **({} if report.damage is None else {"damage": report.damage}),
    }
