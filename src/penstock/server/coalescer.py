"""Single enqueues gathered into native ones.

A native enqueue costs nearly the same for one message as for a hundred, so single ones of a topic
that arrive in one turn of the loop, or while earlier ones are under way, go out together. At most
`FLIGHTS_MAX` requests of a topic are under way at once: what arrives meanwhile waits and grows
into the next one, so the size of a batch follows the load by itself.

Every caller gets the answer to its own message. An entry is checked before it joins, so a whole
request is refused only when the topic changed in between. Then the entries go out again one by
one, which is safe: a refused request wrote nothing, and entries with a producer key, which never
share a request with those without, are recognised if they come twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, NamedTuple

from penstock.client.network.connection import Connection
from penstock.errors import InvalidArgument, PenstockError, StaleProducer, from_wire
from penstock.server.entries import Entry, GatewayEntries
from penstock.wire.frame import FrameType
from penstock.wire.messages import Enqueue, Enqueued, Part, pack

FLIGHTS_MAX: Final = 2
FLIGHT_ENTRIES_MAX: Final = 1000
FLIGHT_BYTES_MAX: Final = 8 << 20


class Written(NamedTuple):
    message_id: str
    duplicate: bool


Waiter = tuple[Entry, "asyncio.Future[Written]"]


class Coalescer:
    """The single enqueues of one topic over one connection."""

    def __init__(self, connection: Connection, topic: str, *, bytes_max: int) -> None:
        self._connection = connection
        self._topic = topic
        self._bytes_max = bytes_max
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Waiter] = deque()
        self._flights = 0
        self._scheduled = False

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._flights

    def put(self, entry: Entry) -> asyncio.Future[Written]:
        future: asyncio.Future[Written] = self._loop.create_future()
        self._waiting.append((entry, future))
        self._schedule()
        return future

    def _schedule(self) -> None:
        if self._waiting and self._flights < FLIGHTS_MAX and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._launch)

    def _launch(self) -> None:
        self._scheduled = False
        self._send(self._take())
        self._schedule()

    def _take(self) -> list[Waiter]:
        taken: list[Waiter] = []
        size = 0
        while self._waiting and len(taken) < FLIGHT_ENTRIES_MAX:
            entry = self._waiting[0][0]
            size += len(entry.payload) + len(entry.key) + len(entry.headers)
            if taken and size > self._bytes_max:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _send(self, flight: list[Waiter]) -> None:
        self._flights += 1
        try:
            body = GatewayEntries.of([entry for entry, _ in flight]).body()
            request = Enqueue(self._topic, [Part(0, len(flight), len(body))], partitioned=False)
            answer = self._connection.ask(FrameType.BATCH, Enqueued, pack(request), body)
        except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
            self._flights -= 1
            refuse(flight, error)
            return
        answer.add_done_callback(lambda done: self._land(flight, done))

    def _land(self, flight: list[Waiter], answer: asyncio.Future[Enqueued]) -> None:
        self._flights -= 1
        error = answer.exception()
        if error is None:
            try:
                settle(flight, answer.result())
            except Exception as wrong:  # noqa: BLE001 - it is told to those who wait for it
                refuse(flight, wrong)
        elif len(flight) > 1 and isinstance(error, InvalidArgument | StaleProducer):
            for waiter in flight:
                self._send([waiter])
        else:
            refuse(flight, error)
        self._schedule()


class Desk:
    """The coalescers of one connection, kept while they have work."""

    def __init__(self, connection: Connection, *, bytes_max: int) -> None:
        self._connection = connection
        self._bytes_max = bytes_max
        self._coalescers: dict[tuple[str, bool], Coalescer] = {}

    def put(self, topic: str, entry: Entry) -> asyncio.Future[Written]:
        place = (topic, entry.run is None)
        found = self._coalescers.get(place)
        if found is None:
            self._sweep()
            found = self._coalescers[place] = Coalescer(
                self._connection, topic, bytes_max=self._bytes_max
            )
        return found.put(entry)

    def _sweep(self) -> None:
        idle = [place for place, coalescer in self._coalescers.items() if coalescer.idle]
        for place in idle:
            del self._coalescers[place]


def settle(flight: list[Waiter], enqueued: Enqueued) -> None:
    ids = enqueued.ids(len(flight))
    known = {duplicate.index for duplicate in enqueued.duplicates}
    for position, ((_, future), message_id) in enumerate(zip(flight, ids, strict=True)):
        if not future.done():
            future.set_result(Written(message_id, position in known))


def refuse(flight: list[Waiter], error: BaseException) -> None:
    """Each waiter gets an exception of its own, for each adds its own traceback to it."""
    for _, future in flight:
        if not future.done():
            own = from_wire(error.to_wire()) if isinstance(error, PenstockError) else error
            future.set_exception(own)
