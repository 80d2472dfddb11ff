"""Make lakes small again: the newest row of each vector, few files, nothing that nobody needs."""

from __future__ import annotations

from typing import Any

from penstock.errors import FailedPrecondition
from penstock.sinks.lake import LakeSink
from penstock.spark.jobs.stores import opened_sink, sink_settings
from penstock.spark.settings import PipelineSettings


def compact(settings: PipelineSettings, sink: str | None = None) -> dict[str, Any]:
    """Compact one lake, or all of the pipeline's. The pipeline may go on writing meanwhile."""
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
