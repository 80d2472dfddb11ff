"""Sinks filled from what is already there: replayed into, or emptied and filled anew.

**Replay** takes a range of the log into sinks once more. The log is folded from its beginning, for
a state is made of all of it. Of what came out, a sink gets the deltas that were released within the
window, and the states, as they are at the window's end, of the vectors those touched. Sinks compare
revisions and producer keys, so what they hold already changes nothing; what they had lost comes
back. A sink that numbers its writes by trigger (the lake) gets them under a name of the replay's
own, and knows deltas by their place in the log. If it has lost its place among the pipeline's
triggers, the last write of a replay of everything gives it back: from then on the pipeline can
serve it again.

**Reindex** empties a sink, then gives it every vector's state, deleted ones too: they leave their
tombstones. Only then is its cursor moved, to the last trigger that the states cover. Whatever
interrupts it, the cursor is where it was or the sink is full; running it again mends the rest. That
is also how a sink that is new in a pipeline gets what was before it: the change log does not go
back so far.

The pipeline must not run meanwhile: a sink is written to by one at a time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import FailedPrecondition
from penstock.sinks.lake import VECTORS, LakeSink
from penstock.sinks.protocol import Feed, Sink, Work
from penstock.sinks.schema import chosen_rows, states_schema, winners
from penstock.spark.attachment import node_of
from penstock.spark.delivery.cursors import NONE, CursorFile, SinkCursor
from penstock.spark.delivery.delivery import RoutedSink
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

Origin = Literal["log", "lake"]
WORK_ROWS: Final = 50_000  # given to a sink at once
Progress = Callable[[float, float | None], None]
_HISTORY: Final = Feed.DELTAS | Feed.PAYLOADS


@dataclass(frozen=True, kw_only=True)
class ReplayWindow:
    """Which part of the log: by log time, both ends included; None: open."""

    from_ms: int | None = None
    to_ms: int | None = None


@dataclass(frozen=True)
class ReplayPart:
    states: pa.Table
    deltas: pa.Table


def replay(
    spark: Any, settings: PipelineSettings, sinks: Sequence[str], *, window: ReplayWindow
) -> dict[str, Any]:
    """Give the sinks what the window holds; how many rows each of them got."""
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
        for part, pipeline, trigger in _numbered(settings, sink, parts, window):
            for work in _works(sink, part, pipeline, trigger):
                sink.write(work)
                for name, table in (("states", work.states), ("deltas", work.deltas)):
                    given[name] += 0 if table is None else table.num_rows
    return {name: rows for name, rows in given.items() if rows}


def _part(fold: PartitionFold, window: ReplayWindow, routes: SinkRoutes) -> ReplayPart:
    deltas, states = fold.released(), fold.states()
    if window.from_ms is not None:
        deltas = deltas.filter(pc.field("log_time_ms") >= window.from_ms)
        states = states.filter(pa.array(np.isin(keys_of(states), keys_of(deltas))))
    return ReplayPart(routes.states(states, deltas), routes.deltas(deltas))


def _numbered(
    settings: PipelineSettings, sink: Sink, parts: Sequence[ReplayPart], window: ReplayWindow
) -> list[tuple[ReplayPart, str, int]]:
    """The parts in the order of their writing, with the name and the number that they go under."""
    name = pipeline_id(settings)
    if not (sink.feed & Feed.STATES and sink.feed & _HISTORY):
        return [(part, name, number) for number, part in enumerate(parts)]
    own = f"{name}-replay-{uuid.uuid4().hex[:12]}"
    numbered = [(part, own, number) for number, part in enumerate(parts)]
    full = [n for n, part in enumerate(parts) if part.states.num_rows and part.deltas.num_rows]
    last, held = read_progress(settings.state, ()).last, sink.cursor()
    lost = last > NONE and (held is None or held < last)
    if lost and full and window == ReplayWindow():
        part, _, _ = numbered.pop(full[-1])
        numbered.append((part, name, last))
    return numbered


def _works(sink: Sink, part: ReplayPart, pipeline: str, trigger: int) -> Iterator[Work]:
    """A sink that is fed both gets both at once, as a trigger brings them."""
    empty = Work(pipeline=pipeline, first=trigger, last=trigger)
    if sink.feed & Feed.STATES and sink.feed & _HISTORY:
        yield replace(empty, states=part.states, deltas=part.deltas)
    elif sink.feed & Feed.STATES:
        yield from (replace(empty, states=piece) for piece in _pieces(part.states))
    elif sink.feed & _HISTORY:
        yield from (replace(empty, deltas=piece) for piece in _pieces(part.deltas))


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, WORK_ROWS):
        yield table.slice(start, WORK_ROWS)


def reindex(
    spark: Any,
    settings: PipelineSettings,
    sink: str,
    *,
    origin: Origin = "log",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Empty the sink called `sink` and fill it; how many states it was given."""
    chosen, rows = sink_settings(settings, sink), 0
    with closing(StateFolder(settings.state)):
        with opened_sink(settings, chosen) as target:
            _reject_history(target)
            source = _log_states(spark, settings) if origin == "log" else _lake(settings, sink)
            with source as (through, tables):  # only what can be filled again is emptied
                target.sink.reset()
                for piece in (p for t in tables for p in _pieces(target.routes.states(t, None))):
                    work = Work(pipeline=pipeline_id(settings), first=0, last=0, states=piece)
                    target.sink.write(work)
                    rows += piece.num_rows
                    if progress is not None:
                        progress(rows, None)
        _move_cursor(CursorFile(settings.state, sink), through)
    return {"sink": sink, "from": origin, "states": rows, "trigger": through}


Source = tuple[int, Iterator[pa.Table]]  # states, and the last trigger that they cover


@contextmanager
def _log_states(spark: Any, settings: PipelineSettings) -> Iterator[Source]:
    """Fold the log up to its end, which is at least as far as any trigger reaches."""
    last, node = read_progress(settings.state, ()).last, node_of(settings)
    with scratch(settings.state) as folder:
        ranges, options = log_ranges(node, settings.topics), propagation_of(settings)
        folds = fold_whole(spark, ranges, node=node, folder=folder, options=options)
        yield last, (fold.states() for fold in folds)


@contextmanager
def _lake(settings: PipelineSettings, sink: str) -> Iterator[Source]:
    """The sink will hold what the lake does, up to the lake's trigger."""
    lake = next((one for one in settings.sinks if one.kind == "lake"), None)
    if lake is None:
        raise FailedPrecondition("the pipeline has no lake to fill it from", field="from")
    cursors = read_progress(settings.state, (lake.name, sink)).cursors
    if cursors[lake.name] < cursors[sink]:
        raise FailedPrecondition(
            f"{lake.name} is behind {sink}: fill it from the log, or let the lake catch up",
            field="from",
        )
    with opened_sink(settings, lake) as source:
        assert isinstance(source.sink, LakeSink)
        yield cursors[lake.name], _newest_states(source.sink)


def _newest_states(lake: LakeSink) -> Iterator[pa.Table]:
    """The lake's newest row of every vector, as STATES."""
    chosen = winners(lake.vectors.batches(["namespace", "vector_id", "revision"]))
    for batch in chosen_rows(lake.vectors.batches(VECTORS.names), chosen):
        sizes = pc.list_value_length(batch["vector"])
        for size in sorted(set(sizes.to_pylist())):
            same = batch.filter(pc.equal(sizes, size))
            yield pa.Table.from_batches([same]).cast(states_schema(size))


def _reject_history(target: RoutedSink) -> None:
    name = target.sink.name
    if target.sink.feed != Feed.STATES:
        raise FailedPrecondition(
            f"{name} keeps more than the vectors as they are: replay into it", field="sink"
        )
    if target.routes.judge_states_by_deltas:
        raise FailedPrecondition(
            f"{name} is routed by what deltas are like: its states cannot be told from a fold",
            field="sink",
        )


def _move_cursor(file: CursorFile, trigger: int) -> None:
    """A cursor that is ahead already stays: later triggers were taken, and are in the log."""
    held = file.load()
    if trigger > NONE and (held is None or held.through < trigger):
        file.save(SinkCursor.before(trigger + 1, lanes=1))
