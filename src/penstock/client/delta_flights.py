"""Changes that are under way, by vector: who follows one that fails fails with it.

A change names the one before it as its parent while that is still under way, so that many changes
of a vector share a request. Should the first not be written and the second be, the second could
never be released: its parent is missing. So a change counts as written once all those of its
vectors that were under way before it are. After a failure nothing is known of a vector, and what it
has become is read from the log when the last of them has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable
from typing import TypeVar

from penstock.client.delta_heads import Heads
from penstock.errors import PenstockError

T = TypeVar("T")
Flight = asyncio.Future[BaseException | None]  # of a change: why it failed, None: it is written


class Flights:
    """Invariant: a flight ends after all that were under way for one of its vectors before it."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._last: dict[bytes, Flight] = {}  # of each vector that has one

    async def landed(self, vectors: Iterable[bytes]) -> None:
        """Wait until nothing of these vectors is under way."""
        while waiting := {self._last[vector] for vector in vectors if vector in self._last}:
            await asyncio.wait(waiting)

    async def of(self, vectors: Collection[bytes], writing: Awaitable[T]) -> T:
        """Write a change of some vectors, of which it is the head already."""
        own: Flight = asyncio.get_running_loop().create_future()
        before = {self._last[vector] for vector in vectors if vector in self._last}
        self._last.update(dict.fromkeys(vectors, own))
        try:
            found = await writing
            if before:
                await asyncio.wait(before)
                _raise_failed(before)
        except BaseException as error:
            self._heads.forget(vectors)
            self._end(own, vectors, before, error)
            raise
        self._end(own, vectors, before, None)
        return found

    def _end(
        self,
        own: Flight,
        vectors: Collection[bytes],
        before: Iterable[Flight],
        error: BaseException | None,
    ) -> None:
        """Whoever gives a change up does not wait for those before it; its flight does."""
        left = [flight for flight in before if not flight.done()]
        if left:
            left[0].add_done_callback(lambda _: self._end(own, vectors, left, error))
            return
        own.set_result(error)
        for vector in vectors:
            if self._last.get(vector) is own:
                del self._last[vector]


def _raise_failed(flights: Iterable[Flight]) -> None:
    for error in [flight.result() for flight in flights]:
        if isinstance(error, PenstockError):
            raise error
        if error is not None:
            raise PenstockError(f"the change before this one was given up: {error!r}")
