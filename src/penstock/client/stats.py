"""What a topic tells about itself."""

from __future__ import annotations

import msgspec


class PartitionStats(msgspec.Struct, frozen=True):
    partition: int
    epoch: int = 0
    sequence_first: int = 0
    sequence_last: int = 0
    sequence_committed: int = 0
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    dead: int = 0
    bytes: int = 0
    segments: int = 0
    snapshot_sequence: int | None = None
    snapshot_bytes: int | None = None
    snapshot_age_ms: int | None = None
    coordinator: str = ""


class TopicStats(msgspec.Struct, frozen=True):
    """Counts of now, totals since the node started."""

    name: str
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    dead: int = 0
    backlog: int = 0
    oldest_age_ms: int | None = None
    enqueued_total: int = 0
    acked_total: int = 0
    retried_total: int = 0
    dead_total: int = 0
    expired_total: int = 0
    rank_error_max: int = 0
    partitions: list[PartitionStats] = []
