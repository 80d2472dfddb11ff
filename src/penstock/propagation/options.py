"""What the fold of a partition may be told."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.errors import InvalidArgument

HOUR_MS: Final = 3600 * 1000
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
