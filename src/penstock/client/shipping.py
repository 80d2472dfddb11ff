"""Requests of one topic on their way: sent, sent again with the same bytes, and answered."""

from __future__ import annotations

import asyncio
from collections import Counter

from penstock.client.connection import Connection
from penstock.client.entries import Shipment
from penstock.client.link import Link, passing
from penstock.errors import Backpressure, PenstockError
from penstock.wire.messages import Enqueued


class Shipping:
    """`room_by`, a time of the loop: a node that has no room by then is given up; None: never."""

    def __init__(self, link: Link, topic: str) -> None:
        self._link, self._topic = link, topic
        self._loop = asyncio.get_running_loop()
        self._troubled = Counter[int]()  # requests of a partition that are tried again

    def toward(self, partition: int) -> Connection | None:
        return self._link.toward(self._topic, partition)

    def in_trouble(self, partition: int) -> bool:
        return self._troubled[partition] > 0 or (
            self._link.coordinator(self._topic, partition) == ""
        )

    async def sent(self, shipment: Shipment, room_by: float | None = None) -> Enqueued:
        """The answer to a request that is sent when the node wants it."""
        connection = self.toward(shipment.partition)
        while (
            room_by is None  # else it is tried, whatever the node would like
            and connection is not None
            and (slow := connection.slow_until(self._topic))
        ):
            await asyncio.sleep(slow - self._loop.time())
            connection = self.toward(shipment.partition)
        if connection is None:
            return await self.ship(shipment, room_by=room_by)
        try:
            return await connection.enqueue_nowait(shipment.request, shipment.bodies)
        except PenstockError as error:
            if not passing(error):
                raise
            return await self.ship(shipment, failed=error, room_by=room_by)

    async def ship(
        self,
        shipment: Shipment,
        *,
        failed: PenstockError | None = None,
        room_by: float | None = None,
    ) -> Enqueued:
        """Send, and send again with the same bytes, until there is an answer."""

        async def send(connection: Connection) -> Enqueued | Backpressure:
            try:
                return await connection.enqueue_nowait(shipment.request, shipment.bodies)
            except Backpressure as refusal:
                if room_by is None:
                    raise
                return refusal

        at = shipment.partition
        self._troubled[at] += 1
        try:
            while True:
                if room_by is not None and isinstance(failed, Backpressure):
                    await self._wait_for_room(failed, room_by)
                    failed = None
                found = await self._link.request(send, failed=failed, at=(self._topic, at))
                if not isinstance(found, Backpressure):
                    return found
                failed = found
        finally:
            self._troubled[at] -= 1

    async def _wait_for_room(self, refusal: Backpressure, room_by: float) -> None:
        """As long as the node says, but a last try is made when the time is over."""
        left = room_by - self._loop.time()
        if left <= 0:
            raise refusal
        await asyncio.sleep(min(refusal.retry_after_s, left))
