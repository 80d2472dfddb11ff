"""The audit: proof that the log is whole and that every sink holds what the log adds up to.

    log ── Spark, a task per partition: CRC, gapless, chain; fold ──► states, released deltas
                                                                          │ compared with
    sinks ── scan ────────────────────────────────────────────────────────┘

The log is folded up to where it ends when the audit begins. A sink that the pipeline has brought up
to there must be equal; one that has not come so far is *lagging*: that is told with its lag, and
only what no lag can explain is called different. If the log has grown meanwhile, rows that are
newer than the fold are no difference either. At rest neither excuse holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from penstock.errors import NotFound, Unavailable, Unsupported
from penstock.spark.jobs.differences import Excuse
from penstock.spark.jobs.fold import FoldTask, PartitionFold, fold_partitions
from penstock.spark.jobs.progress import Progress, read_progress, wait_for
from penstock.spark.jobs.ranges import LogRange, connecting, whole_log
from penstock.spark.jobs.scratch import scratch
from penstock.spark.jobs.sink_audit import Fold, always_behind, compare_sink
from penstock.spark.jobs.stores import opened_sink, propagation_of
from penstock.spark.settings import PipelineSettings, SinkSettings

Verdict = Literal["equal", "lagging", "different", "unavailable", "unproven"]
# A sink that nobody can read back does not speak against the others; it is named.
_FINE: Final[frozenset[Verdict]] = frozenset({"equal", "unproven"})


class Audit:
    def __init__(self, spark: Any, settings: PipelineSettings, *, wait_s: float = 0.0) -> None:
        self._spark, self._settings, self._wait_s = spark, settings, wait_s
        self._node = connecting(settings)
        self._ranges: list[LogRange] = []

    def run(self) -> dict[str, Any]:
        """The whole audit; `ok` is whether everything that can be proved was."""
        self._settings.state.mkdir(parents=True, exist_ok=True)
        with scratch(self._settings.state) as folder:
            self._ranges = whole_log(self._node, self._settings.topics)
            folds = fold_partitions(self._spark, self._tasks(folder))
            reasons = list(_unsound(self._ranges, folds))
            sinks = {} if reasons else self._sinks(Fold(folder, folds))
        proved = all(sink["verdict"] in _FINE for sink in sinks.values())
        document: dict[str, Any] = {
            "ok": not reasons and proved,
            "pipeline": self._settings.name,
            "partitions": [partition_document(fold) for fold in folds],
            "sinks": sinks,
        }
        return document | ({"reasons": reasons} if reasons else {})

    def _tasks(self, folder: Path) -> list[FoldTask]:
        options = propagation_of(self._settings)
        return [
            FoldTask(node=self._node, range=one, folder=folder, options=options, deltas=True)
            for one in self._ranges
        ]

    def _sinks(self, fold: Fold) -> dict[str, Any]:
        names = [sink.name for sink in self._settings.sinks]
        progress = wait_for(
            lambda: read_progress(self._settings.state, names),
            lambda found: all(found.reached(name, self._ranges) for name in names),
            timeout_s=self._wait_s,
        )
        return {one.name: self._sink(one, fold, progress) for one in self._settings.sinks}

    def _sink(self, one: SinkSettings, fold: Fold, progress: Progress) -> dict[str, Any]:
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

    def _excuses(self, sink: str, progress: Progress) -> set[Excuse]:
        """What may explain a difference. The log is looked at after the comparison."""
        excuses: set[Excuse] = {"dead"}
        if not progress.reached(sink, self._ranges):
            excuses.add("behind")
        now = whole_log(self._node, self._settings.topics)
        if any(later.last > one.last for later, one in zip(now, self._ranges, strict=True)):
            excuses.add("ahead")
        return excuses


def _unsound(ranges: Sequence[LogRange], folds: Sequence[PartitionFold]) -> Iterator[str]:
    """Why the log gives nothing to compare sinks with."""
    for one, fold in zip(ranges, folds, strict=True):
        if fold.damage is not None:
            yield f"{one.topic}/{one.partition} is damaged: {fold.damage['reason']}"
        elif not one.complete:
            yield (
                f"{one.topic}/{one.partition} begins at sequence {one.first}: retention has"
                " deleted what the vectors were made of"
            )


def partition_document(fold: PartitionFold) -> dict[str, Any]:
    """A partition's share of the answer."""
    return {
        "topic": fold.topic,
        "partition": fold.partition,
        "ok": fold.damage is None,
        "first": fold.first,
        "last": fold.last,
        "batches": fold.batches,
        "messages": fold.messages,
        "bytes": fold.bytes,
        "chain": None if fold.chain is None else f"{fold.chain:016x}",
        "digest": None if fold.digest is None else f"{fold.digest:016x}",
        **fold.counts,
        **({} if fold.damage is None else {"damage": fold.damage}),
    }
