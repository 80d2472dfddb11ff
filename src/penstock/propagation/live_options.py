"""What the live path of a node may be told."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.propagation.ingest import CAPACITY, HIGH_WATER
from penstock.propagation.lanes import AGEING_MS


class LiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How released deltas are pushed, and to which sinks of the node itself."""

    idle_s: float = 60.0  # that a partition stays folded after its last subscriber has left
    subscriptions_max: int = 1000  # of one topic's partitions here; sinks of the node not counted
    outbox_entries: int = 10_000  # released for a subscriber and not sent; more: it reads the log
    outbox_bytes: int = 8 << 20
    ingest_max: int = CAPACITY  # deltas of one topic that wait to be written; more are refused
    ingest_high_water: float = HIGH_WATER  # the part of that from which the queue counts as high
    ageing_ms: int = AGEING_MS  # of waiting for which a delta in a queue or an outbox gains a class
    rate_min: float = 1000.0  # deltas per second to one subscriber; the rate moves between these
    rate_max: float = 1_000_000.0
    sink: tuple[dict[str, Any], ...] = ()  # tables of sinks that the node runs
