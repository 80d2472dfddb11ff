"""A sink filled anew, from the log or from the lake.

The sink is emptied, then given every vector's state, deleted ones too: they leave their tombstones.
Only then is its cursor moved, to the last trigger that the states cover. Whatever interrupts it,
the cursor is where it was or the sink is full; running it again mends the rest.

The pipeline must not run meanwhile: it would write into what is being emptied. That is also how a
sink that is new in a pipeline gets what was before it: the change log does not go back so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa

from penstock.errors import FailedPrecondition
from penstock.sinks.lake import VECTORS, LakeSink
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import chosen_rows, states_schema, winners
from penstock.spark.attachment import node_of
from penstock.spark.delivery.cursors import NONE, CursorFile, SinkCursor
from penstock.spark.delivery.delivery import RoutedSink
from penstock.spark.fold.state_folder import StateFolder
from penstock.spark.jobs.log_fold import fold_whole, log_ranges, scratch
from penstock.spark.jobs.stores import (
    opened_sink,
    pipeline_id,
    propagation_of,
    read_progress,
    sink_settings,
)
from penstock.spark.settings import PipelineSettings

Origin = Literal["log", "lake"]
WORK_ROWS: Final = 50_000  # states given to the sink at once
Progress = Callable[[float, float | None], None]


def reindex(
    spark: Any,
    settings: PipelineSettings,
    sink: str,
    *,
    origin: Origin = "log",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Empty the sink called `sink` and fill it; how many states it was given."""
    chosen = sink_settings(settings, sink)
    with closing(StateFolder(settings.state)):
        with opened_sink(settings, chosen) as target:
            _reject_history(target)
            target.sink.reset()
            found = Filling(spark, settings, target, progress=progress)
            through = found.from_log() if origin == "log" else found.from_lake(sink)
        _move_cursor(settings.state, sink, through)
    return {"sink": sink, "from": origin, "states": found.rows, "trigger": through}


class Filling:
    """States on their way into one sink."""

    def __init__(
        self,
        spark: Any,
        settings: PipelineSettings,
        target: RoutedSink,
        *,
        progress: Progress | None,
    ) -> None:
        self._spark, self._settings, self._target = spark, settings, target
        self._pipeline, self._progress = pipeline_id(settings), progress
        self.rows = 0

    def from_log(self) -> int:
        """Fold the log up to its end, which is at least as far as any trigger reaches."""
        settings = self._settings
        last = read_progress(settings.state, ()).last
        node = node_of(settings)
        with scratch(settings.state) as folder:
            ranges, options = log_ranges(node, settings.topics), propagation_of(settings)
            for fold in fold_whole(self._spark, ranges, node=node, folder=folder, options=options):
                self._write(fold.states())
        return last

    def from_lake(self, sink: str) -> int:
        """Copy the lake. The sink then holds what the lake does, up to the lake's trigger."""
        lake = next((one for one in self._settings.sinks if one.kind == "lake"), None)
        if lake is None:
            raise FailedPrecondition("the pipeline has no lake to fill it from", field="from")
        names = (lake.name, sink)
        cursors = read_progress(self._settings.state, names).cursors
        if cursors.get(lake.name, NONE) < cursors.get(sink, NONE):
            raise FailedPrecondition(
                f"{lake.name} is behind {sink}: fill it from the log, or let the lake catch up",
                field="from",
            )
        with opened_sink(self._settings, lake) as source:
            assert isinstance(source.sink, LakeSink)
            for table in _newest_states(source.sink):
                self._write(table)
        return cursors.get(lake.name, NONE)

    def _write(self, states: pa.Table) -> None:
        states = self._target.routes.states(states, None)
        for start in range(0, states.num_rows, WORK_ROWS):
            part = states.slice(start, WORK_ROWS)
            self._target.sink.write(Work(pipeline=self._pipeline, first=0, last=0, states=part))
            self.rows += part.num_rows
            if self._progress is not None:
                self._progress(self.rows, None)


def _newest_states(lake: LakeSink) -> Iterator[pa.Table]:
    """The lake's newest row of every vector, as STATES."""
    chosen = winners(lake.vectors.batches(["namespace", "vector_id", "revision"]))
    for batch in chosen_rows(lake.vectors.batches(VECTORS.names), chosen):
        sizes = set(pa.compute.list_value_length(batch["vector"]).to_pylist())
        for size in sorted(sizes):
            same = pa.compute.equal(pa.compute.list_value_length(batch["vector"]), size)
            yield pa.Table.from_batches([batch.filter(same)]).cast(states_schema(size))


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


def _move_cursor(state: Path, sink: str, trigger: int) -> None:
    """A cursor that is ahead already stays: later triggers were taken, and are in the log."""
    file = CursorFile(state, sink)
    held = file.load()
    if trigger > NONE and (held is None or held.through < trigger):
        file.save(SinkCursor.before(trigger + 1, lanes=1))
