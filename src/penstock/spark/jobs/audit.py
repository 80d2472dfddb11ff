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

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import NotFound, Unavailable, Unsupported
from penstock.sinks.lake import LakeSink
from penstock.sinks.letters import dead_letter_topic
from penstock.sinks.schema import DELTAS
from penstock.spark.attachment import node_of
from penstock.spark.delivery.delivery import RoutedSink
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.fold.partition_step import read_deltas
from penstock.spark.jobs.comparison import (
    COMPARED,
    Comparison,
    Excuse,
    Expected,
    Keys,
    as_keys,
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
)
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import ReadRange

Verdict = Literal["equal", "lagging", "different", "unavailable", "unproven"]
POLL_S: Final = 0.2
# A sink that nobody can read back does not speak against the others; it is named.
_FINE: Final[frozenset[Verdict]] = frozenset({"equal", "unproven"})
_NO_HISTORY: Final = DELTAS.empty_table()
# Sinks that keep no vectors but pass deltas on: how the ids in their topic are read, its name.
_FORWARDING: Final[dict[str, tuple[Callable[[NodeAccess, str], Keys], str]]] = {
    "remote": (delta_ids, "{topic}"),
    "notify": (notice_ids, "{topic}-changes"),
}


class Audit:
    def __init__(self, spark: Any, settings: PipelineSettings, *, wait_s: float = 0.0) -> None:
        self._spark, self._settings, self._wait_s = spark, settings, wait_s
        self._node = node_of(settings)
        self._ranges: list[ReadRange] = []
        self._folds: list[PartitionFold] = []

    def run(self) -> dict[str, Any]:
        """The whole audit; `ok` is whether everything that can be proved was."""
        self._settings.state.mkdir(parents=True, exist_ok=True)
        with scratch(self._settings.state) as folder:
            self._ranges = log_ranges(self._node, self._settings.topics)
            self._folds = folds = fold_partitions(
                self._spark,
                self._ranges,
                node=self._node,
                folder=folder,
                options=propagation_of(self._settings),
                deltas=True,
            )
            reasons = list(_unsound(folds))
            sinks = {} if reasons else self._sinks()
        proved = all(sink["verdict"] in _FINE for sink in sinks.values())
        document: dict[str, Any] = {
            "ok": not reasons and proved,
            "pipeline": self._settings.name,
            "partitions": [partition_document(fold) for fold in folds],
            "sinks": sinks,
        }
        return document | ({"reasons": reasons} if reasons else {})

    def _sinks(self) -> dict[str, Any]:
        names = [sink.name for sink in self._settings.sinks]
        deadline = time.monotonic() + self._wait_s
        progress = read_progress(self._settings.state, names)
        while not all(progress.reached(name, self._ranges) for name in names):
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
            progress = read_progress(self._settings.state, names)
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
        """What of the sink differs from the fold, by part."""
        if one.kind in _FORWARDING:
            return {"messages": self._compare_messages(one, attached.routes)}
        parts = {"vectors": self._compare_vectors(one, attached)}
        if isinstance(attached.sink, LakeSink):
            parts["history"] = self._compare_history(attached.sink, attached.routes)
        return parts

    def _compare_vectors(self, one: SinkSettings, attached: RoutedSink) -> Comparison:
        expected = self._expected
        if one.route:
            expected = Expected([_routed(fold, attached.routes) for fold in self._folds])
        dead = np.isin(expected.keys, self._refused(one.name))
        return compare_states(expected, attached.sink.scan(), dead=dead)

    @cached_property
    def _expected(self) -> Expected:
        """Every vector, for sinks that get them all."""
        return Expected([fold.states() for fold in self._folds])

    def _refused(self, sink: str) -> Keys:
        """The vectors of the sink's dead letters, by the hashes of their names."""
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
            held = read(node.access(), topic)
            compare_forwarded(released, held, found, only_ours=one.kind == "notify")
        return found


def _routed(fold: PartitionFold, routes: SinkRoutes) -> pa.Table:
    touching = fold.released() if routes.judge_states_by_deltas else None
    return routes.states(fold.states(), touching)


def _unsound(folds: Sequence[PartitionFold]) -> Iterator[str]:
    """Why the log gives nothing to compare sinks with."""
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
