"""The driver's half of the fold: it plans ranges of the log, and commits what tasks made of them.

    newest manifest ─► ranges within the rate ─► a Spark job, a task per partition ─► next manifest
         heads              from the node            reads, folds, writes its file        heads

One trigger after the other, in the pipeline's own thread. Rows never pass through here: a task
reads its range from the node itself, writes a change file to the store, and answers with its name.
Spark has no memory of any of it, and no checkpoint: a job that fails is planned anew from the
newest manifest, by this driver or by the next one.

How many rows a trigger takes is adapted after each. Utilisation is a trigger's time over
`target_trigger_s`. Only a trigger that took most of what it might counts: one that found little to
read says nothing of how much it could bear. While triggers are over in no time the rate doubles.
The manifest carries it, so that the next run begins there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import PenstockError
from penstock.log.crash import crash_point
from penstock.node.observe.logs import get_logger
from penstock.propagation.flow.rate import AdaptiveRate
from penstock.spark.executors import Job, cause_of, run_job
from penstock.spark.fold.partition_step import FoldPlan, PartitionStep
from penstock.spark.fold.state import (
    ChangeLog,
    ChangePart,
    DriverClaim,
    FoldHead,
    FoldSnapshots,
    Heads,
    Manifest,
    snapshots_of,
)
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import (
    LogBounds,
    Offsets,
    ReadRange,
    TriggerBudget,
    advance,
    between,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = get_logger(__name__)
# On this machine half of the cores are left to the node, the JVM and the sinks: a fold by both of
# two cores was no faster, and the whole way into sinks slower by a tenth. On a cluster the fold may
# have every core: the pools of the fair scheduler share them with the sinks.
CORES_PER_LOCAL_TASK: Final = 2
IDLE_S: Final = 0.1  # between two looks for something to read
BACKOFF_S_BASE: Final = 0.5  # before a failed trigger is planned anew; doubles with each in a row
BACKOFF_S_CAP: Final = 30.0
PAUSED_SHARE: Final = 0.8  # of the bytes at which reading pauses, where it goes on
POOL: Final = "fold"
FULL_SHARE: Final = 0.5  # of the rate, from which on a trigger counts
BARELY: Final = 0.25  # of the target: a trigger that takes less lets the rate double

Unit = tuple[ReadRange, FoldHead | None]


class FoldDriver:
    def __init__(
        self,
        settings: PipelineSettings,
        *,
        spark: SparkSession,
        claim: DriverClaim,
        changes: ChangeLog,
        heads: Heads,
        plan: FoldPlan,
    ) -> None:
        self._settings, self._context = settings, spark.sparkContext
        self._claim, self._changes, self._plan = claim, changes, plan
        self._heads = heads
        self._group = f"penstock-{plan.pipeline}-fold"
        self._snapshots = FoldSnapshots(changes.store, claim=claim.number)
        newest = changes.newest()
        known = None if newest is None else newest.rows_per_trigger
        self._rate = TriggerRate(settings, known=known)
        self._options = ReadOptions(node=plan.node, topics=settings.topics, mode="ranges")
        self._goal: Offsets | None = None  # where a run ends by itself
        self._due = 0.0  # when the next trigger may begin
        self._failures = 0  # in a row
        self._tasks = 0  # of the last job
        self._swept = False
        self._outdated: set[str] = set()  # snapshots that no head refers to any more
        self._progress: dict[str, Any] = {}  # of the last trigger
        self._paused = False
        self.restarts = 0
        self.last_error: PenstockError | None = None

    def start(self, *, available_now: bool = False) -> None:
        if available_now:
            self._goal = self._bounds().latest()

    def step(self, *, undelivered: int) -> bool:
        """Fold a trigger, or wait a moment; False once all that was asked for is folded."""
        left = self._due - time.monotonic()
        if left > 0:
            time.sleep(min(left, IDLE_S))
            return True
        if self._pauses(undelivered):
            time.sleep(IDLE_S)
            return True
        began = time.monotonic()
        try:
            rows = self._trigger()
        except Exception as error:  # noqa: BLE001  the job's boundary: sorted out right here
            self._failed(error)
            return True
        self._failures = 0
        if rows:
            self._due = began + self._settings.trigger_interval_s
        elif self._goal is not None:
            return False
        else:
            time.sleep(IDLE_S)
        return True

    def cancel(self) -> None:
        """End the job under way, from another thread."""
        self._context.cancelJobGroup(self._group)

    # --- a trigger ---

    def _trigger(self) -> int:
        """How many sequences were folded; 0 if there was nothing to read."""
        began = time.monotonic()
        bounds = self._bounds()
        start = bounds.held(offsets_of(self._heads))
        newest = bounds.latest()
        end = advance(
            start,
            newest if self._goal is None else self._goal,
            topics=self._settings.topics,
            budget=TriggerBudget(self._rate.rows, None),
            measure=self._plan.node.access().extents,
        )
        ranges = list(between(start, end))
        if not ranges:
            return 0
        planned = time.monotonic()
        heads = self._heads
        outcomes = self._run([(r, heads[r.topic].partitions.get(r.partition)) for r in ranges])
        folded = time.monotonic()
        self._commit(outcomes)
        ended = time.monotonic()
        rows = sum(one.last - one.first + 1 for one in ranges)
        took = {"plan": planned - began, "fold": folded - planned, "commit": ended - folded}
        self._observe(
            rows, began=began, ended=ended, took=took, start=start, end=end, newest=newest
        )
        return rows

    def _run(self, units: Sequence[Unit]) -> list[tuple[FoldHead, ChangePart]]:
        trigger = (self._changes.last or 0) + 1
        job = Job(
            pool=POOL,
            group=self._group,
            description=f"{self._settings.name}: fold of trigger {trigger}",
            workers=POOL,
        )
        # Asked at each trigger: executors come and go.
        context: Any = self._context
        most = self._settings.tasks or tasks_for(context.defaultParallelism, context.master)
        self._tasks = min(len(units), most)
        plan = self._plan  # it travels to the workers, and this object does not
        return run_job(
            self._context,
            job,
            lambda unit: PartitionStep(plan, unit[0]).run(unit[1]),
            units,
            tasks=self._tasks,
        )

    def _commit(self, outcomes: Sequence[tuple[FoldHead, ChangePart]]) -> None:
        heads = dict(self._heads)
        for head, part in outcomes:
            topic = heads[part.topic]
            known = {**topic.partitions, part.partition: head}
            heads[part.topic] = msgspec.structs.replace(topic, partitions=known)
        parts = sorted((part for _, part in outcomes), key=lambda one: (one.topic, one.partition))
        manifest = Manifest(
            trigger=0 if self._changes.last is None else self._changes.last + 1,
            claim=self._claim.number,
            feed=tuple(str(one.name).lower() for one in self._plan.feed),
            rows_per_trigger=self._rate.rows,
            parts=tuple(parts),
            heads=heads,
        )
        crash_point("pipeline.commit.before")
        held = self._changes.commit(manifest, check=self._claim.check)
        crash_point("pipeline.commit.after")
        self._settle(held)

    def _settle(self, held: Manifest) -> None:
        """Go on from the manifest that is there, and remove what it does without."""
        pinned, kept = self._changes.pinned(), snapshots_of(held.heads)
        self._outdated |= snapshots_of(self._heads) - kept
        self._heads = held.heads
        self._snapshots.drop(sorted(self._outdated - pinned))
        self._outdated &= pinned
        if not self._swept and held.claim == self._claim.number:
            swept = self._changes.sweep() + self._snapshots.sweep(kept | pinned)
            self._swept = True
            if swept:
                log.info("files of an interrupted trigger removed", files=swept)

    def _bounds(self) -> LogBounds:
        return LogBounds(self._plan.node.access(), self._options)

    # --- looking after it ---

    def _failed(self, error: BaseException) -> None:
        cause = cause_of(error)
        self.last_error = cause
        if not cause.retryable:
            raise cause from error
        delay = min(BACKOFF_S_CAP, BACKOFF_S_BASE * 2**self._failures)
        self._failures += 1
        self.restarts += 1
        self._due = time.monotonic() + delay
        log.warning(
            "trigger failed and will be planned anew", error=cause.message, delay_s=round(delay, 1)
        )

    def _observe(
        self, rows: int, *, began: float, ended: float, took: dict[str, float],
        start: Offsets, end: Offsets, newest: Offsets,
    ) -> None:  # fmt: skip
        seconds = ended - began
        first = not self._progress  # the first trigger of a run starts the workers, too
        behind = sum(
            max(0, n - end[t].get(p, 1)) for t, all_ in newest.items() for p, n in all_.items()
        )
        self._progress = {
            "trigger": self._changes.last, "seconds": round(seconds, 3), "sequences": rows,
            "from": _flat(start), "to": _flat(end), "lag": behind,
            "durations_ms": {name: round(s * 1000) for name, s in took.items()},
        }  # fmt: skip
        if not first:
            self._rate.observe(rows, seconds)

    def _pauses(self, undelivered: int) -> bool:
        limit = self._settings.changes_bytes_max
        if undelivered > limit and not self._paused and self._goal is None:
            log.warning("reading pauses", undelivered_bytes=undelivered, limit=limit)
            self._paused = True
        elif undelivered < limit * PAUSED_SHARE and self._paused:
            log.info("reading goes on", undelivered_bytes=undelivered)
            self._paused = False
        return self._paused

    def describe(self) -> dict[str, Any]:
        return {
            "topics": list(self._settings.topics),
            "tasks": self._tasks,
            "rows_per_trigger": self._rate.rows,
            "paused": self._paused,
            "restarts": self.restarts,
            "waiting": self._failures > 0,
            "last_error": None if self.last_error is None else self.last_error.to_wire(),
            **self._progress,
        }


def tasks_for(cores: int, master: str) -> int:
    """How many tasks may fold at a time, if nobody says so."""
    return max(1, cores // CORES_PER_LOCAL_TASK) if master.startswith("local") else cores


def offsets_of(heads: Heads) -> Offsets:
    """Per partition the sequence behind the last folded one."""
    return {
        name: {partition: head.sequence + 1 for partition, head in topic.partitions.items()}
        for name, topic in heads.items()
    }


def _flat(offsets: Offsets) -> dict[str, int]:
    return {f"{t}/{p}": n for t, found in offsets.items() for p, n in sorted(found.items())}


class TriggerRate:
    def __init__(self, settings: PipelineSettings, *, known: int | None = None) -> None:
        self._target_s = settings.target_trigger_s
        bounds = settings.rows_per_trigger
        initial = min(max(known or bounds.initial, bounds.min), bounds.max)
        self._rate = AdaptiveRate(initial=initial, minimum=bounds.min, maximum=bounds.max)

    @property
    def rows(self) -> int:
        return int(self._rate.rate)

    def observe(self, rows: int, seconds: float) -> None:
        if rows < self.rows * FULL_SHARE:
            return
        if seconds < self._target_s * BARELY:
            self._rate.rate = min(self._rate.rate * 2, self._rate.maximum)
        else:
            self._rate.adjust(seconds / self._target_s)
