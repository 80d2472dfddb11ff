"""A pipeline's sinks and its state as jobs find them while it runs or rests.

How far a pipeline and its sinks have come is read from its store. The newest manifest says up to
which sequence every partition is folded and where its snapshots are, and a sink's cursor which
trigger it holds. A sink has *reached* a place in the log when the pipeline has folded up to there
and the sink's cursor is at that trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from penstock.errors import NotFound
from penstock.propagation.options import PropagationOptions
from penstock.sinks.protocol import Sink
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec, attach, node_of
from penstock.spark.delivery.backlog import NONE, CursorFile
from penstock.spark.fold.driver import offsets_of
from penstock.spark.fold.state import ChangeLog, Heads, read_identity
from penstock.spark.jobs.log_fold import FoldOrder
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.source.ranges import Offsets, ReadRange
from penstock.spark.store import Store

T = TypeVar("T")
READ_TRIES: Final = 3


def sink_settings(settings: PipelineSettings, name: str) -> SinkSettings:
    """The sink called `name`; `NotFound` names those there are."""
    for sink in settings.sinks:
        if sink.name == name:
            return sink
    known = ", ".join(sink.name for sink in settings.sinks) or "none"
    raise NotFound(f"the pipeline has no sink {name}, but {known}", sink=name)


def pipeline_id(settings: PipelineSettings) -> str:
    """The id of the pipeline's numbering of triggers; its name if it never ran."""
    identity = read_identity(settings.store.open())
    return settings.name if identity is None else identity.id


def propagation_of(settings: PipelineSettings) -> PropagationOptions:
    """The bounds that the pipeline folds with: those of its first run, if there was one."""
    identity = read_identity(settings.store.open())
    return settings.propagation if identity is None else identity.propagation


def order_of(settings: PipelineSettings) -> FoldOrder:
    """How tasks fold the log as the pipeline does."""
    return FoldOrder(node=node_of(settings), options=propagation_of(settings), state=settings.store)


def with_snapshots(run: Callable[[], T]) -> T:
    """What `run` returns, which reads the pipeline's heads and then the snapshots that they name. A
    pipeline that runs may delete one in between: then it is run again."""
    for _ in range(READ_TRIES - 1):
        try:
            return run()
        except NotFound:
            continue
    return run()


def spec_of(settings: PipelineSettings, one: SinkSettings) -> SinkSpec:
    return SinkSpec(settings=one, pipeline=pipeline_id(settings), node=node_of(settings))


@contextmanager
def opened_sink(settings: PipelineSettings, one: SinkSettings) -> Iterator[RoutedSink]:
    alone = msgspec.structs.replace(settings, sinks=(one,))
    (attached,) = attach(alone, pipeline=pipeline_id(settings), node=node_of(settings))
    attached.sink.open()
    try:
        yield attached
    finally:
        attached.sink.close()


@contextmanager
def opened_in_task(spec: SinkSpec) -> Iterator[Sink]:
    """A sink of the task's own: one that its process kept might know a store from before."""
    sink = spec.build()
    sink.open()
    try:
        yield sink
    finally:
        sink.close()


@dataclass(frozen=True, kw_only=True)
class PipelineProgress:
    last: int  # committed trigger, -1 before the first
    offsets: Offsets  # per partition the sequence behind the last folded one
    cursors: Mapping[str, int]  # the last trigger that each sink holds
    heads: Heads = field(default_factory=dict)  # where its fold stands, and its snapshots

    def unfolded(self, ranges: Sequence[ReadRange]) -> int:
        ends = [self.offsets.get(one.topic, {}).get(one.partition, 1) for one in ranges]
        return sum(max(0, one.last + 1 - end) for one, end in zip(ranges, ends, strict=True))

    def reached(self, sink: str, ranges: Sequence[ReadRange]) -> bool:
        return not self.unfolded(ranges) and self.cursors.get(sink, NONE) >= self.last

    def lag(self, sink: str, ranges: Sequence[ReadRange]) -> dict[str, int]:
        behind = self.last - self.cursors.get(sink, NONE)
        return {"triggers": max(0, behind), "sequences": self.unfolded(ranges)}


def read_progress(store: Store, sinks: Sequence[str]) -> PipelineProgress:
    """How far it is now; a store that no pipeline has used yet is at the very beginning."""
    newest = ChangeLog(store).newest()
    cursors = {}
    for name in sinks:
        cursor = CursorFile(store, name).load()
        cursors[name] = NONE if cursor is None else cursor.through
    return PipelineProgress(
        last=NONE if newest is None else newest.trigger,
        offsets={} if newest is None else offsets_of(newest.heads),
        cursors=cursors,
        heads={} if newest is None else newest.heads,
    )
