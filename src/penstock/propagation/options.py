"""What a fold, and the live path of a node, may be told."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from penstock.errors import InvalidArgument

HOUR_MS: Final = 3600 * 1000
CAPACITY: Final = 100_000
HIGH_WATER: Final = 0.8
AGEING_MS: Final = 10_000
_BOUNDS: Final[dict[str, tuple[int, int]]] = {
    "dedup_ms": (0, 30 * 24 * HOUR_MS),
    "pending_max": (1, 1_000_000),
    "pending_ms": (1, HOUR_MS),
    "operations_max": (2, 1 << 16),
}


class PropagationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the fold; all times are log time, so that it stays a function of the log."""

    dedup_ms: int = 24 * HOUR_MS  # how long a released delta's id is remembered
    pending_max: int = 10_000  # deltas of a partition that wait for a cause
    pending_ms: int = 30_000  # how long one of them waits
    operations_max: int = 1024  # SCALE and OFFSET kept apart from a vector's components

    def validate(self) -> PropagationOptions:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(
                    f"{name} is {value}, must be from {low} to {high}", field=name, limit=high
                )
        return self


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
