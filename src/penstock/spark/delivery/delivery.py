"""Delivery: from committed triggers to every sink, each at its own pace, each row's effect once.

    change log ──► worker of sink A ──► tasks ──► A   one thread, cursor and breaker each;
               ├─► worker of sink B ──► tasks ──► B   nobody waits for anybody
               └─► worker of the quarantine ──► tasks ──► <topic>-quarantine
    upkeep: status.json, deletion of triggers that all sinks hold

Why a crash at any moment (`kill -9`, a power cut) neither loses a row nor doubles its effect. A
write goes through these steps, each durable before the next begins:

 1. the trigger's manifest is committed; it never changes, and stays until step 6
 2. ordered sinks: the range about to be written is saved as the cursor's *attempt*
 3. the sink writes, durably, in as many tasks as it is shared out to; a task appends the rows that
    the sink rejected to the DLQ topic, under producer keys made of the log
 4. what the tasks wrote is committed, with a mark of how far it reaches
 5. the cursor is saved: everything up to here is in the sink or its DLQ
 6. once all cursors are past it, the trigger is deleted

*Nothing is lost*: a row leaves the change log at 6, only after 5 of every sink, which is after 3
and 4. A crash before 5 leaves the old cursor, and the rows are delivered again.

*Nothing is doubled*: what is repeated after a crash is 3 and 4. The sink is given the same rows
under the same trigger numbers again (an ordered one exactly the attempt, an unordered one perhaps
cut differently, which it must not mind: it compares revisions) and takes them once, as the
contract of `Sink.write` says. The letters carry the same producer keys, and the node knows them.
Deletion repeats harmlessly.

A cursor that goes backwards only repeats; the one wrong that could lose rows, a cursor ahead of
the change log or a sink behind its beginning, halts that sink instead.

Shutdown is a crash that takes its time: `stop` lets each worker finish its write within a bound,
and lets go of those that do not return. Their cursors stay where they are.

`attach` connects to nothing: a sink whose store is away at the start is tried again later, like
one whose store goes away.

`status.json` (`docs/delivery.md`) is replaced about once a second, in one step. A scrape of the
metrics (`docs/metrics.md`) reads that same status, and the sinks' histograms. The registry is the
pipeline's own, so that several fit in one process.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from penstock import errors
from penstock.config import host_port
from penstock.errors import Corruption, NotFound, Unavailable
from penstock.log.crash import crash_point
from penstock.model.version import __version__
from penstock.node.door.doorway import HostNames
from penstock.node.observe.logs import get_logger
from penstock.sinks.health import BOUNDS_S, EXPORTED, Freshness
from penstock.sinks.topics import LetterBox, QuarantineSink
from penstock.spark.delivery.attachment import RoutedSink
from penstock.spark.delivery.backlog import QUARANTINE, Backlog
from penstock.spark.delivery.selection import columns_of
from penstock.spark.delivery.tasks import SinkJobs
from penstock.spark.delivery.worker import SinkWorker
from penstock.spark.fold.state import ChangeLog
from penstock.spark.settings import DeliveryOptions
from penstock.spark.store import Store

log = get_logger(__name__)
Status = dict[str, Any]
VERSION: Final = 1
STATUS_FILE: Final = "status.json"
METRIC: Final = "penstock_pipeline_"
BREAKER: Final = {"closed": 0, "half_open": 1, "open": 2}
UP: Final = frozenset({"idle", "writing", "opening", "filling"})
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
# By part of the status: where the value is, metric, help. The source does not say all of it always.
_PIPELINE: Final = {
    "changes": (
        ("last", "trigger", "Last committed trigger."),
        ("triggers", "changes_triggers", "Triggers kept for sinks that lag."),
        ("bytes", "changes_bytes", "Size of their change files."),
    ),
    "source": (
        ("rows_per_trigger", "source_rows_per_trigger", "Rows that a trigger may take at present."),
        ("seconds", "source_trigger_seconds", "Duration of the last trigger."),
        ("lag", "source_lag_sequences", "Sequences in the log that are not yet folded."),
        ("paused", "source_paused", "1 while too much is undelivered to read on."),
        ("waiting", "source_waiting", "1 while a trigger has failed and waits to be planned anew."),
        ("restarts", "source_restarts", "Triggers that failed and were planned anew."),
    ),
}


class PipelineDelivery:
    """`pipeline` is the id of the numbering of triggers, `name` is for people. `letters` takes dead
    letters of sinks that are written here, `quarantine` those deltas; `jobs` runs the tasks of
    sinks that have some. `describe` gives what the status says under `source`."""

    def __init__(
        self,
        changes: ChangeLog,
        sinks: Sequence[RoutedSink],
        *,
        pipeline: str,
        letters: LetterBox,
        quarantine: RoutedSink | None = None,
        jobs: SinkJobs | None = None,
        name: str | None = None,
        options: DeliveryOptions | None = None,
        metrics: str | None = None,
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._changes = changes
        self._pipeline, self._name = pipeline, name or pipeline
        self._describe = describe
        self._options = (options or DeliveryOptions()).validate()
        self._backlog = Backlog(changes)
        lost = quarantine or RoutedSink(sink=QuarantineSink(letters))
        fed = [*((one, columns_of(one.sink.feed)) for one in sinks), (lost, (QUARANTINE,))]
        self.workers = [
            SinkWorker(
                one,
                pipeline=pipeline,
                columns=columns,
                changes=changes,
                backlog=self._backlog,
                letters=letters,
                options=self._options,
                jobs=jobs,
            )
            for one, columns in fed
        ]
        self._state = "starting"
        self._started_ms = time.time_ns() // 1_000_000
        self._stopped = threading.Event()
        self._upkeep = threading.Thread(target=self._keep_up, name="penstock-upkeep", daemon=True)
        self.metrics = PipelineMetrics(
            self.status, lambda: [(w.sink.name, w.runner.meter.freshness) for w in self.workers]
        )
        self._metrics_address = metrics

    def start(self) -> None:
        if self._metrics_address is not None:
            self.metrics.serve(self._metrics_address)
        self._backlog.follow()
        self._state = "running"
        self._report()
        for worker in self.workers:
            worker.runner.start()
        self._upkeep.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every sink holds what is committed now; False if some do not in time. A
        halted sink is not waited for, as nothing would come of it: `halted` names those."""
        goal = -1 if self._changes.last is None else self._changes.last
        deadline = time.monotonic() + timeout_s
        while not self.caught_up(goal):
            left = deadline - time.monotonic()
            if left <= 0 or self._stopped.wait(min(left, 0.02)):
                return self.caught_up(goal)
        return True

    def caught_up(self, trigger: int) -> bool:
        return all(w.halted is not None or w.caught_up(trigger) for w in self.workers)

    @property
    def halted(self) -> list[str]:
        return [worker.sink.name for worker in self.workers if worker.halted is not None]

    def stop(self, timeout_s: float = 10.0) -> list[str]:
        """Stop all threads; returns the sinks that did not return in time and were let go of."""
        self._state = "stopping"
        for worker in self.workers:
            worker.runner.stop()
        self._changes.wake()
        deadline = time.monotonic() + timeout_s
        hanging = [w.sink.name for w in self.workers if not w.join(deadline - time.monotonic())]
        self._stopped.set()
        if self._upkeep.ident is not None:
            self._upkeep.join()
        self._state = "stopped"
        self._prune()
        self._report()
        self.metrics.close()
        return hanging

    def status(self) -> Status:
        now_ms = time.time_ns() // 1_000_000
        first, last = self._changes.first, self._changes.last
        return {
            "version": VERSION,
            "pipeline": self._name,
            "id": self._pipeline,
            "state": self._state,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_ms": self._started_ms,
            "updated_ms": now_ms,
            "metrics_port": self.metrics.port,
            "changes": {
                "first": first,
                "last": last,
                "triggers": 0 if first is None or last is None else last - first + 1,
                "bytes": self._backlog.bytes_after(-1),
            },
            "partitions": self._backlog.partitions(),
            "sinks": [_sink_status(worker, now_ms=now_ms) for worker in self.workers],
            "source": self._describe(),
        }

    # --- upkeep ---

    def _keep_up(self) -> None:
        while not self._stopped.wait(self._options.status_s):
            try:
                self._backlog.follow()
                self._prune()
                self._report()
            except Exception:  # the thread's boundary; the next round tries again
                log.exception("upkeep failed")

    @property
    def durable_through(self) -> int:
        return min(worker.durable_through for worker in self.workers)

    @property
    def undelivered_bytes(self) -> int:
        return self._backlog.bytes_after(self.durable_through)

    def _prune(self) -> None:
        through = self.durable_through
        if self._changes.prune(through):
            crash_point("delivery.prune.after")
            # The newest trigger stays in the change log: a sink may come back for it.
            self._backlog.forget((self._changes.first or 0) - 1)

    def _report(self) -> None:
        self._changes.store.write(STATUS_FILE, [json.dumps(self.status()).encode()])


def _sink_status(worker: SinkWorker, *, now_ms: int) -> Status:
    now = time.monotonic()
    meter, cursor = worker.runner.meter, worker.cursor
    lag = worker.planner.lag(cursor)
    waits_s = 0.0 if lag.oldest_ms is None else max(0.0, (now_ms - lag.oldest_ms) / 1000)
    return {
        "name": worker.sink.name,
        "state": worker.state,
        "filling": worker.filling,
        "ordered": not worker.planner.laned,
        "internal": isinstance(worker.sink, QuarantineSink),
        "trigger": cursor.through,
        "lanes": list(cursor.position) if worker.planner.laned else None,
        "started": cursor.started,
        "lag": {
            "triggers": lag.triggers,
            "rows": lag.rows,
            "bytes": lag.bytes,
            "seconds": round(waits_s, 3),
        },
        "visible_s": meter.freshness.recent(now=now),
        "rows": meter.rows,
        "rows_per_s": round(meter.rows_per_s(now=now), 1),
        "coalesced": meter.coalesced,
        "writes": meter.writes,
        "write_s": round(meter.write_s, 3),
        "retries": meter.failures,
        "rejected": meter.rejected,
        "dead_letters": meter.dead_letters,
        "breaker": worker.runner.retry.describe(now=now) | {"opened": meter.opens},
        "busy_s": round(meter.busy_s(now=now), 3),
        "last_error": meter.last_error,
    }


def read_status(store: Store) -> Status:
    where = f"{store.url}/{STATUS_FILE}"
    try:
        status: Status = json.loads(bytes(store.read(STATUS_FILE)))
    except NotFound:
        raise NotFound(f"{where} is not there: no pipeline ran on it yet") from None
    except ValueError as error:
        raise Corruption(f"{where} is not JSON: {error}") from error
    if status.get("version") != VERSION:
        raise Corruption(f"{where} has version {status.get('version')}, expected {VERSION}")
    return status


class PipelineMetrics(Collector):
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

    def serve(self, address: str) -> None:
        """Answer `GET /metrics` on `host:port` (0: any free port); `port` says which."""
        text = f"127.0.0.1{address}" if address.startswith(":") else address
        host, port = host_port(text, field="metrics")
        try:
            self._server, _ = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise Unavailable(f"cannot serve metrics on {address}: {error.strerror}") from error
        self._server.set_app(_addressed(self._server.get_app(), HostNames(host)))
        self.port = int(self._server.server_port)

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
        yield InfoMetricFamily(f"{METRIC}build", "What is running.", value=build)
        for part, rows in _PIPELINE.items():
            for key, metric, help in rows:
                yield _gauge(metric, help, pipeline=name, value=status[part].get(key))
        yield from _partitions(status, name)
        for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for metric, help, value in table:
                found = family(METRIC + metric, help, labels=["pipeline", "sink"])
                for sink in status["sinks"]:
                    found.add_metric([name, sink["name"]], float(value(sink)))
                yield found
        yield _visible(self._freshness(), name)


def _gauge(metric: str, help: str, *, pipeline: str, value: Any) -> Metric:
    """A gauge of the whole pipeline; without a sample if there is nothing to tell."""
    gauge = GaugeMetricFamily(METRIC + metric, help, labels=["pipeline"])
    if isinstance(value, int | float):
        gauge.add_metric([pipeline], float(value))
    return gauge


def _partitions(status: Status, name: str) -> Iterator[Metric]:
    labels = ["pipeline", "topic", "partition"]
    sequence = GaugeMetricFamily(f"{METRIC}sequence", "Log folded up to here.", labels=labels)
    pending = GaugeMetricFamily(f"{METRIC}pending_deltas", "Waiting for a cause.", labels=labels)
    counters = [CounterMetricFamily(METRIC + m, help, labels=labels) for m, help, _ in _FOLDED]
    for part in status["partitions"]:
        values = [name, part["topic"], str(part["partition"])]
        sequence.add_metric(values, part["sequence"])
        pending.add_metric(values, part.get("pending", 0))
        for counter, (_, _, count) in zip(counters, _FOLDED, strict=True):
            counter.add_metric(values, part.get(count, 0))
    yield from (sequence, pending, *counters)


def _visible(sinks: Iterable[tuple[str, Freshness]], name: str) -> Metric:
    family = HistogramMetricFamily(
        f"{METRIC}sink_visible_seconds",
        "From a delta's place in the log to its visibility in the sink, by row.",
        labels=["pipeline", "sink"],
    )
    for sink, freshness in sinks:
        total = np.cumsum(freshness.counts)
        buckets = [(f"{BOUNDS_S[i]:.4g}", float(total[i])) for i in EXPORTED]
        buckets.append(("+Inf", float(total[-1])))
        family.add_metric([name, sink], buckets, freshness.seconds_sum)
    return family


def _addressed(app: Any, names: HostNames) -> Any:
    """`app` for requests that are addressed to this listener, by a name or an address of its own: a
    web page that made a name of its own point here is told nothing."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        host = environ.get("HTTP_HOST")
        try:
            names.check(None if host is None else host.encode("latin-1"))
        except errors.CallerError as error:
            _, status = errors.STATUS_TABLE[error.status]
            start_response(f"{status} Refused", [("content-type", "application/json")])
            return [msgspec.json.encode(error.to_wire())]
        return app(environ, start_response)

    return answer
