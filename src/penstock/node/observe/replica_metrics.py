"""What a scrape shows of replicas: roles, how far each is, and the streams to followers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric


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
    """A replica at the moment of a scrape, in whatever role."""

    topic: str
    partition: int
    role: str
    epoch: int = 0
    sequence_committed: int = 0
    sequence_last: int = 0
    sequence_applied: int = 0
    damaged: bool = False
    followers: tuple[FollowerReading, ...] = ()


# Name, help, and the attribute of ReplicaReading that it shows.
_REPLICA_GAUGES: Final = (
    ("penstock_replica_epoch", "Epoch that a replica knows of.", "epoch"),
    ("penstock_replica_committed", "Last sequence known to be committed.", "sequence_committed"),
    ("penstock_replica_last", "Last sequence of a replica's log.", "sequence_last"),
    ("penstock_replica_applied", "Last sequence in a replica's heap.", "sequence_applied"),
    ("penstock_replica_damaged", "1: some of its log cannot be read.", "damaged"),
)
# The same of FollowerReading.
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


def replica_gauges(replicas: list[ReplicaReading]) -> Iterator[Metric]:
    role = GaugeMetricFamily(
        "penstock_replica_role",
        "1 for the role of a replica.",
        labels=["topic", "partition", "role"],
    )
    for reading in replicas:
        role.add_metric([reading.topic, str(reading.partition), reading.role], 1)
    yield role
    for name, help, attribute in _REPLICA_GAUGES:
        family = GaugeMetricFamily(name, help, labels=["topic", "partition"])
        for reading in replicas:
            place = [reading.topic, str(reading.partition)]
            family.add_metric(place, float(getattr(reading, attribute)))
        yield family
    for name, help, attribute in _FOLLOWER_GAUGES:
        family = GaugeMetricFamily(name, help, labels=["topic", "partition", "follower"])
        for reading in replicas:
            place = [reading.topic, str(reading.partition)]
            for follower in reading.followers:
                family.add_metric([*place, follower.node], float(getattr(follower, attribute)))
        yield family
