"""The sinks of a pipeline, opened for a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from penstock.errors import NotFound
from penstock.propagation.options import PropagationOptions
from penstock.spark.attaching import attach
from penstock.spark.delivery.delivery import Attached
from penstock.spark.fold.state_folder import read_identity
from penstock.spark.jobs.ranges import connecting
from penstock.spark.settings import PipelineSettings, SinkSettings


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
def opened_sink(settings: PipelineSettings, one: SinkSettings) -> Iterator[Attached]:
    """A sink with its routes, built as the pipeline builds it, and opened."""
    alone = msgspec.structs.replace(settings, sinks=(one,))
    (attached,) = attach(alone, pipeline=pipeline_id(settings), node=connecting(settings))
    attached.sink.open()
    try:
        yield attached
    finally:
        attached.sink.close()
