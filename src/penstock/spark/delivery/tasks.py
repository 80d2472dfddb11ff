"""Writing a sink by tasks on Spark. The driver plans and commits; rows pass through executors only.

    plan ─► parts of the change log ─► a task for each share of them ─► receipts ─► commit, once
    driver        manifests                select, write, bury           driver       driver

A task is given names of sections, not rows. It reads them from the store, chooses what the sink's
routes take, and writes with a sink of its own, which its process keeps open for the next task. What
the sink can never take goes to the dead letters right there. The answer is an *outcome*: receipts
and counts.

**How a write is shared out.** The rows of a log partition stay together (`selection`), so by
partition; or, for a sink that has shards, by shard: then every task reads the sections of its
shards. A sink has at most its share of the executors' slots at a time, so that one whose store is
slow leaves the others theirs.

**What fails.** A sink that cannot be written is an outcome, not a failed task: Spark would repeat
that at once, and the sink's own patience knows better. A task that dies with its executor is
repeated by Spark, and a job that fails all the same by the sink's worker. All of that is the same
write again, which changes nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import SinkRejected, Unavailable
from penstock.log.crash import crash_point
from penstock.sinks.protocol import Feed, TaskSink, Work
from penstock.spark.delivery.attachment import SinkSpec, letter_box
from penstock.spark.delivery.backlog import DELTAS, STATES
from penstock.spark.delivery.lakes import opened_lake
from penstock.spark.delivery.refill import (
    RefillPlan,
    fill_files,
    lake_files,
    lake_units,
    lost,
    units_of,
)
from penstock.spark.delivery.selection import ChangeSelection, Portion, Shard, TakenPart
from penstock.spark.delivery.transform import Transform, frame_of, transformed
from penstock.spark.executors import Job, causes, error_named, run_job
from penstock.spark.fold.partition_step import FoldPlan
from penstock.spark.fold.state import ChangePart, Manifest
from penstock.spark.store import StoreAddress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINKS_MAX: Final = 64  # that a process keeps open


@dataclass(frozen=True, kw_only=True)
class SinkTask:
    """A task's share of a write: these parts of the change log, or these shards of them."""

    portion: Portion
    shards: tuple[Shard | None, ...] = (None,)

    def only(self, columns: frozenset[int]) -> SinkTask:
        """The same share of some columns of the backlog."""
        wanted = [one._replace(columns=one.columns & columns) for one in self.portion.taken]
        taken = tuple(one for one in wanted if one.wanted)
        return replace(self, portion=self.portion._replace(taken=taken))


@dataclass(frozen=True, kw_only=True)
class SinkOrder:
    """What every task of a write is told."""

    spec: SinkSpec
    changes: StoreAddress
    rows_max: int | None = None  # of one call of the sink
    # Of the sink's store. A sink that was opened in another one is opened anew: it may remember
    # what is no longer there.
    incarnation: str = ""


@dataclass(kw_only=True)
class SinkOutcome:
    receipts: list[Any] = field(default_factory=list)
    rows: int = 0
    coalesced: int = 0
    rejected: int = 0
    dead_letters: int = 0
    # The log times of all rows: the different ones, and how many rows have each.
    log_times_ms: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    time_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    failure: tuple[str, str] | None = None  # the class and the message of what the sink raised


def shares(portion: Portion, *, tasks: int, shards: int) -> list[SinkTask]:
    """A write in up to `tasks` tasks, about equal in bytes."""
    if shards:
        groups = [range(number, shards, tasks) for number in range(min(tasks, shards))]
        return [
            SinkTask(portion=portion, shards=tuple(Shard(number, shards) for number in group))
            for group in groups
        ]
    places: dict[tuple[str, int], list[TakenPart]] = defaultdict(list)
    for one in portion.taken:
        places[one.part.topic, one.part.partition].append(one)
    bins: list[tuple[int, list[TakenPart]]] = [(0, []) for _ in range(min(tasks, len(places)))]
    for group in sorted(places.values(), key=_bytes, reverse=True):
        least = min(range(len(bins)), key=lambda number: bins[number][0])
        size, held = bins[least]
        bins[least] = size + _bytes(group), [*held, *group]
    return [SinkTask(portion=portion._replace(taken=tuple(held))) for _, held in bins]


def without_shards(tasks: Sequence[SinkTask]) -> tuple[int, list[SinkTask]]:
    """How many shards a write was shared out to, and tasks that have each of its parts once: where
    there are shards, every task was given all parts."""
    shard = tasks[0].shards[0]
    if shard is None:
        return 0, list(tasks)
    return shard.of, [replace(tasks[0], shards=(None,))]


def _bytes(taken: Sequence[TakenPart]) -> int:
    return sum(one.part.bytes for one in taken)


# --- in the task ---

# The sinks of this process, by its pid and what they are made of, with the incarnation.
_open: Final[dict[tuple[int, bytes], tuple[str, TaskSink]]] = {}


def opened_sink(spec: SinkSpec, *, incarnation: str = "") -> TaskSink:
    key = os.getpid(), msgspec.json.encode(spec)
    if key in _open and _open[key][0] != incarnation:
        _forget(spec)
    if key not in _open:
        built = spec.build()
        assert isinstance(built, TaskSink), f"{spec.settings.name} cannot be written in tasks"
        built.open()
        while len(_open) >= SINKS_MAX:
            _open.pop(next(iter(_open)))[1].close()
        _open[key] = incarnation, built
    return _open[key][1]


def write_share(order: SinkOrder, task: SinkTask) -> SinkOutcome:
    """One task. What the sink raises is part of the answer."""
    return _told(order, lambda outcome: _TaskWriter(order, outcome).write(task))


def write_rows(order: SinkOrder, portion: Portion, states: Iterator[pa.Table]) -> SinkOutcome:
    """One task that is given the states, instead of where they are."""
    return _told(order, lambda outcome: _TaskWriter(order, outcome).write_states(portion, states))


def read_states(order: SinkOrder, task: SinkTask) -> Iterator[pa.Table]:
    """The states of a task's share, for whoever is to do something with them first."""
    found = _selection(order, payloads=False).select(task.portion, rows_max=order.rows_max)
    return (work.states for work in found.works if work.states is not None)


def _told(order: SinkOrder, write: Callable[[SinkOutcome], None]) -> SinkOutcome:
    outcome = SinkOutcome()
    try:
        write(outcome)
    except Exception as error:  # noqa: BLE001  a sink may fail in any way; the driver decides
        _forget(order.spec)
        outcome.failure = type(error).__name__, str(error)
    return outcome


def _selection(order: SinkOrder, *, payloads: bool) -> ChangeSelection:
    return ChangeSelection(
        store=order.changes.open(),
        pipeline=order.spec.pipeline,
        routes=order.spec.routes,
        payloads=payloads,
    )


def _forget(spec: SinkSpec) -> None:
    """The next task begins with a sink that is opened anew."""
    _, sink = _open.pop((os.getpid(), msgspec.json.encode(spec)), (None, None))
    if sink is not None:
        sink.close()


class _TaskWriter:
    def __init__(self, order: SinkOrder, outcome: SinkOutcome) -> None:
        self._order, self._outcome = order, outcome
        self._sink = opened_sink(order.spec, incarnation=order.incarnation)
        self._selection = _selection(order, payloads=bool(self._sink.feed & Feed.PAYLOADS))

    def write(self, task: SinkTask) -> None:
        self._tell([self._write(task.portion, shard) for shard in task.shards])

    def write_states(self, portion: Portion, states: Iterator[pa.Table]) -> None:
        empty = Work(pipeline=self._order.spec.pipeline, first=portion.first, last=portion.last)
        times = [np.zeros(0, np.int64)]
        for table in states:
            self._hand_over(replace(empty, states=table), portion.taken)
            self._outcome.rows += table.num_rows
            times.append(table["log_time_ms"].to_numpy())
        self._tell(times)

    def _tell(self, times: Sequence[NDArray[np.int64]]) -> None:
        out = self._outcome
        out.log_times_ms, out.time_rows = np.unique(np.concatenate(times), return_counts=True)

    def _write(self, portion: Portion, shard: Shard | None) -> NDArray[np.int64]:
        found = self._selection.select(portion, rows_max=self._order.rows_max, shard=shard)
        for work in found.works:
            crash_point("delivery.task.before")
            self._hand_over(work, portion.taken)
            crash_point("delivery.task.after")
        self._outcome.rows += found.rows
        self._outcome.coalesced += found.coalesced
        return found.log_times_ms

    def _hand_over(self, work: Work, taken: Sequence[TakenPart]) -> None:
        try:
            receipt = self._sink.write_part(work)
        except SinkRejected as refused:
            receipt = refused.receipt
            self._bury(refused, work, taken)
        if receipt is not None:
            self._outcome.receipts.append(receipt)

    def _bury(self, refused: SinkRejected, work: Work, taken: Sequence[TakenPart]) -> None:
        self._outcome.dead_letters += letter_box(self._order.spec.node).bury(
            refused,
            work=work,
            sink=self._sink.name,
            touching=lambda: self._selection.all_deltas(taken),
        )
        self._outcome.rejected += len(refused.rows)


# --- back in the driver ---


def joined(outcomes: Sequence[SinkOutcome]) -> SinkOutcome:
    """All outcomes as one; raises what a sink raised in a task."""
    for outcome in outcomes:
        if outcome.failure is not None:
            name, message = outcome.failure
            raise error_named(name, message) or Unavailable(f"{name}: {message}")
    return SinkOutcome(
        receipts=[receipt for one in outcomes for receipt in one.receipts],
        rows=sum(one.rows for one in outcomes),
        coalesced=sum(one.coalesced for one in outcomes),
        rejected=sum(one.rejected for one in outcomes),
        dead_letters=sum(one.dead_letters for one in outcomes),
        log_times_ms=np.concatenate([one.log_times_ms for one in outcomes]),
        time_rows=np.concatenate([one.time_rows for one in outcomes]),
    )


class SinkJobs(Protocol):
    """Where the tasks of sinks run."""

    state: StoreAddress  # of the pipeline, whose change files tasks read

    def slots(self) -> int:
        """How many tasks one sink may have at a time."""
        ...

    def open(self, order: SinkOrder) -> SinkOutcome:
        """Open the sink where its tasks run, before there is anything to write."""
        ...

    def run(self, order: SinkOrder, tasks: Sequence[SinkTask]) -> list[SinkOutcome]: ...

    def fill(self, sink: str, feed: Feed, manifest: Manifest) -> list[ChangePart]:
        """Files of all that the fold holds as of a trigger, for the sink of that name."""
        ...

    def lost(self, feed: Feed, manifest: Manifest) -> str | None:
        """What is gone of the log that `fill` would need, None if everything is there."""
        ...

    def fill_from(
        self, lake: SinkSpec, sink: str, feed: Feed, manifest: Manifest
    ) -> list[ChangePart]:
        """The same as `fill`, of what a lake holds."""
        ...

    def filled(self, sink: str) -> tuple[int, int]:
        """How many tasks of the filling under way are done, and of how many."""
        ...

    def cancel(self, sink: str) -> None:
        """End the job of a sink, from another thread."""
        ...


class SparkSinkJobs:
    """`SinkJobs` on Spark, each sink in a pool of its own."""

    def __init__(
        self,
        session: SparkSession,
        *,
        fold: FoldPlan,
        name: str,
        sinks: int,
        transforms: Mapping[str, Transform],
    ) -> None:
        """`transforms` are the users' functions, by sink."""
        self._session, self._context = session, session.sparkContext
        self._fold, self._name, self._sinks = fold, name, sinks
        self._transforms = transforms
        self.state = fold.state

    def slots(self) -> int:
        """A share for each sink and one for the fold. Asked each time: executors come and go."""
        return max(1, self._context.defaultParallelism // (self._sinks + 1))

    def open(self, order: SinkOrder) -> SinkOutcome:
        job = self._job(order.spec.settings.name, f"opening {order.spec.settings.name}")
        nothing = SinkTask(portion=Portion(0, 0, ()))
        (opened,) = run_job(self._context, job, partial(write_share, order), [nothing], tasks=1)
        return opened

    def run(self, order: SinkOrder, tasks: Sequence[SinkTask]) -> list[SinkOutcome]:
        first, last, _ = tasks[0].portion
        span = f"trigger {first}" if first == last else f"triggers {first} to {last}"
        sink = order.spec.settings.name
        job, transform = self._job(sink, f"{span} into {sink}"), self._transforms.get(sink)
        if transform is None:
            return run_job(self._context, job, partial(write_share, order), tasks, tasks=len(tasks))
        plain = [task for one in tasks if (task := one.only(frozenset({DELTAS}))).portion.taken]
        found = run_job(self._context, job, partial(write_share, order), plain, tasks=len(plain))
        return found + self._transformed(order, tasks, transform)

    def _transformed(
        self, order: SinkOrder, tasks: Sequence[SinkTask], transform: Transform
    ) -> list[SinkOutcome]:
        """The states by way of the user's function; the job is that of the tasks before."""
        shards, units = without_shards([one.only(frozenset(STATES)) for one in tasks])
        whole = units[0].portion._replace(taken=tuple(p for u in units for p in u.portion.taken))
        with causes():
            return transformed(
                frame_of(self._session, units),
                transform,
                read=partial(read_states, order),
                write=partial(write_rows, order, whole),
                shards=shards,
                slots=self.slots(),
            )

    def fill(self, sink: str, feed: Feed, manifest: Manifest) -> list[ChangePart]:
        units = units_of(manifest)
        if not units:
            return []
        job = self._job(sink, f"all vectors as of trigger {manifest.trigger} for {sink}")
        work = partial(fill_files, RefillPlan(fold=self._fold, sink=sink, feed=feed))
        found = run_job(self._context, job, work, units, tasks=len(units))
        return [part for parts in found for part in parts]

    def lost(self, feed: Feed, manifest: Manifest) -> str | None:
        return lost(manifest, feed, status=self._fold.node.access().log_status)

    def fill_from(
        self, lake: SinkSpec, sink: str, feed: Feed, manifest: Manifest
    ) -> list[ChangePart]:
        with opened_lake(lake) as source:
            units = lake_units(source, feed, manifest)
        job = self._job(sink, f"{lake.settings.name} as of trigger {manifest.trigger} for {sink}")
        work = partial(lake_files, RefillPlan(fold=self._fold, sink=sink, feed=feed), lake)
        found = run_job(self._context, job, work, units, tasks=len(units))
        return [part for parts in found for part in parts]

    def filled(self, sink: str) -> tuple[int, int]:
        tracker = self._context.statusTracker()
        jobs = [
            tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._group(sink))
        ]
        running = [one for one in jobs if one is not None and one.status == "RUNNING"]
        found = [tracker.getStageInfo(number) for one in running for number in one.stageIds]
        stages = [stage for stage in found if stage is not None]
        return sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages)

    def cancel(self, sink: str) -> None:
        self._context.cancelJobGroup(self._group(sink))

    def _job(self, sink: str, what: str) -> Job:
        return Job(
            pool=f"sink-{sink}",
            group=self._group(sink),
            description=f"{self._name}: {what}",
            workers=f"sink-{sink}",
        )

    def _group(self, sink: str) -> str:
        return f"penstock-{self._name}-sink-{sink}"
