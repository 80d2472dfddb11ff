"""A pipeline's sinks and its state folder, as jobs find them while it runs or rests.

How far a pipeline and its sinks have come is read from its folder. Triggers are Spark's batches:
the checkpoint's offsets say up to which sequence a trigger reaches in every partition, the change
log which triggers are committed, and a sink's cursor which of them it holds. A sink has *reached* a
place in the log when the pipeline has folded up to there and the sink's cursor is at that trigger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import Corruption, FailedPrecondition, NotFound
from penstock.propagation.options import PropagationOptions
from penstock.spark.attachment import attach, node_of
from penstock.spark.delivery.cursors import NONE, CursorFile
from penstock.spark.delivery.delivery import RoutedSink
from penstock.spark.fold.state_folder import read_identity
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.source.ranges import Offsets, ReadRange, from_json


def sink_settings(settings: PipelineSettings, name: str) -> SinkSettings:
    """The sink called `name`; `NotFound` names those there are."""
    for sink in settings.sinks:
        if sink.name == name:
            return sink
    known = ", ".join(sink.name for sink in settings.sinks) or "none"
    raise NotFound(f"the pipeline has no sink {name}, but {known}", sink=name)


def pipeline_id(settings: PipelineSettings) -> str:
    """The id of the pipeline's numbering of triggers; its name if it never ran."""
    identity = read_identity(settings.state)
    return settings.name if identity is None else identity.id


def propagation_of(settings: PipelineSettings) -> PropagationOptions:
    """The bounds that the pipeline folds with: those of its first run, if there was one."""
    identity = read_identity(settings.state)
    return settings.propagation if identity is None else identity.propagation


@contextmanager
def opened_sink(settings: PipelineSettings, one: SinkSettings) -> Iterator[RoutedSink]:
    """A sink with its routes, built as the pipeline builds it, and opened."""
    alone = msgspec.structs.replace(settings, sinks=(one,))
    (attached,) = attach(alone, pipeline=pipeline_id(settings), node=node_of(settings))
    attached.sink.open()
    try:
        yield attached
    finally:
        attached.sink.close()


@dataclass(frozen=True, kw_only=True)
class PipelineProgress:
    last: int  # committed trigger, -1 before the first
    offsets: Offsets  # per partition the sequence behind the last folded one
    cursors: Mapping[str, int]  # the last trigger that each sink holds

    def unfolded(self, ranges: Sequence[ReadRange]) -> int:
        """Sequences of these ranges that the pipeline has yet to fold."""
        ends = [self.offsets.get(one.topic, {}).get(one.partition, 1) for one in ranges]
        return sum(max(0, one.last + 1 - end) for one, end in zip(ranges, ends, strict=True))

    def reached(self, sink: str, ranges: Sequence[ReadRange]) -> bool:
        return not self.unfolded(ranges) and self.cursors.get(sink, NONE) >= self.last

    def lag(self, sink: str, ranges: Sequence[ReadRange]) -> dict[str, int]:
        """What the sink has before it: triggers that it has to take, and log not folded yet."""
        behind = self.last - self.cursors.get(sink, NONE)
        return {"triggers": max(0, behind), "sequences": self.unfolded(ranges)}


def read_progress(state: Path, sinks: Sequence[str]) -> PipelineProgress:
    """How far it is now; a folder that no pipeline has used yet is at the very beginning."""
    # By names alone: a running pipeline deletes manifests while one looks.
    committed = (path.stem for path in (state / "changes").glob("*.json"))
    last = max((int(stem) for stem in committed if stem.isdecimal()), default=NONE)
    offsets = _offsets(state / "checkpoint" / "offsets" / str(last)) if last >= 0 else {}
    cursors = {}
    for name in sinks:
        cursor = CursorFile(state, name).load()
        cursors[name] = NONE if cursor is None else cursor.through
    return PipelineProgress(last=last, offsets=offsets, cursors=cursors)


def _offsets(path: Path) -> Offsets:
    """The end of a trigger, from Spark's log of offsets: a version, metadata, one line a source."""
    lines = path.read_text("utf-8").splitlines()
    try:
        document: dict[str, Any] = json.loads(lines[-1])
        return from_json(document)
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise Corruption(f"{path} does not hold a trigger's offsets: {error}") from error


def compact(settings: PipelineSettings, sink: str | None = None) -> dict[str, Any]:
    """Make one lake small again, or all of the pipeline's: the newest row of each vector, few
    files. The pipeline may go on writing meanwhile."""
    from penstock.sinks.lake import LakeSink

    chosen = [sink_settings(settings, sink)] if sink else list(settings.sinks)
    found = {}
    for one in chosen:
        if one.kind != "lake":
            if sink:
                raise FailedPrecondition(f"{sink} is no lake: it is a {one.kind}", field="sink")
            continue
        with opened_sink(settings, one) as lake:
            assert isinstance(lake.sink, LakeSink)
            found[one.name] = lake.sink.compact()
    if not found:
        raise FailedPrecondition("the pipeline has no lake", field="sink")
    return {"lakes": found}
