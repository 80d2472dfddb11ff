"""The client's own account: what it put, leased and acknowledged, and what contradicts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.model.ids import LeaseToken

Place = tuple[int, int]  # partition and sequence: what a message is to the server


class Lease(NamedTuple):
    token: LeaseToken
    place: Place


@dataclass
class Ledger:
    """Messages are known by the number in their payload.

    `unsure` holds leases whose acknowledgement was not confirmed: the message may or may not be
    done, but while such a lease runs nobody else may get the message.
    """

    visibility_ms: int
    started: set[int] = field(default_factory=set)  # puts begun
    put: set[int] = field(default_factory=set)  # puts acknowledged
    done: set[int] = field(default_factory=set)  # acknowledgements confirmed
    held: dict[int, LeaseToken] = field(default_factory=dict)
    unsure: dict[int, LeaseToken] = field(default_factory=dict)
    leased_at: dict[int, float] = field(default_factory=dict)
    message_of: dict[int, Place] = field(default_factory=dict)
    deliveries: int = 0
    # what must stay empty
    phantoms: set[int] = field(default_factory=set)  # delivered, never put
    doubled: set[int] = field(default_factory=set)  # one put, two messages
    resurrected: set[int] = field(default_factory=set)  # delivered after a confirmed ack
    overlaps: set[int] = field(default_factory=set)  # leased while leased
    redelivered: set[int] = field(default_factory=set)  # after its lease ran out: allowed

    _waiting: list[tuple[int, asyncio.Event]] = field(default_factory=list)

    def acknowledge(self, key: int) -> None:
        """The server said that the put of `key` is durable."""
        self.put.add(key)
        for count, event in self._waiting:
            if len(self.put) >= count:
                event.set()

    async def reached(self, puts: int) -> None:
        """Wait until that many puts are acknowledged."""
        event = asyncio.Event()
        self._waiting.append((puts, event))
        await event.wait()

    def delivered(self, leases: Iterable[tuple[int, Lease]]) -> None:
        now = time.monotonic()
        for key, lease in leases:
            self.deliveries += 1
            if self.message_of.setdefault(key, lease.place) != lease.place:
                self.doubled.add(key)
            if key not in self.started:
                self.phantoms.add(key)
            if key in self.done:
                self.resurrected.add(key)
            if key in self.held or now < self._lease_end(key):
                self.overlaps.add(key)
            elif key in self.leased_at:
                self.redelivered.add(key)
            self.leased_at[key] = now
            self.unsure[key] = lease.token

    def _lease_end(self, key: int) -> float:
        """The earliest moment at which an unconfirmed lease of `key` may have run out."""
        return self.leased_at.get(key, float("-inf")) + self.visibility_ms / 1000

    def hold(self, leases: Sequence[tuple[int, Lease]]) -> None:
        self.delivered(leases)
        for key, lease in leases:
            del self.unsure[key]
            self.held[key] = lease.token

    def settled(self, keys: Iterable[int]) -> None:
        """The server confirmed that these are done."""
        for key in keys:
            self.done.add(key)
            self.unsure.pop(key, None)
