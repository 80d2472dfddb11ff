"""A node's metrics, in Prometheus' text format.

What happens is counted as it happens, once per batch. What *is* (backlog, leases, ages, sizes) is
read from the engine when somebody scrapes: keeping it current all day would cost the hot path for
numbers that are looked at every fifteen seconds. `docs/metrics.md` explains every one of them.

Recording belongs to the event loop's thread; a writer thread hands its timings over with its
result. Topic labels are names of topics that exist: check the name first, count afterwards.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.model.delta_format import PriorityClass
from penstock.model.version import __version__
from penstock.node.observe.instruments import Counter, Histogram
from penstock.node.observe.live_metrics import LiveReading, live_gauges
from penstock.node.observe.replica_metrics import ReplicaReading, replica_gauges

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
PUSH_SECONDS: Final = (0.000025, 0.00005, 0.0001, 0.000175, *SECONDS[1:])
RANKS: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000)


class PartitionReading(NamedTuple):
    """What a partition holds at the moment of a scrape; None: there is nothing to measure."""

    topic: str
    partition: int
    ready: int = 0
    delayed: int = 0
    inflight: int = 0  # leased
    dead: int = 0
    oldest_age_s: float | None = None  # of the oldest ready message
    log_bytes: int = 0
    log_segments: int = 0
    sequence_committed: int = 0
    epoch: int = 0
    snapshot_bytes: int | None = None
    snapshot_age_s: float | None = None

    @property
    def backlog(self) -> int:
        """Messages that wait for a consumer, now or later."""
        return self.ready + self.delayed


class NodeReading(NamedTuple):
    """What a node holds at the moment of a scrape."""

    partitions: Iterable[PartitionReading] = ()
    replicas: Iterable[ReplicaReading] = ()
    live: Iterable[LiveReading] = ()
    connections: int = 0
    ingest: Mapping[str, Sequence[int]] = {}  # by topic: deltas that wait, by class
    streams: Mapping[str, int] = {}  # by kind: lease, log
    credits: Mapping[str, int] = {}  # unused, by kind of stream
    rank_error_max: Mapping[str, int] = {}  # by topic
    requests_pending: int = 0
    strangers: int = 0
    held_bytes: Mapping[str, int] = {}  # for callers, by what it is
    metadata_available: bool = True
    rolled_back: bool = False
    clock_off: bool = False
    clock_ahead_s: float = 0.0  # of the middle clock of the cluster
    unopened: int = 0  # partitions


class Metrics(Collector):
    """Everything one node counts, in a registry of its own: several nodes fit in one process."""

    def __init__(self, *, node: str = "") -> None:
        self._node = node
        self._read: Callable[[], NodeReading] = NodeReading
        self._make_topic_instruments()
        self._make_replica_instruments()
        self._make_live_instruments()
        self._make_node_instruments()
        self._instruments = [
            instrument
            for instrument in vars(self).values()
            if isinstance(instrument, Counter | Histogram)
        ]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _make_topic_instruments(self) -> None:
        self._enqueue = Histogram(
            "penstock_enqueue_seconds",
            "From a request's arrival to its durable answer, by message.",
            ["topic"],
            bounds=SECONDS,
        )
        self._pop = Histogram(
            "penstock_pop_seconds",
            "From a message being chosen to its committed lease being sent, by message.",
            ["topic"],
            bounds=SECONDS,
        )
        self._rank_error = Histogram(
            "penstock_rank_error",
            "Better messages that were ready when one was popped.",
            ["topic"],
            bounds=RANKS,
        )
        self._duplicates = Counter(
            "penstock_duplicate_messages", "Enqueues answered with an earlier message.", ["topic"]
        )
        self._acked = Counter("penstock_acked_messages", "Acknowledged messages.", ["topic"])
        self._retried = Counter(
            "penstock_retried_messages", "Messages that went back for another attempt.", ["topic"]
        )
        self._dead = Counter(
            "penstock_dead_lettered_messages",
            "Messages that went to the dead letters (DLQ), by reason.",
            ["topic", "reason"],
        )
        self._replayed = Counter(
            "penstock_replayed_messages", "Dead letters that went back to their topic.", ["topic"]
        )
        self._lease_expiries = Counter(
            "penstock_lease_expiries", "Leases that ran out before they were settled.", ["topic"]
        )
        self._lease_lost = Counter(
            "penstock_lease_lost", "Settlements of a lease that was no longer held.", ["topic"]
        )

    def _make_replica_instruments(self) -> None:
        self._takeovers = Counter(
            "penstock_takeovers", "Tenures as coordinator that this node began.", ["topic"]
        )
        self._promises = Counter(
            "penstock_fences", "Epochs that replicas of this node have promised.", ["topic"]
        )
        self._renewed = Counter(
            "penstock_replicas_renewed", "Damaged replicas that were begun anew.", ["topic"]
        )
        self._truncated = Counter(
            "penstock_truncated_entries", "Entries cut off that never committed.", ["topic"]
        )
        self._stream_warnings = Counter(
            "penstock_follower_warnings",
            "Followers that ran low on credit, out of it, or fell behind, by what happened.",
            ["topic", "partition", "follower", "what"],
        )

    def _make_live_instruments(self) -> None:
        self._live_push = Histogram(
            "penstock_live_push_seconds",
            "From a commit to what it released being handed to subscribers, by delta.",
            ["topic"],
            bounds=PUSH_SECONDS,
        )
        self._live_delivered = Counter(
            "penstock_live_delivered_deltas", "Deltas sent to subscribers and sinks.", ["topic"]
        )
        self._live_switches = Counter(
            "penstock_live_behind_switches",
            "Times that a subscriber or sink fell behind and read on from the log.",
            ["topic"],
        )
        self._live_quarantined = Counter(
            "penstock_live_quarantined_deltas",
            "Deltas that the fold of a partition could not place, by reason.",
            ["topic", "reason"],
        )

        self._live_sink = Histogram(
            "penstock_live_sink_seconds",
            "From the log to a sink of the node, by delta; the oldest of a write counts.",
            ["topic", "sink"],
            bounds=SECONDS,
        )

        self._ingest_rejected = Counter(
            "penstock_ingest_rejected_deltas",
            "Deltas refused because too many waited to be written.",
            ["topic"],
        )
        self._ingest_crossings = Counter(
            "penstock_ingest_high_water_crossings",
            "Times that the queue of deltas to be written rose to its high-water mark.",
            ["topic"],
        )

    def _make_node_instruments(self) -> None:
        self._log_written = Counter(
            "penstock_log_written_bytes", "Bytes written to the write-ahead log (WAL)."
        )
        self._fsync = Histogram(
            "penstock_fsync_seconds", "One write of the log made durable.", bounds=SECONDS
        )
        self._snapshot = Histogram(
            "penstock_snapshot_seconds", "Writing one snapshot.", bounds=SECONDS
        )
        self._requests = Counter(
            "penstock_requests", "Answered requests, by outcome.", ["method", "status"]
        )
        self._request_seconds = Histogram(
            "penstock_request_seconds", "From request to answer.", ["method"], bounds=SECONDS
        )
        self._backpressure = Counter(
            "penstock_backpressure", "Requests refused because a bound was reached.", ["reason"]
        )
        self._evictions = Counter(
            "penstock_evicted_connections", "Connections that were cut off, by reason.", ["reason"]
        )
        self._auth_failures = Counter(
            "penstock_auth_failures", "Connections and calls without a valid API key."
        )

    # --- what happens; once per batch, from the event loop's thread ---

    def enqueued(self, topic: str, count: int, seconds: float) -> None:
        self._enqueue.observe((topic,), seconds, count)

    def popped(self, topic: str, count: int, seconds: float) -> None:
        self._pop.observe((topic,), seconds, count)

    def rank_error(self, topic: str, rank: int, count: int = 1) -> None:
        self._rank_error.observe((topic,), rank, count)

    def duplicates(self, topic: str, count: int) -> None:
        self._duplicates.add((topic,), count)

    def acked(self, topic: str, count: int) -> None:
        self._acked.add((topic,), count)

    def retried(self, topic: str, count: int) -> None:
        self._retried.add((topic,), count)

    def dead_lettered(self, topic: str, count: int, *, reason: str) -> None:
        """`reason` is one of a few words of ours, never a caller's text."""
        self._dead.add((topic, reason), count)

    def replayed(self, topic: str, count: int) -> None:
        self._replayed.add((topic,), count)

    def leases_expired(self, topic: str, count: int) -> None:
        self._lease_expiries.add((topic,), count)

    def leases_lost(self, topic: str, count: int) -> None:
        self._lease_lost.add((topic,), count)

    def log_written(self, bytes: int, seconds: float) -> None:
        """One write with its fdatasync."""
        self._log_written.add((), bytes)
        self._fsync.observe((), seconds)

    def snapshot_written(self, seconds: float) -> None:
        self._snapshot.observe((), seconds)

    def requested(self, method: str, status: str, seconds: float) -> None:
        """`method` is a known one or `unknown`; `status` is OK or one of `errors.STATUS_TABLE`."""
        self._requests.add((method, status))
        self._request_seconds.observe((method,), seconds)

    def backpressure(self, reason: str) -> None:
        self._backpressure.add((reason,))

    def evicted(self, reason: str) -> None:
        """`reason` is one of a few words of ours."""
        self._evictions.add((reason,))

    def took_over(self, topic: str) -> None:
        self._takeovers.add((topic,))

    def promised(self, topic: str) -> None:
        self._promises.add((topic,))

    def replica_renewed(self, topic: str) -> None:
        self._renewed.add((topic,))

    def truncated(self, topic: str, entries: int) -> None:
        self._truncated.add((topic,), entries)

    def stream_warned(self, topic: str, partition: int, follower: str, what: str) -> None:
        """`what` is one of credit_low, credit_exhausted, lagging, resumed."""
        self._stream_warnings.add((topic, str(partition), follower, what))

    def live_released(self, topic: str, count: int, seconds: float) -> None:
        self._live_push.observe((topic,), seconds, count)

    def live_told(self, topic: str, *, delivered: int, switches: int) -> None:
        if delivered:
            self._live_delivered.add((topic,), delivered)
        if switches:
            self._live_switches.add((topic,), switches)

    def live_quarantined(self, topic: str, count: int, *, reason: str) -> None:
        """`reason` is one of `propagation.fold.waitlist`."""
        self._live_quarantined.add((topic, reason), count)

    def live_written(self, topic: str, sink: str, count: int, seconds: float) -> None:
        self._live_sink.observe((topic, sink), seconds, count)

    def ingest_rejected(self, topic: str, count: int) -> None:
        self._ingest_rejected.add((topic,), count)

    def ingest_high(self, topic: str) -> None:
        self._ingest_crossings.add((topic,))

    def auth_failed(self) -> None:
        self._auth_failures.add(())

    def begin_topic(self, topic: str) -> None:
        """Show a topic's counters at zero from the start."""
        for instrument in self._instruments:
            if instrument.labels == ("topic",):
                instrument.begin((topic,))

    def forget_topic(self, topic: str) -> None:
        """A deleted topic leaves the scrape; a new one of that name starts at zero."""
        for instrument in self._instruments:
            instrument.forget("topic", topic)

    # --- what is; when somebody scrapes ---

    def read_with(self, read: Callable[[], NodeReading]) -> None:
        """Have `read` called at each scrape."""
        self._read = read

    def text(self) -> bytes:
        """The scrape, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read an engine that is not there yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        build = {
            "version": __version__,
            "python": platform.python_version(),
            "node": self._node,
        }
        yield InfoMetricFamily("penstock_build", "What is running.", value=build)
        for instrument in self._instruments:
            yield instrument.collect()
        reading = self._read()
        yield from _node_gauges(reading)
        yield from _partition_gauges(list(reading.partitions))
        yield from replica_gauges(list(reading.replicas))
        yield from live_gauges(list(reading.live))


def _node_gauges(reading: NodeReading) -> Iterator[Metric]:
    yield _gauge("penstock_connections", "Open connections.", reading.connections)
    yield _gauge(
        "penstock_requests_pending", "Requests not answered yet.", reading.requests_pending
    )
    yield _gauge(
        "penstock_strangers", "Connections whose callers are not known yet.", reading.strangers
    )
    yield _gauges(
        "penstock_held_bytes", "Bytes held for callers, by what they are.", "what",
        reading.held_bytes,
    )  # fmt: skip
    yield _gauge(
        "penstock_metadata_available",
        "0: the metadata store did not answer when it was asked last.",
        float(reading.metadata_available),
    )
    yield _gauge(
        "penstock_disk_rolled_back",
        "1: the data folder is an older copy of itself, and does not count for all it holds yet.",
        float(reading.rolled_back),
    )
    yield _gauge(
        "penstock_clock_off",
        "1: the clock differs from those of a majority, and the node coordinates nothing.",
        float(reading.clock_off),
    )
    yield _gauge(
        "penstock_clock_ahead_seconds",
        "What the clock is ahead of the middle one of the cluster.",
        reading.clock_ahead_s,
    )
    yield _gauge(
        "penstock_unopened_partitions",
        "Partitions that the node should have open and cannot for now.",
        reading.unopened,
    )
    yield _gauges("penstock_streams", "Open streams, by kind.", "kind", reading.streams)
    yield _gauges(
        "penstock_credits", "Credit that open streams have not used.", "kind", reading.credits
    )
    waiting = GaugeMetricFamily(
        "penstock_ingest_deltas", "Deltas that wait to be written.", labels=["topic", "class"]
    )
    for topic, depths in reading.ingest.items():
        for priority, depth in zip(PriorityClass, depths, strict=True):
            waiting.add_metric([topic, priority.name.lower()], depth)
    yield waiting
    yield _gauges(
        "penstock_rank_error_max",
        "Greatest rank error seen since the node started.",
        "topic",
        reading.rank_error_max,
    )


# Name, help, and the attribute of PartitionReading that it shows.
_PARTITION_GAUGES: Final = (
    ("penstock_backlog_messages", "Messages that wait, ready or delayed.", "backlog"),
    ("penstock_ready_messages", "Messages that can be popped now.", "ready"),
    ("penstock_delayed_messages", "Messages that become ready later.", "delayed"),
    ("penstock_inflight_messages", "Messages out on a lease.", "inflight"),
    ("penstock_dlq_messages", "Dead letters.", "dead"),
    ("penstock_oldest_age_seconds", "Age of the oldest ready message.", "oldest_age_s"),
    ("penstock_log_bytes", "Size of the write-ahead log (WAL) on disk.", "log_bytes"),
    ("penstock_log_segments", "Segment files of the log.", "log_segments"),
    ("penstock_sequence_committed", "Last committed sequence.", "sequence_committed"),
    ("penstock_epoch", "Epoch of the partition's coordinator.", "epoch"),
    ("penstock_snapshot_bytes", "Size of the last snapshot.", "snapshot_bytes"),
    ("penstock_snapshot_age_seconds", "Time since the last snapshot.", "snapshot_age_s"),
)


def _partition_gauges(partitions: list[PartitionReading]) -> Iterator[Metric]:
    for name, help, attribute in _PARTITION_GAUGES:
        family = GaugeMetricFamily(name, help, labels=["topic", "partition"])
        for reading in partitions:
            value = getattr(reading, attribute)
            if value is not None:
                family.add_metric([reading.topic, str(reading.partition)], value)
        yield family


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
