"""The audit: proof that the log is whole and that every sink holds what the log adds up to.

    log ── Spark, a task per partition: CRC, gapless, chain; fold ──► states, released deltas
                                                                          │ compared with
    sinks ── scan ────────────────────────────────────────────────────────┘

The log is folded up to where it ends when the audit begins. A sink that the pipeline has brought up
to there must be equal; one that has not come so far is *lagging*: that is told with its lag, and
only what no lag can explain is called different. If the log has grown meanwhile, rows that are
newer than the fold are no difference either. At rest neither excuse holds.

A sink is compared by what it keeps: vectors, a history, or messages that it passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import NotFound, Unavailable, Unsupported
from penstock.sinks.lake import LakeSink
from penstock.sinks.letters import dead_letter_topic
from penstock.sinks.schema import DELTAS
from penstock.spark.attachment import node_of
from penstock.spark.delivery.delivery import RoutedSink
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.fold.log_deltas import read_deltas
from penstock.spark.jobs.comparison import (
    COMPARED,
    Comparison,
    Excuse,
    Expected,
    Ids,
    compare_forwarded,
    compare_history,
    compare_states,
    delta_ids,
    notice_ids,
)
from penstock.spark.jobs.log_fold import (
    PartitionFold,
    fold_partitions,
    log_ranges,
    loss_of,
    scratch,
)
from penstock.spark.jobs.stores import (
    PipelineProgress,
    opened_sink,
    propagation_of,
    read_progress,
    wait_for,
)
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import ReadRange

Verdict = Literal["equal", "lagging", "different", "unavailable", "unproven"]
# A sink that nobody can read back does not speak against the others; it is named.
_FINE: Final[frozenset[Verdict]] = frozenset({"equal", "unproven"})


class Audit:
    def __init__(self, spark: Any, settings: PipelineSettings, *, wait_s: float = 0.0) -> None:
        self._spark, self._settings, self._wait_s = spark, settings, wait_s
        self._node = node_of(settings)
        self._ranges: list[ReadRange] = []

    def run(self) -> dict[str, Any]:
        """The whole audit; `ok` is whether everything that can be proved was."""
        self._settings.state.mkdir(parents=True, exist_ok=True)
        with scratch(self._settings.state) as folder:
            self._ranges = log_ranges(self._node, self._settings.topics)
            folds = fold_partitions(
                self._spark,
                self._ranges,
                node=self._node,
                folder=folder,
                options=propagation_of(self._settings),
                deltas=True,
            )
            reasons = list(_unsound(folds))
            sinks = {} if reasons else self._sinks(FoldedLog(folds))
        proved = all(sink["verdict"] in _FINE for sink in sinks.values())
        document: dict[str, Any] = {
            "ok": not reasons and proved,
            "pipeline": self._settings.name,
            "partitions": [partition_document(fold) for fold in folds],
            "sinks": sinks,
        }
        return document | ({"reasons": reasons} if reasons else {})

    def _sinks(self, fold: FoldedLog) -> dict[str, Any]:
        names = [sink.name for sink in self._settings.sinks]
        progress = wait_for(
            lambda: read_progress(self._settings.state, names),
            lambda found: all(found.reached(name, self._ranges) for name in names),
            timeout_s=self._wait_s,
        )
        return {one.name: self._sink(one, fold, progress) for one in self._settings.sinks}

    def _sink(
        self, one: SinkSettings, fold: FoldedLog, progress: PipelineProgress
    ) -> dict[str, Any]:
        """A sink that cannot be reached or read is no reason not to look at the others."""
        about = {"kind": one.kind}
        try:
            with opened_sink(self._settings, one) as attached:
                parts = compare_sink(fold, one, attached, node=self._node)
        except Unsupported as error:
            return about | {"verdict": "unproven", "reason": error.message}
        except (Unavailable, NotFound) as error:
            return about | {"verdict": "unavailable", "reason": error.message}
        excused = self._excuses(one.name, progress)
        lagging = "behind" in excused
        if always_behind(attached):
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


def _unsound(folds: Sequence[PartitionFold]) -> Iterator[str]:
    """Why the log gives nothing to compare sinks with."""
    for fold in folds:
        one = fold.range
        if fold.damage is not None:
            yield f"{one.topic}/{one.partition} is damaged: {fold.damage['reason']}"
        elif loss := loss_of(one):
            yield loss


def partition_document(fold: PartitionFold) -> dict[str, Any]:
    """A partition's share of the answer."""
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


_NO_HISTORY: Final = DELTAS.empty_table()
# Sinks that keep no vectors but pass deltas on: how the ids in their topic are read, its name.
_FORWARDING: Final[dict[str, tuple[Callable[[NodeAccess, str], Ids], str]]] = {
    "remote": (delta_ids, "{topic}"),
    "notify": (notice_ids, "{topic}-changes"),
}


@dataclass(frozen=True)
class FoldedLog:
    """What the log adds up to: files of the fold's tasks."""

    partitions: Sequence[PartitionFold]

    @cached_property
    def expected(self) -> Expected:
        """Every vector, for sinks that get them all."""
        return Expected([fold.states() for fold in self.partitions])


def compare_sink(
    fold: FoldedLog, one: SinkSettings, attached: RoutedSink, *, node: Connecting
) -> dict[str, Comparison]:
    """What of the sink differs from the fold, by part."""
    if one.kind in _FORWARDING:
        return {"messages": _compare_messages(fold, one, attached.routes, node)}
    parts = {"vectors": _compare_vectors(fold, one, attached, node)}
    if isinstance(attached.sink, LakeSink):
        parts["history"] = _compare_history(fold, attached.sink, attached.routes)
    return parts


def _compare_vectors(
    fold: FoldedLog, one: SinkSettings, attached: RoutedSink, node: Connecting
) -> Comparison:
    expected = fold.expected
    if one.route:
        expected = Expected([_routed(part, attached.routes) for part in fold.partitions])
    dead = expected.among(_refused(fold, one, node))
    return compare_states(expected, attached.sink.scan(), dead=dead)


def _routed(partition: PartitionFold, routes: SinkRoutes) -> pa.Table:
    touching = partition.released() if routes.judge_states_by_deltas else None
    return routes.states(partition.states(), touching)


def _refused(fold: FoldedLog, one: SinkSettings, node: Connecting) -> NDArray[np.uint64]:
    """The vectors of the sink's dead letters, by the hashes of their names."""
    access, found = node.access(), [np.empty((0, 2), np.uint64)]
    for topic in dict.fromkeys(partition.range.topic for partition in fold.partitions):
        letters = dead_letter_topic(topic, one.name)
        try:
            partitions = access.log_status(letters)
        except NotFound:
            continue  # nothing was ever refused
        for status in partitions:
            reading = read_deltas(
                access,
                letters,
                status.partition,
                first=status.sequence_first,
                last=status.readable,
            )
            found += [deltas.vector for deltas, _ in reading]
    return np.concatenate(found)


def _compare_history(fold: FoldedLog, lake: LakeSink, routes: SinkRoutes) -> Comparison:
    """A log partition at a time: that much is in memory."""
    found = Comparison()
    for partition in fold.partitions:
        where = (pc.field("topic") == partition.range.topic) & (
            pc.field("partition") == partition.range.partition
        )
        held = list(lake.history.batches(COMPARED, where=where))
        actual = pa.Table.from_batches(held) if held else _NO_HISTORY
        compare_history(routes.deltas(partition.released()), actual, found)
    return found


def _compare_messages(
    fold: FoldedLog, one: SinkSettings, routes: SinkRoutes, node: Connecting
) -> Comparison:
    read, usual = _FORWARDING[one.kind]
    by_topic: dict[str, list[pa.Table]] = {}
    for partition in fold.partitions:
        target = one.options.get("topic") or usual.format(topic=partition.range.topic)
        by_topic.setdefault(target, []).append(routes.deltas(partition.released()))
    access = _node_of(one.options, node).access()
    whole = Comparison()
    for topic, released in by_topic.items():
        held = read(access, topic)
        whole.add(compare_forwarded(released, held, only_ours=one.kind == "notify"))
    return whole


def _node_of(options: dict[str, Any], node: Connecting) -> Connecting:
    """The node that a sink's options name, or the pipeline's own."""
    if "url" not in options:
        return node
    return Connecting(
        url=options["url"],
        api_key=options.get("api_key"),
        api_key_file=options.get("api_key_file"),
        tls=options.get("ca"),
    )


def always_behind(attached: RoutedSink) -> bool:
    """Whether the sink rightly holds older states: a later change need not match its route."""
    return attached.routes.judge_states_by_deltas
