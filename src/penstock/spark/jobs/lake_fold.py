"""The pipeline's lake in the place of a fold, for partitions whose fold can no longer be made.

A fold begins at the log's beginning or at a snapshot. Where neither leads to the log that retention
has left, a lake of the pipeline still has what came out of the fold: every delta that was released,
and how each vector is now. `LakeFold` gives a task these as `ProvedFold` gives them of the log.

It serves if the lake holds everything up to the newest trigger, and nothing is asked for that it
does not keep: vectors as they were at an earlier time, and messages as they were sent. What the
pipeline has not folded yet is not in it: the task's range ends where the pipeline's head is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from penstock.errors import FailedPrecondition
from penstock.sinks.protocol import Feed
from penstock.spark.delivery.attachment import SinkSpec
from penstock.spark.delivery.lakes import (
    lake_deltas,
    lake_for,
    lake_position,
    lake_states,
    opened_lake,
)
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.jobs.log_fold import (
    STATES_ROWS,
    FoldOrder,
    FoldReport,
    PlannedFold,
    ProvedFold,
)
from penstock.spark.jobs.stores import PipelineProgress, spec_of
from penstock.spark.settings import PipelineSettings

POLL_S: Final = 0.2


class LakeFold:
    """What a lake holds of one partition: `released`, `states` and `report`, each by itself."""

    def __init__(self, order: FoldOrder, task: PlannedFold) -> None:
        assert order.lake is not None, "the task was planned for a lake"
        self._lake, self._task = order.lake, task
        self._place = (task.range.topic, task.range.partition)
        self._vectors = self._released = 0

    def released(self, *, payloads: bool = False) -> Iterator[pa.Table]:
        assert not payloads, "a lake does not keep messages as they were sent"
        with opened_lake(self._lake) as lake:
            for deltas in lake_deltas(lake, self._place, through=self._task.range.last):
                self._released += deltas.num_rows
                yield deltas

    def drain(self) -> None:
        """Nothing: the states do not depend on what was released."""

    def reject_damage(self) -> None:
        """Nothing: of the log nothing was read."""

    def states(self) -> Iterator[pa.Table]:
        with opened_lake(self._lake) as lake:
            for states in lake_states(lake, self._place):
                self._vectors += states.num_rows
                for start in range(0, states.num_rows, STATES_ROWS):
                    yield states.slice(start, STATES_ROWS)

    def report(self) -> FoldReport:
        one = self._task.range
        return FoldReport(
            topic=one.topic, partition=one.partition, first=one.first, last=one.last,
            origin="lake", begin=one.last + 1, ordinal=0, batches=0, messages=0, bytes=0,
            vectors=self._vectors,
        )  # fmt: skip


def fold_of(order: FoldOrder, task: PlannedFold) -> ProvedFold | LakeFold:
    return LakeFold(order, task) if task.origin == "lake" else ProvedFold(order, task)


# --- in the driver ---


def planned_with_lake(
    planned: Sequence[PlannedFold],
    settings: PipelineSettings,
    progress: PipelineProgress,
    *,
    feed: Feed,
    routes: SinkRoutes | None = None,
    but: Sequence[str] = (),
    wait_s: float = 0.0,
) -> tuple[list[PlannedFold], SinkSpec | None]:
    """The tasks, those whose log is lost as tasks of a lake, and that lake if there are some.
    `progress` is that by whose heads they were planned. Raises `FailedPrecondition` that tells what
    is lost, and why no lake can give it."""
    lost = [task for task in planned if task.loss is not None]
    if not lost:
        return list(planned), None
    try:
        lake = lake_for(settings, feed=feed, routes=routes or SinkRoutes(), but=but)
        spec = spec_of(settings, lake)
        _await(spec, settings, progress.last, wait_s=wait_s)
        found = [task if task.loss is None else _of_lake(task, feed) for task in planned]
    except FailedPrecondition as error:
        raise FailedPrecondition(
            f"{lost[0].loss}; {error.message}", sequence_first=lost[0].range.first
        ) from error
    return found, spec


def _await(lake: SinkSpec, settings: PipelineSettings, trigger: int, *, wait_s: float) -> None:
    """Wait until the lake holds everything up to a trigger, if the pipeline runs."""
    store, deadline = settings.store.open(), time.monotonic() + wait_s
    while (held := lake_position(store, lake)) < trigger:
        if time.monotonic() >= deadline:
            raise FailedPrecondition(
                f"{lake.settings.name} holds triggers up to {held}, not yet {trigger}: let it"
                " catch up"
            )
        time.sleep(POLL_S)


def _of_lake(task: PlannedFold, feed: Feed) -> PlannedFold:
    one, head = task.range, task.head
    if head is None:
        raise FailedPrecondition("the pipeline has not folded it, so that its lake has none of it")
    if feed & Feed.STATES and one.last < head.sequence:
        raise FailedPrecondition("a lake has vectors as they are now, not as they were then")
    reached = replace(one, last=min(one.last, head.sequence))
    return replace(task, range=reached, origin="lake")
