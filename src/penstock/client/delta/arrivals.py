"""Released deltas of several partitions as nodes send them, through failures without a gap.

Each partition has a subscription at the node that coordinates it; what arrives waits in one queue,
whose length the credit of these subscriptions bounds. A frame says up to which position everything
has now been sent (it is *settled*); urgent deltas may have come before it. After a failure the next
subscription begins behind the settled position, and what came early is not taken twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container
from functools import partial
from typing import Any, Final

import msgspec

from penstock.client.network.connection import Connection
from penstock.client.network.link import passing
from penstock.client.network.streams import ChangeStream, SubscriptionStart
from penstock.client.topic import Topic
from penstock.model.columns import Columns
from penstock.model.delivery import CHANGES
from penstock.wire.messages import Changes, OpenSubscription

VECTOR: Final = slice(64, 80)  # of a delta: the hash of its vector


class SubscriptionProgress:
    """How far a partition's subscription has come, over all the streams that it has had."""

    def __init__(self, request: OpenSubscription) -> None:
        self.request = request
        self.began: int | None = None  # the position behind which the first stream started
        self._settled: int | None = None  # everything up to here has arrived; None: not even begun
        # What arrived beyond the settled position: from sequence to position.
        self._ahead: dict[int, int] = {}
        # The sequences among them that the open stream may send a second time.
        self._again: frozenset[int] = frozenset()
        # Where changes are coalesced, the parts of one that came may come by themselves: by vector,
        # the (position, sequence) of the last that arrived beyond the settled position. Those of a
        # vector come in order, so up to this one nothing is new.
        self._last: dict[bytes, tuple[int, int]] = {}
        self._last_again: dict[bytes, tuple[int, int]] = {}  # the same as of earlier streams
        self._stream: ChangeStream | None = None  # the one that is open, or was last
        self._handled = 0  # the reader is done with everything up to here
        self._topic_id = request.topic_id  # of the topic that positions are places in

    def next_request(self) -> OpenSubscription:
        """The request that goes on from here."""
        self._again, self._last_again = frozenset(self._ahead), dict(self._last)
        if self._settled is None:
            return self.request
        return msgspec.structs.replace(
            self.request, start="sequence", at=self._settled + 1, topic_id=self._topic_id
        )

    def on_opened(self, stream: ChangeStream, answer: SubscriptionStart) -> None:
        self._settle(answer["position"])
        self._topic_id = answer.get("topic", 0)
        if self.began is None:
            self.began = answer["position"]
        self._stream = stream
        if self._handled:
            stream.acknowledge(self._handled)  # The stream before may not have told the node.

    def acknowledge(self, position: int) -> None:
        """The reader is done with everything up to there."""
        self._handled = max(self._handled, position)
        if self._stream is not None:
            self._stream.acknowledge(self._handled)

    def on_changes(self, changes: Changes, columns: Columns | None) -> list[int] | None:
        """Take note of a frame; the rows in it that are new, None: all of them."""
        fresh = None
        if columns is not None:
            positions = columns.fixed("position").tolist()
            ahead = max(positions) > changes.position
            sequences = columns.fixed("sequence").tolist() if ahead or self._again else []
            if self._again:
                fresh = self._fresh(columns, sequences, positions)
            if ahead:
                self._ahead.update(zip(sequences, positions, strict=True))
                if self.request.coalesce_ms:
                    self._note_last(columns, fresh, list(zip(positions, sequences, strict=True)))
        self._settle(changes.position)
        return fresh

    def _fresh(self, columns: Columns, sequences: list[int], positions: list[int]) -> list[int]:
        """The rows of a frame that did not come before."""
        rows = [row for row, at in enumerate(sequences) if at not in self._again]
        if not self.request.coalesce_ms:
            return rows
        places = zip(_vectors(columns), positions, sequences, strict=True)
        parts = {row for row, place in enumerate(places) if self._came_in_another(*place)}
        return [row for row in rows if row not in parts]

    def _came_in_another(self, vector: bytes, position: int, sequence: int) -> bool:
        """Whether the last that came of its vector stands for this one, or is it."""
        last = self._last_again.get(vector)
        if last is None:
            return False
        if position > last[0] or (position, sequence) == last:
            del self._last_again[vector]
        return position <= last[0]

    def _note_last(
        self, columns: Columns, fresh: list[int] | None, places: list[tuple[int, int]]
    ) -> None:
        vectors = _vectors(columns)
        for row in range(len(places)) if fresh is None else fresh:
            self._last[vectors[row]] = places[row]

    def _settle(self, position: int) -> None:
        if self._settled is None or position > self._settled:
            self._settled = position
        if self._ahead:
            self._ahead = {s: p for s, p in self._ahead.items() if p > self._settled}
            self._again &= self._ahead.keys()
            if not self._again:
                self._last_again = {}
            self._last = {v: last for v, last in self._last.items() if last[0] > self._settled}


def _vectors(columns: Columns) -> list[bytes]:
    payloads = columns.binary("payload")
    return [] if payloads is None else [payload[VECTOR] for payload in payloads]


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A frame of changes that waits for the reader."""

    place: SubscriptionProgress
    stream: ChangeStream
    changes: Changes
    columns: Columns | None  # None: the frame tells a position and nothing else
    rows: list[int] | None  # those that are new; None: all

    def taken(self) -> Arrived:
        self.stream.took(self.changes.count, len(self.columns.body) if self.columns else 0)
        return self


class Arrivals:
    """The queue of all partitions' changes, and the tasks that keep it filled."""

    def __init__(self, topic: Topic[Any], requests: list[OpenSubscription]) -> None:
        self._topic = topic
        self._arrived: deque[Arrived] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failed: BaseException | None = None
        # A generator may be left by another task than entered it: no task group, but each ends.
        self._places = [SubscriptionProgress(request) for request in requests]
        self._followers = [asyncio.create_task(self._follow(place)) for place in self._places]
        for follower in self._followers:
            follower.add_done_callback(self._on_done)

    async def began(self, besides: Container[int] = ()) -> dict[int, int]:
        """By partition, `besides` some, the position behind which it started; once all have."""
        while True:
            found = {place.request.partition: place.began for place in self._places}
            asked = {partition: at for partition, at in found.items() if partition not in besides}
            known = {partition: at for partition, at in asked.items() if at is not None}
            if len(known) == len(asked):
                return known
            await self._news()

    async def next(self) -> Arrived:
        """What arrived first."""
        while not self._arrived:
            await self._news()
        return self._arrived.popleft().taken()

    async def _news(self) -> None:
        """Wait for something to happen; raises what ended a partition's subscription for good."""
        if self._failed is not None:
            raise self._failed
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def close(self) -> None:
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        self._arrived.clear()

    # --- one partition ---

    async def _follow(self, place: SubscriptionProgress) -> None:
        link = self._topic.link
        at = (self._topic.name, place.request.partition)
        while True:
            stream = await link.request(partial(self._open, place), at=at)
            try:
                error = await asyncio.shield(stream.ended)
            finally:
                await stream.close()
            if error is not None and not passing(error):
                raise error
            # The stream was opened, so the link has not waited. A node that ends each one at once
            # must not be asked without a pause.
            await asyncio.sleep(link.options.retry_wait_s)

    async def _open(self, place: SubscriptionProgress, connection: Connection) -> ChangeStream:
        stream, answer = await connection.subscribe(
            place.next_request(), partial(self._on_changes, place)
        )
        place.on_opened(stream, answer)
        self._wake()
        return stream

    def _on_changes(
        self, place: SubscriptionProgress, stream: ChangeStream, changes: Changes, body: memoryview
    ) -> None:
        columns = CHANGES.decode(body, changes.count) if changes.count else None
        rows = place.on_changes(changes, columns)
        self._arrived.append(Arrived(place, stream, changes, columns, rows))
        self._wake()

    def _on_done(self, follower: asyncio.Task[None]) -> None:
        if not follower.cancelled() and self._failed is None:
            self._failed = follower.exception()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
