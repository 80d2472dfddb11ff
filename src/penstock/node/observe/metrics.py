"""A node's metrics, in Prometheus' text format.

What happens is counted as it happens, once per batch. What *is* (backlog, leases, ages, sizes) is
read from the engine when somebody scrapes (`node.upkeep`): keeping it current all day would cost
the hot path for numbers that are looked at every fifteen seconds. `docs/metrics.md` explains every
one of them.

Counters and histograms here take a whole batch in one call. prometheus_client's own histogram
counts one observation at a time, under a lock, which costs a batch of 100 some 200 µs. These add
`count` observations of one value in half a microsecond: a series is a plain list, found by its
label values. There is no lock, so one thread records: the event loop's; a writer thread hands its
timings over with its result. A scrape may run in another thread; it sees each number either before
or after an update. Topic labels are names of topics that exist: check the name first, count
afterwards.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Final, Self

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.model.version import __version__

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SERIES_MAX: Final = 10_000  # of one metric; what comes after is counted together
OTHER: Final = "(other)"
SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
PUSH_SECONDS: Final = (0.000025, 0.00005, 0.0001, 0.000175, *SECONDS[1:])
RANKS: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000)

Labels = tuple[str, ...]


class _Instrument:
    __slots__ = ("_series", "_width", "help", "labels", "name")

    def __init__(self, name: str, help: str, labels: Sequence[str], *, width: int) -> None:
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        self._width = width  # numbers in a series
        self._series: dict[Labels, list[float]] = {}
        if not labels:
            self.begin(())

    def fresh(self) -> Self:
        """The same instrument with nothing counted."""
        made = copy(self)
        made._series = {} if self.labels else {(): [0] * self._width}
        return made

    def begin(self, labels: Labels) -> list[float]:
        """A series of zeros, unless there is one: a rate can only be taken of what was there
        before. Callers pass labels that are bounded by what exists (topics, methods, statuses);
        the limit is for the day somebody does not."""
        if labels not in self._series and len(self._series) >= SERIES_MAX:
            labels = (OTHER,) * len(self.labels)
        return self._series.setdefault(labels, [0] * self._width)

    def forget(self, label: str, value: str) -> None:
        if label in self.labels:
            at = self.labels.index(label)
            gone = [labels for labels in self._series if labels[at] == value]
            for labels in gone:
                del self._series[labels]

    def _rows(self) -> list[tuple[Labels, list[float]]]:
        return [(labels, list(series)) for labels, series in list(self._series.items())]


class Counter(_Instrument):
    """Only goes up. `name` comes without the `_total` that every counter ends in."""

    __slots__ = ()

    def __init__(self, name: str, help: str, *labels: str) -> None:
        super().__init__(name, help, labels, width=1)

    def add(self, labels: Labels = (), count: float = 1) -> None:
        series = self._series.get(labels) or self.begin(labels)
        series[0] += count

    def collect(self) -> Metric:
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for labels, (value,) in self._rows():
            family.add_metric(labels, value)
        return family


class Histogram(_Instrument):
    """Counts per bucket, and the sum. `bounds` are the buckets' inclusive upper ends."""

    __slots__ = ("_bounds",)

    def __init__(
        self, name: str, help: str, *labels: str, bounds: Sequence[float] = SECONDS
    ) -> None:
        self._bounds = tuple(bounds)
        # the buckets, the one to infinity, the sum
        super().__init__(name, help, labels, width=len(self._bounds) + 2)

    def observe(self, labels: Labels, value: float, count: int = 1) -> None:
        series = self._series.get(labels) or self.begin(labels)
        series[bisect_left(self._bounds, value)] += count
        series[-1] += value * count

    def collect(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        ends = list(map(floatToGoString, (*self._bounds, float("inf"))))
        for labels, (*buckets, total) in self._rows():
            family.add_metric(labels, list(zip(ends, accumulate(buckets), strict=True)), total)
        return family


class Metrics(Collector):
    """What one node counts, in a registry of its own: several nodes fit in one process."""

    enqueue_seconds = Histogram(
        "penstock_enqueue_seconds",
        "From a request's arrival to its durable answer, by message.",
        "topic",
    )
    pop_seconds = Histogram(
        "penstock_pop_seconds",
        "From a message being chosen to its committed lease being sent, by message.",
        "topic",
    )
    rank_error = Histogram(
        "penstock_rank_error", "Better messages that were ready when one was popped.", "topic",
        bounds=RANKS,
    )  # fmt: skip
    duplicates = Counter(
        "penstock_duplicate_messages", "Enqueues answered with an earlier message.", "topic"
    )
    acked = Counter("penstock_acked_messages", "Acknowledged messages.", "topic")
    retried = Counter(
        "penstock_retried_messages", "Messages that went back for another attempt.", "topic"
    )
    dead_lettered = Counter(
        "penstock_dead_lettered_messages",
        "Messages that went to the dead letters (DLQ), by reason.",
        *("topic", "reason"),  # one of a few words of ours, never a caller's text
    )
    replayed = Counter(
        "penstock_replayed_messages", "Dead letters that went back to their topic.", "topic"
    )
    leases_expired = Counter(
        "penstock_lease_expiries", "Leases that ran out before they were settled.", "topic"
    )
    leases_lost = Counter(
        "penstock_lease_lost", "Settlements of a lease that was no longer held.", "topic"
    )
    takeovers = Counter(
        "penstock_takeovers", "Tenures as coordinator that this node began.", "topic"
    )
    promises = Counter(
        "penstock_fences", "Epochs that replicas of this node have promised.", "topic"
    )
    replicas_renewed = Counter(
        "penstock_replicas_renewed", "Damaged replicas that were begun anew.", "topic"
    )
    truncated = Counter(
        "penstock_truncated_entries", "Entries cut off that never committed.", "topic"
    )
    follower_warnings = Counter(
        "penstock_follower_warnings",
        "Followers that ran low on credit, out of it, or fell behind, by what happened.",
        *("topic", "partition", "follower", "what"),
    )

    live_push_seconds = Histogram(
        "penstock_live_push_seconds",
        "From a commit to what it released being handed to subscribers, by delta.",
        "topic",
        bounds=PUSH_SECONDS,
    )
    live_delivered = Counter(
        "penstock_live_delivered_deltas", "Deltas sent to subscribers and sinks.", "topic"
    )
    live_switches = Counter(
        "penstock_live_behind_switches",
        "Times that a subscriber or sink fell behind and read on from the log.",
        "topic",
    )
    live_quarantined = Counter(
        "penstock_live_quarantined_deltas",
        "Deltas that the fold of a partition could not place, by reason.",
        *("topic", "reason"),
    )
    live_sink_seconds = Histogram(
        "penstock_live_sink_seconds",
        "From the log to a sink of the node, by delta; the oldest of a write counts.",
        *("topic", "sink"),
    )
    ingest_rejected = Counter(
        "penstock_ingest_rejected_deltas",
        "Deltas refused because too many waited to be written.",
        "topic",
    )
    ingest_crossings = Counter(
        "penstock_ingest_high_water_crossings",
        "Times that the queue of deltas to be written rose to its high-water mark.",
        "topic",
    )

    log_written = Counter(
        "penstock_log_written_bytes", "Bytes written to the write-ahead log (WAL)."
    )
    fsync_seconds = Histogram("penstock_fsync_seconds", "One write of the log made durable.")
    snapshot_seconds = Histogram("penstock_snapshot_seconds", "Writing one snapshot.")
    requests = Counter("penstock_requests", "Answered requests, by outcome.", "method", "status")
    request_seconds = Histogram("penstock_request_seconds", "From request to answer.", "method")
    backpressure = Counter(
        "penstock_backpressure", "Requests refused because a bound was reached.", "reason"
    )
    evictions = Counter(
        "penstock_evicted_connections", "Connections that were cut off, by reason.", "reason"
    )
    auth_failures = Counter(
        "penstock_auth_failures", "Connections and calls without a valid API key."
    )

    def __init__(self, *, node: str = "", gauges: Callable[[], Iterable[Metric]] = tuple) -> None:
        """`gauges` are what the node holds, read anew at each scrape."""
        self._node, self._gauges = node, gauges
        self._instruments: list[Counter | Histogram] = []
        for name, declared in vars(type(self)).items():
            if isinstance(declared, Counter | Histogram):
                self._instruments.append(declared.fresh())
                setattr(self, name, self._instruments[-1])
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def begin_topic(self, topic: str) -> None:
        """Show a topic's counters at zero from the start."""
        for instrument in self._instruments:
            if instrument.labels == ("topic",):
                instrument.begin((topic,))

    def forget_topic(self, topic: str) -> None:
        """A deleted topic leaves the scrape; a new one of that name starts at zero."""
        for instrument in self._instruments:
            instrument.forget("topic", topic)

    def text(self) -> bytes:
        """The scrape, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read an engine that is not there yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        build = {"version": __version__, "python": platform.python_version(), "node": self._node}
        yield InfoMetricFamily("penstock_build", "What is running.", value=build)
        for instrument in self._instruments:
            yield instrument.collect()
        yield from self._gauges()
