"""Keeping leases alive while messages are worked on, or wait for their turn."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from penstock.client.leases import MessageBatch, State
from penstock.client.link import Link
from penstock.client.settling import Settler
from penstock.errors import PenstockError

log = logging.getLogger("penstock.client")


class Keeper:
    """Extends all leases of its batches every third of the visibility.

    Each partition has a request of its own, which is given up when the next one is due: one that
    is out of reach must not cost the leases on others. It runs while something is held, and from
    `start` to `finish` in any case: `absorb` then brings in what has arrived meanwhile.
    """

    def __init__(
        self,
        link: Link,
        settler: Settler,
        visibility_ms: int,
        *,
        absorb: Callable[[], None] | None = None,
    ) -> None:
        self._link, self._settler, self._visibility_ms = link, settler, visibility_ms
        self._absorb = absorb
        self._batches: set[MessageBatch[Any]] = set()
        self._started = self._running = self._stopped = False
        self._look = asyncio.Event()  # something ended: is there still anything to keep?

    def start(self) -> None:
        self._started = True
        self._ensure()

    def keep(self, batch: MessageBatch[Any]) -> None:
        """Extend the leases of `batch` until none is held."""
        self._batches.add(batch)
        batch.kept = self._let_go
        self._ensure()

    def finish(self) -> None:
        """Nothing new will come; what is held is still kept."""
        self._started = False
        self._look.set()

    def stop(self) -> None:
        """Keep nothing any longer."""
        self._stopped = True
        self._look.set()

    def _let_go(self, batch: MessageBatch[Any]) -> None:
        self._batches.discard(batch)
        if not self._batches and not self._started:
            self._look.set()

    @property
    def _needed(self) -> bool:
        return not self._stopped and (self._started or bool(self._batches))

    def _ensure(self) -> None:
        if not self._running and self._needed:
            self._running = True
            self._link.spawn(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        interval_s = self._visibility_ms / 3000
        due = loop.time() + interval_s
        while self._needed:
            self._look.clear()
            try:
                async with asyncio.timeout_at(due):
                    await self._look.wait()
            except TimeoutError:
                due = loop.time() + interval_s
                await self._extend_all(interval_s)
        self._running = False

    async def _extend_all(self, within_s: float) -> None:
        if self._absorb is not None:
            self._absorb()
        held: dict[int, list[tuple[MessageBatch[Any], int]]] = defaultdict(list)
        for batch in self._batches:
            for row in batch.held_rows().tolist():
                held[batch.partition].append((batch, row))
        async with asyncio.TaskGroup() as tasks:
            for some in held.values():
                tasks.create_task(self._extend(some, within_s))

    async def _extend(self, held: list[tuple[MessageBatch[Any], int]], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                tokens = [batch.token(row) for batch, row in held]
                lost = await self._settler.extend(tokens, self._visibility_ms)
        except (PenstockError, TimeoutError) as error:
            log.warning("%d leases were not extended: %s", len(held), error or "no answer")
            return
        for position in lost:
            batch, row = held[position]
            batch.mark((row,), State.LOST)
