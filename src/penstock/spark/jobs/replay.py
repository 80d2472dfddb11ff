"""A range of the log into sinks once more.

The log is folded from its beginning, for a state is made of all of it. Of what came out, a sink
gets the deltas that were released within the window, and the states, as they are at the window's
end, of the vectors those touched. Sinks compare revisions and producer keys, so what they hold
already changes nothing; what they had lost comes back. A sink that numbers its writes by trigger
(the lake) gets them under a name of the replay's own, and knows deltas by their place in the log.
If it has lost its place among the pipeline's triggers, the last write of a replay of everything
gives it back: from then on the pipeline can serve it again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.protocol import Feed, Sink, Work
from penstock.spark.attachment import node_of
from penstock.spark.delivery.cursors import NONE
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.fold.state_folder import StateFolder
from penstock.spark.jobs.comparison import keys_of
from penstock.spark.jobs.log_fold import PartitionFold, fold_whole, log_ranges, scratch
from penstock.spark.jobs.stores import (
    opened_sink,
    pipeline_id,
    propagation_of,
    read_progress,
    sink_settings,
)
from penstock.spark.settings import PipelineSettings, SinkSettings

WORK_ROWS: Final = 50_000  # given to a sink at once


@dataclass(frozen=True, kw_only=True)
class ReplayWindow:
    """Which part of the log: by log time, both ends included; None: open."""

    from_ms: int | None = None
    to_ms: int | None = None


@dataclass(frozen=True)
class ReplayPart:
    """What one partition has within the window."""

    states: pa.Table
    deltas: pa.Table


def replay(
    spark: Any, settings: PipelineSettings, sinks: Sequence[str], *, window: ReplayWindow
) -> dict[str, Any]:
    """Give the sinks what the window holds; how many rows each of them got.

    The pipeline must not run meanwhile: a sink is written to by one at a time.
    """
    chosen = [sink_settings(settings, name) for name in sinks] or list(settings.sinks)
    node = node_of(settings)
    with closing(StateFolder(settings.state)), scratch(settings.state) as folder:
        ranges = log_ranges(node, settings.topics, until_ms=window.to_ms)
        folds = fold_whole(
            spark,
            ranges,
            node=node,
            folder=folder,
            options=propagation_of(settings),
            deltas=True,
            payloads=True,
        )
        found = {one.name: _replay(settings, one, folds, window) for one in chosen}
    return {"sinks": found}


def _replay(
    settings: PipelineSettings,
    one: SinkSettings,
    folds: Sequence[PartitionFold],
    window: ReplayWindow,
) -> dict[str, int]:
    given = {"states": 0, "deltas": 0}
    with opened_sink(settings, one) as attached:
        sink = attached.sink
        parts = [_part(fold, window, attached.routes) for fold in folds]
        for work in _works(sink, parts, _numbering(settings, sink, window)):
            sink.write(work)
            for name, table in (("states", work.states), ("deltas", work.deltas)):
                given[name] += 0 if table is None else table.num_rows
    return {name: rows for name, rows in given.items() if rows}


@dataclass(frozen=True)
class _Numbering:
    """Under which name and number works go to a sink."""

    pipeline: str
    replay: str
    last: int | None = None  # the trigger up to which the sink holds everything afterwards


def _numbering(settings: PipelineSettings, sink: Sink, window: ReplayWindow) -> _Numbering:
    """A sink that lost its place in the pipeline's triggers gets it back by a whole replay."""
    name = pipeline_id(settings)
    if not (sink.feed & Feed.STATES and sink.feed & Feed.DELTAS):
        return _Numbering(name, name)
    own = f"{name}-replay-{uuid.uuid4().hex[:12]}"
    last, held = read_progress(settings.state, ()).last, sink.cursor()
    lost = last > NONE and (held is None or held < last)
    return _Numbering(name, own, last if lost and window == ReplayWindow() else None)


def _part(fold: PartitionFold, window: ReplayWindow, routes: SinkRoutes) -> ReplayPart:
    deltas, states = fold.released(), fold.states()
    if window.from_ms is not None:
        deltas = deltas.filter(pc.field("log_time_ms") >= window.from_ms)
        touched = {key.tobytes() for key in keys_of(deltas["namespace"], deltas["vector_id"])}
        keys = keys_of(states["namespace"], states["vector_id"])
        states = states.filter(pa.array([key.tobytes() in touched for key in keys], pa.bool_()))
    return ReplayPart(routes.states(states, deltas), routes.deltas(deltas))


def _works(sink: Sink, parts: Sequence[ReplayPart], numbering: _Numbering) -> Iterator[Work]:
    """A sink that is fed both gets both at once, as a trigger brings them."""
    both = bool(sink.feed & Feed.STATES and sink.feed & Feed.DELTAS)
    full = [part for part in parts if part.states.num_rows and part.deltas.num_rows]
    for number, part in enumerate(parts):
        if both and numbering.last is not None and part is full[-1]:
            continue
        yield from _cut(sink, part, numbering.replay, number)
    if both and numbering.last is not None and full:
        yield from _cut(sink, full[-1], numbering.pipeline, numbering.last)


def _cut(sink: Sink, part: ReplayPart, pipeline: str, trigger: int) -> Iterator[Work]:
    states = part.states if sink.feed & Feed.STATES else None
    deltas = part.deltas if sink.feed & (Feed.DELTAS | Feed.PAYLOADS) else None
    whole = Work(pipeline=pipeline, first=trigger, last=trigger, states=states, deltas=deltas)
    if states is not None and deltas is not None:
        yield whole
    elif states is not None:
        for start in range(0, states.num_rows, WORK_ROWS):
            yield replace(whole, states=states.slice(start, WORK_ROWS))
    elif deltas is not None:
        for start in range(0, deltas.num_rows, WORK_ROWS):
            yield replace(whole, deltas=deltas.slice(start, WORK_ROWS))
