"""What lies between a store and its watchers: changes that were not taken yet, and how to read a
range and its changes as one story."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import ClassVar

from penstock.cluster.store import WATCH_CHANGES_MAX, Change, MetadataStore
from penstock.errors import PenstockError, Unavailable


class ChangeQueue:
    """The changes under a prefix that one watcher has not taken yet."""

    limit: ClassVar[int] = WATCH_CHANGES_MAX

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.ended: PenstockError | None = None
        self._changes: deque[Change] = deque()
        self._news = asyncio.Event()

    def offer(self, change: Change) -> None:
        if self.ended or not change.key.startswith(self.prefix):
            return
        if len(self._changes) >= self.limit:
            self._changes.clear()
            self.end(Unavailable("the watch fell behind; read the range again"))
            return
        self._changes.append(change)
        self._news.set()

    def end(self, reason: PenstockError) -> None:
        """Raise `reason` to the watcher once it has taken what is left."""
        self.ended = self.ended or reason
        self._news.set()

    def __aiter__(self) -> AsyncIterator[Change]:
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self.ended:
                raise self.ended
            self._news.clear()
            await self._news.wait()
        return self._changes.popleft()


@asynccontextmanager
async def follow(
    store: MetadataStore, prefix: str, *, known: Iterable[str] = ()
) -> AsyncIterator[AsyncIterator[Change]]:
    """What is there, entry by entry, then every change of it, with no gap between the two.

    Keys that the caller knows of and that are gone are reported first. The range is read after the
    watch was entered, so a change may be in both; the one that is older than what was read is left
    out.
    """
    async with store.watch(prefix) as changes:
        entries = await store.range(prefix)
        revisions = {entry.key: entry.revision for entry in entries}
        gone = [key for key in known if key not in revisions]

        async def told() -> AsyncGenerator[Change, None]:
            for key in gone:
                yield Change(key, None, 0)
            for entry in entries:
                yield Change(entry.key, entry.value, entry.revision)
            async for change in changes:
                if change.revision > revisions.get(change.key, 0):
                    yield change

        async with aclosing(told()) as story:
            yield story
