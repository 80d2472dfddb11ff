"""A pipeline's metrics, in Prometheus' text format.

Nothing is counted here: a scrape reads the same status that `status.json` shows, and the sinks'
histograms. `docs/metrics.md` explains every metric. The registry is the pipeline's own, so that
several fit in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from penstock.config import host_port
from penstock.errors import STATUS_TABLE, CallerError, Unavailable
from penstock.model.version import __version__
from penstock.node.door.hosts import HostNames
from penstock.sinks.health import BOUNDS_S, EXPORTED, Freshness

Status = dict[str, Any]
PREFIX: Final = "penstock_pipeline_"
BREAKER: Final = {"closed": 0, "half_open": 1, "open": 2}
UP: Final = frozenset({"idle", "writing", "opening"})

# Metric, help, and where its value is in a sink's status.
_GAUGES: Final[tuple[tuple[str, str, Callable[[Status], float]], ...]] = (
    ("sink_up", "1 while the sink takes what it is given.", lambda s: s["state"] in UP),
    ("sink_trigger", "Last trigger that the sink holds in full.", lambda s: s["trigger"]),
    ("sink_lag_triggers", "Triggers not yet in the sink.", lambda s: s["lag"]["triggers"]),
    ("sink_lag_rows", "Rows not yet in the sink.", lambda s: s["lag"]["rows"]),
    ("sink_lag_bytes", "Bytes not yet in the sink.", lambda s: s["lag"]["bytes"]),
    ("sink_lag_seconds", "Age of the oldest row that waits.", lambda s: s["lag"]["seconds"]),
    ("sink_breaker", "0 closed, 1 half open, 2 open.", lambda s: BREAKER[s["breaker"]["state"]]),
    ("sink_busy_seconds", "Duration of the call under way.", lambda s: s["busy_s"]),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[Status], float]], ...]] = (
    ("sink_rows", "Rows written.", lambda s: s["rows"]),
    ("sink_coalesced_rows", "Rows overtaken by a newer revision.", lambda s: s["coalesced"]),
    ("sink_writes", "Writes that succeeded.", lambda s: s["writes"]),
    ("sink_write_seconds", "Time spent in them.", lambda s: s["write_s"]),
    ("sink_retries", "Tries that failed.", lambda s: s["retries"]),
    ("sink_rejected_rows", "Rows that the sink can never take.", lambda s: s["rejected"]),
    ("sink_dead_letters", "Messages in its DLQ topic for them.", lambda s: s["dead_letters"]),
    ("sink_breaker_opened", "Times the breaker opened.", lambda s: s["breaker"]["opened"]),
)
# Metric, help, and the count of a partition's folds that it shows.
_FOLDED: Final = (
    ("read_deltas", "Deltas read from the log.", "read"),
    ("duplicate_deltas", "Deltas that had been seen before.", "duplicates"),
    ("released_deltas", "Deltas released in causal order.", "released"),
    ("quarantined_deltas", "Deltas that could not be placed.", "quarantined"),
)
# Where it is in what the status says of the change log, metric, help.
_CHANGES: Final = (
    ("last", "trigger", "Last committed trigger."),
    ("triggers", "changes_triggers", "Triggers kept for sinks that lag."),
    ("bytes", "changes_bytes", "Size of their change files."),
)
# The same for the source, which does not say all of it at all times.
_SOURCE: Final = (
    ("rows_per_trigger", "source_rows_per_trigger", "Rows that a trigger may take at present."),
    ("seconds", "source_trigger_seconds", "Duration of the last trigger."),
    ("lag", "source_lag_sequences", "Sequences in the log that are not yet folded."),
    ("paused", "source_paused", "1 while too much is undelivered to read on."),
    ("waiting", "source_waiting", "1 while the query is down and waits to be started."),
    ("restarts", "source_restarts", "Times the query was started again."),
)


class PipelineMetrics(Collector):
    """What a scrape shows. `read` gives the status, `freshness` the histogram of each sink."""

    def __init__(
        self, read: Callable[[], Status], freshness: Callable[[], Iterable[tuple[str, Freshness]]]
    ) -> None:
        self._read, self._freshness = read, freshness
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._server: Any = None
        self.port: int | None = None

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def serve(self, address: str) -> int:
        """Answer `GET /metrics` on `host:port` (0: any free port); returns the port."""
        text = f"127.0.0.1{address}" if address.startswith(":") else address
        host, port = host_port(text, field="metrics")
        try:
            self._server, _ = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise Unavailable(f"cannot serve metrics on {address}: {error.strerror}") from error
        self._server.set_app(_addressed(self._server.get_app(), HostNames(host)))
        self.port = int(self._server.server_port)
        return self.port

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask a pipeline that is not there yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        name = status["pipeline"]
        build = {"version": __version__, "pipeline": name}
        yield InfoMetricFamily(f"{PREFIX}build", "What is running.", value=build)
        for key, metric, help in _CHANGES:
            yield _gauge(metric, help, pipeline=name, value=status["changes"][key])
        for key, metric, help in _SOURCE:
            yield _gauge(metric, help, pipeline=name, value=status["source"].get(key))
        yield from _partitions(status, name)
        for family, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for metric, help, value in rows:
                found = family(PREFIX + metric, help, labels=["pipeline", "sink"])
                for sink in status["sinks"]:
                    found.add_metric([name, sink["name"]], float(value(sink)))
                yield found
        yield _visible(self._freshness(), name)


def _gauge(metric: str, help: str, *, pipeline: str, value: Any) -> Metric:
    """A gauge of the whole pipeline; without a sample if there is nothing to tell."""
    gauge = GaugeMetricFamily(PREFIX + metric, help, labels=["pipeline"])
    if isinstance(value, int | float):
        gauge.add_metric([pipeline], float(value))
    return gauge


def _partitions(status: Status, name: str) -> Iterator[Metric]:
    labels = ["pipeline", "topic", "partition"]
    sequence = GaugeMetricFamily(f"{PREFIX}sequence", "Log folded up to here.", labels=labels)
    pending = GaugeMetricFamily(f"{PREFIX}pending_deltas", "Waiting for a cause.", labels=labels)
    counters = [CounterMetricFamily(PREFIX + m, help, labels=labels) for m, help, _ in _FOLDED]
    for part in status["partitions"]:
        values = [name, part["topic"], str(part["partition"])]
        sequence.add_metric(values, part["sequence"])
        pending.add_metric(values, part.get("pending", 0))
        for counter, (_, _, count) in zip(counters, _FOLDED, strict=True):
            counter.add_metric(values, part.get(count, 0))
    yield from (sequence, pending, *counters)


def _visible(sinks: Iterable[tuple[str, Freshness]], name: str) -> Metric:
    family = HistogramMetricFamily(
        f"{PREFIX}sink_visible_seconds",
        "From a delta's place in the log to its visibility in the sink, by row.",
        labels=["pipeline", "sink"],
    )
    for sink, freshness in sinks:
        total = np.cumsum(freshness.counts)
        buckets = [(_end(BOUNDS_S[i]), float(total[i])) for i in EXPORTED]
        buckets.append(("+Inf", float(total[-1])))
        family.add_metric([name, sink], buckets, freshness.seconds_sum)
    return family


def _end(seconds: float) -> str:
    return f"{seconds:.4g}"


def _addressed(app: Any, names: HostNames) -> Any:
    """`app` for requests that are addressed to this listener, by a name or an address of its own: a
    web page that made a name of its own point here is told nothing."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        host = environ.get("HTTP_HOST")
        try:
            names.check(None if host is None else host.encode("latin-1"))
        except CallerError as error:
            _, status = STATUS_TABLE[error.status]
            start_response(f"{status} Refused", [("content-type", "application/json")])
            return [msgspec.json.encode(error.to_wire())]
        return app(environ, start_response)

    return answer
