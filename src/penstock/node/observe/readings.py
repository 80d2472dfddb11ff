"""What a node, its partitions, its replicas and its live path hold at the moment of a scrape, and
the gauges that show it. A reading is taken when somebody scrapes, and never kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.model.delta import PriorityClass

BREAKER: Final = {"closed": 0, "half_open": 1, "open": 2}


class PartitionReading(NamedTuple):
    """What a partition holds; None: there is nothing to measure."""

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


class FollowerReading(NamedTuple):
    """One follower, as its coordinator sees it, whether a stream to it is open or not."""

    node: str
    lag: int = 0  # entries that it does not hold durably
    credit: float = 1.0  # left, as a share of its window; 0: none, or no stream to it
    credit_entries: int = 0  # the balance, and the window that it is of
    credit_entries_max: int = 0
    credit_bytes: int = 0
    credit_bytes_max: int = 0
    lagging: bool = False
    learner: bool = False


class ReplicaReading(NamedTuple):
    topic: str
    partition: int
    role: str
    epoch: int = 0
    sequence_committed: int = 0
    sequence_last: int = 0
    sequence_applied: int = 0
    damaged: bool = False
    followers: tuple[FollowerReading, ...] = ()


class SinkReading(NamedTuple):
    """A sink of the node, over the partitions that it follows here."""

    sink: str
    up: bool = True
    breaker: str = "closed"
    lag: int = 0  # sequences that are committed and not written
    outbox: int = 0
    rate: float = 0.0
    busy_s: float = 0.0
    rows: int = 0
    retries: int = 0
    rejected: int = 0
    dead_letters: int = 0


class LiveReading(NamedTuple):
    """A delta topic on this node. Subscribers are shown together: there may be thousands."""

    topic: str
    folds: Mapping[int, int] = {}  # by active partition: committed sequences not folded yet
    states: Mapping[str, int] = {}  # subscribers, by state
    lag: int = 0  # of the subscriber that is furthest behind, in sequences
    outbox: int = 0  # deltas that wait in all outboxes
    rate: float = 0.0  # of the slowest subscriber; 0: there is none
    sinks: tuple[SinkReading, ...] = ()


class NodeReading(NamedTuple):
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


# Name, help, and the attribute of the reading that it shows.
_NODE_GAUGES: Final = (
    ("penstock_connections", "Open connections.", "connections"),
    ("penstock_requests_pending", "Requests not answered yet.", "requests_pending"),
    ("penstock_strangers", "Connections whose callers are not known yet.", "strangers"),
    (
        "penstock_metadata_available",
        "0: the metadata store did not answer when it was asked last.",
        "metadata_available",
    ),
    (
        "penstock_disk_rolled_back",
        "1: the data folder is an older copy of itself, and does not count for all it holds yet.",
        "rolled_back",
    ),
    (
        "penstock_clock_off",
        "1: the clock differs from those of a majority, and the node coordinates nothing.",
        "clock_off",
    ),
    (
        "penstock_clock_ahead_seconds",
        "What the clock is ahead of the middle one of the cluster.",
        "clock_ahead_s",
    ),
    (
        "penstock_unopened_partitions",
        "Partitions that the node should have open and cannot for now.",
        "unopened",
    ),
)
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
_REPLICA_GAUGES: Final = (
    ("penstock_replica_epoch", "Epoch that a replica knows of.", "epoch"),
    ("penstock_replica_committed", "Last sequence known to be committed.", "sequence_committed"),
    ("penstock_replica_last", "Last sequence of a replica's log.", "sequence_last"),
    ("penstock_replica_applied", "Last sequence in a replica's heap.", "sequence_applied"),
    ("penstock_replica_damaged", "1: some of its log cannot be read.", "damaged"),
)
_FOLLOWER_GAUGES: Final = (
    ("penstock_follower_lag_entries", "Entries that a follower does not hold yet.", "lag"),
    ("penstock_follower_credit_ratio", "Credit left to a follower, of its window.", "credit"),
    ("penstock_follower_credit_entries", "Entries that a follower may be sent.", "credit_entries"),
    ("penstock_follower_credit_entries_max", "Its window in entries.", "credit_entries_max"),
    ("penstock_follower_credit_bytes", "Bytes that a follower may be sent.", "credit_bytes"),
    ("penstock_follower_credit_bytes_max", "Its window in bytes.", "credit_bytes_max"),
    ("penstock_follower_lagging", "1: without credit for longer than allowed.", "lagging"),
    ("penstock_follower_learner", "1: it copies, and does not count.", "learner"),
)
_LIVE_GAUGES: Final = (
    ("penstock_live_lag_entries", "Sequences that the last of the subscribers lacks.", "lag"),
    ("penstock_live_outbox_deltas", "Released deltas that wait to be sent.", "outbox"),
    ("penstock_live_rate", "Deltas per second that the slowest subscriber gets at most.", "rate"),
)
_SINK_GAUGES: Final = (
    ("penstock_live_sink_up", "1 while the sink takes what it is given.", "up"),
    ("penstock_live_sink_lag_entries", "Sequences that the sink lacks.", "lag"),
    ("penstock_live_sink_outbox_deltas", "Released deltas that wait for the sink.", "outbox"),
    ("penstock_live_sink_rate", "Deltas per second that it gets at most.", "rate"),
    ("penstock_live_sink_busy_seconds", "Duration of the call under way.", "busy_s"),
)
_SINK_COUNTERS: Final = (
    ("penstock_live_sink_rows", "Deltas written.", "rows"),
    ("penstock_live_sink_retries", "Tries that failed.", "retries"),
    ("penstock_live_sink_rejected_rows", "Rows that the sink can never take.", "rejected"),
    ("penstock_live_sink_dead_letters", "Messages in its DLQ topic for them.", "dead_letters"),
)


def gauges(node: NodeReading) -> Iterator[Metric]:
    yield from _families(_NODE_GAUGES, (), [((), node)])
    yield _family(
        "penstock_held_bytes", "Bytes held for callers, by what they are.", ["what"],
        node.held_bytes.items(),
    )  # fmt: skip
    yield _family("penstock_streams", "Open streams, by kind.", ["kind"], node.streams.items())
    yield _family(
        "penstock_credits", "Credit that open streams have not used.", ["kind"],
        node.credits.items(),
    )  # fmt: skip
    yield _family(
        "penstock_rank_error_max", "Greatest rank error seen since the node started.", ["topic"],
        node.rank_error_max.items(),
    )  # fmt: skip
    yield _family(
        "penstock_ingest_deltas", "Deltas that wait to be written.", ["topic", "class"],
        (((topic, each.name.lower()), depth)
         for topic, depths in node.ingest.items()
         for each, depth in zip(PriorityClass, depths, strict=True)),
    )  # fmt: skip
    partitions = [((p.topic, str(p.partition)), p) for p in node.partitions]
    yield from _families(_PARTITION_GAUGES, ("topic", "partition"), partitions)
    yield from _replica_gauges([((r.topic, str(r.partition)), r) for r in node.replicas])
    yield from _live_gauges(list(node.live))


def _replica_gauges(replicas: list[tuple[tuple[str, str], ReplicaReading]]) -> Iterator[Metric]:
    labels = ("topic", "partition")
    yield _family(
        "penstock_replica_role", "1 for the role of a replica.", (*labels, "role"),
        (((*place, reading.role), 1) for place, reading in replicas),
    )  # fmt: skip
    yield from _families(_REPLICA_GAUGES, labels, replicas)
    followers = [((*place, f.node), f) for place, reading in replicas for f in reading.followers]
    yield from _families(_FOLLOWER_GAUGES, (*labels, "follower"), followers)


def _live_gauges(readings: list[LiveReading]) -> Iterator[Metric]:
    yield _family(
        "penstock_live_fold_lag_entries",
        "Committed sequences that a partition's fold has not taken in yet.",
        ("topic", "partition"),
        (((r.topic, str(partition)), lag) for r in readings for partition, lag in r.folds.items()),
    )
    yield _family(
        "penstock_live_subscriptions", "Open subscriptions, by state.", ("topic", "state"),
        (((r.topic, state), count) for r in readings for state, count in r.states.items()),
    )  # fmt: skip
    yield from _families(_LIVE_GAUGES, ("topic",), [((r.topic,), r) for r in readings])
    sinks = [((r.topic, sink.sink), sink) for r in readings for sink in r.sinks]
    yield _family(
        "penstock_live_sink_breaker", "0 closed, 1 half open, 2 open.", ("topic", "sink"),
        ((place, BREAKER[sink.breaker]) for place, sink in sinks),
    )  # fmt: skip
    yield from _families(_SINK_GAUGES, ("topic", "sink"), sinks)
    yield from _families(_SINK_COUNTERS, ("topic", "sink"), sinks, kind=CounterMetricFamily)


def _families(
    table: Iterable[tuple[str, str, str]],
    labels: Sequence[str],
    readings: Sequence[tuple[Sequence[str], Any]],
    *,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Iterator[Metric]:
    """One metric for each row of the table, over all readings with their label values."""
    for name, help, attribute in table:
        values = ((place, getattr(reading, attribute)) for place, reading in readings)
        yield _family(name, help, labels, values, kind=kind)


def _family(
    name: str,
    help: str,
    labels: Sequence[str],
    values: Iterable[tuple[str | Sequence[str], float | None]],
    *,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """A metric with a value for each place, which is the values of its labels, or the only one."""
    family = kind(name, help, labels=labels)
    for place, value in values:
        if value is not None:
            family.add_metric([place] if isinstance(place, str) else place, value)
    return family
