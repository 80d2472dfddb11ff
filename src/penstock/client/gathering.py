"""Puts that will share a request, and who waits for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.client.entries import Entries


class Gathering:
    __slots__ = ("entries", "waiters")

    def __init__(self) -> None:
        self.entries = Entries()
        self.waiters: list[asyncio.Future[str]] = []

    def only(self, rows: Sequence[int]) -> Gathering:
        """Some of it by itself."""
        some = Gathering()
        some.entries = self.entries.only(rows)
        some.waiters = [self.waiters[row] for row in rows]
        return some

    def resolve(self, ids: Sequence[str]) -> None:
        for waiter, message_id in zip(self.waiters, ids, strict=True):
            if not waiter.done():
                waiter.set_result(message_id)

    def fail(self, error: BaseException) -> None:
        """For those that have no answer yet."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
