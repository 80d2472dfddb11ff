"""What a scrape shows of the live path: folds, subscribers together, and each sink of the node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

BREAKER: Final = {"closed": 0, "half_open": 1, "open": 2}


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


# Name, help, and the attribute of LiveReading that it shows.
_TOPIC_GAUGES: Final = (
    ("penstock_live_lag_entries", "Sequences that the last of the subscribers lacks.", "lag"),
    ("penstock_live_outbox_deltas", "Released deltas that wait to be sent.", "outbox"),
    ("penstock_live_rate", "Deltas per second that the slowest subscriber gets at most.", "rate"),
)
# The same of SinkReading.
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


def live_gauges(readings: list[LiveReading]) -> Iterator[Metric]:
    folds = GaugeMetricFamily(
        "penstock_live_fold_lag_entries",
        "Committed sequences that a partition's fold has not taken in yet.",
        labels=["topic", "partition"],
    )
    subscribers = GaugeMetricFamily(
        "penstock_live_subscriptions", "Open subscriptions, by state.", labels=["topic", "state"]
    )
    for reading in readings:
        for partition, lag in reading.folds.items():
            folds.add_metric([reading.topic, str(partition)], lag)
        for state, count in reading.states.items():
            subscribers.add_metric([reading.topic, state], count)
    yield folds
    yield subscribers
    for name, help, attribute in _TOPIC_GAUGES:
        family = GaugeMetricFamily(name, help, labels=["topic"])
        for reading in readings:
            family.add_metric([reading.topic], getattr(reading, attribute))
        yield family
    yield from _sink_metrics(readings)


def _sink_metrics(readings: list[LiveReading]) -> Iterator[Metric]:
    labels = ["topic", "sink"]
    places = [(reading.topic, sink) for reading in readings for sink in reading.sinks]
    breaker = GaugeMetricFamily(
        "penstock_live_sink_breaker", "0 closed, 1 half open, 2 open.", labels=labels
    )
    for topic, sink in places:
        breaker.add_metric([topic, sink.sink], BREAKER[sink.breaker])
    yield breaker
    for kind, families in (
        (GaugeMetricFamily, _SINK_GAUGES),
        (CounterMetricFamily, _SINK_COUNTERS),
    ):
        for name, help, attribute in families:
            family = kind(name, help, labels=labels)
            for topic, sink in places:
                family.add_metric([topic, sink.sink], getattr(sink, attribute))
            yield family
