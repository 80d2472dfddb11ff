"""Who makes deltas: one for each topic and origin, however many objects write through it."""

from __future__ import annotations

import secrets

from penstock.client.delta_flights import Flights
from penstock.client.delta_heads import Heads, HybridClock
from penstock.errors import InvalidArgument
from penstock.model.delta_format import ORIGIN_BYTES_MAX


class Writer:
    """What it knows of the vectors, what it has under way, and its time."""

    def __init__(self, origin: str | None = None) -> None:
        self.origin = origin or secrets.token_hex(6)
        if not 1 <= len(self.origin.encode()) <= ORIGIN_BYTES_MAX:
            raise InvalidArgument(
                f"origin must have 1 to {ORIGIN_BYTES_MAX} bytes",
                field="origin",
                limit=ORIGIN_BYTES_MAX,
            )
        self.heads = Heads(self.origin.encode())
        self.flights = Flights(self.heads)
        self.clock = HybridClock()
