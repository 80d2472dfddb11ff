"""A client that has asked a node for everything, and is told what no node would say.

A case is a function of the run's seed and its number. Whatever arrives, the client's connection
takes it without an error of its own; and once the node hangs up, all who wait have an answer or an
error that says what was wrong. What it keeps is no more than what it was sent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, Final

from penstock.client.delta.subscription import DeltaSubscription, Filter
from penstock.client.network.connection import Connection
from penstock.client.options import Options
from penstock.errors import NotFound, PenstockError
from penstock.model.batch import SCHEMAS, Codec, Kind
from penstock.model.ids import LeaseToken
from penstock.wire.messages import OpenSubscription
from verification.fuzz import server_corpus
from verification.fuzz.corpus import Sent
from verification.fuzz.mutation import frame_bytes, mutated

CASE_S_MAX: Final = 60.0
FRAMES_MAX: Final = 6  # that are said when all is open
TURNS: Final = 3  # of the loop, until who was woken has asked for the next


class Deaf:
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        self.ended = False

    def writelines(self, list_of_data: Iterable[Any], /) -> None: ...

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


class Once:
    """A link that has one connection, and then no other."""

    def __init__(self, connection: Connection) -> None:
        self.options = Options(retry_wait_s=0.0)
        self._connections = [connection]

    async def request(self, ask: Any, *, at: Any) -> Any:
        if not self._connections:
            raise NotFound("there is no other node")
        return await ask(self._connections.pop())


class OneTopic:
    name = "t"

    def __init__(self, connection: Connection) -> None:
        self.link: Any = Once(connection)


class Client:
    """Everything that a client may wait for. What fails with an error of the project is as it
    should be; anything else is a finding, and comes out of `end`."""

    def __init__(self, codecs: list[str]) -> None:
        self.connection = Connection(codecs=codecs)
        self.transport = Deaf()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self._tasks: list[asyncio.Task[int]] = []
        self.received = 0

    async def ask(self) -> None:
        """Ask for everything, in the order of `server_corpus.Asked`."""
        connection = self.connection
        body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x"]})
        asks: list[AsyncIterator[object]] = [
            _once(connection.call("stats")),
            _once(connection.enqueue("t", [(0, 1, body)])),
            _once(connection.settle("t", [LeaseToken(1, 0, 1, 1)])),
            _leases(connection),
            _log(connection),
            _changes(connection),
        ]
        for asked in asks:
            self._tasks.append(asyncio.create_task(_waited(asked)))
            await turns()

    async def hear(self, data: bytes) -> None:
        """What arrives after the connection was given up does not reach it."""
        if not self.transport.ended:
            self.received += len(data)
            self.connection.data_received(data)
            await turns()

    async def end(self) -> None:
        """The node hangs up: all who wait learn of it."""
        if self.connection._decoder.buffered > self.received:
            raise AssertionError("more is kept than came")
        self.connection.connection_lost(None)
        async with asyncio.timeout(CASE_S_MAX):
            await asyncio.gather(*self._tasks)


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def _waited(asked: AsyncIterator[object]) -> int:
    """How much came until the end of it."""
    came = 0
    try:
        async for _ in asked:
            came += 1
    except PenstockError:
        pass  # a clear word
    return came


async def _once(answer: Awaitable[object]) -> AsyncIterator[object]:
    yield await answer


async def _leases(connection: Connection) -> AsyncIterator[object]:
    stream = await connection.lease_stream("t", credits=10)
    async for batch in stream:
        columns = batch.columns
        yield [columns.binary(name) for name in ("key", "headers", "payload")]


async def _log(connection: Connection) -> AsyncIterator[object]:
    async for batches in await connection.log_stream("t", partition=0):
        yield batches


async def _changes(connection: Connection) -> AsyncIterator[object]:
    request = OpenSubscription("t", 0, start="sequence", at=1)
    topic: Any = OneTopic(connection)  # as much of one as it takes
    following = DeltaSubscription(topic, [request], Filter())
    try:
        async for batch in following:
            yield list(batch)
    finally:
        await following.close()


def said(dice: random.Random, codec: Codec) -> Iterable[bytes]:
    """All that a node says to one client, of which some is wrong."""
    first = server_corpus.welcome(codec.name.lower() if codec else "")
    yield mutated(dice, first) if dice.random() < 0.05 else frame_bytes(first)
    wrong = dice.choice((0.0, 0.05, 0.3))  # of the answers: past a wrong one nothing is heard
    rest = [(sent, wrong) for sent in server_corpus.answers(dice)]
    rest += [(server_corpus.said(dice), 0.5) for _ in range(dice.randrange(1, FRAMES_MAX + 1))]
    for sent, share in rest:
        packed: Sent = sent._replace(codec=codec) if codec and dice.randrange(2) else sent
        yield mutated(dice, packed) if dice.random() < share else frame_bytes(packed)


async def hear_case(seed: int, number: int) -> Client:
    """Play a case; raises what a client should not."""
    dice = random.Random(f"{seed}/{number}")
    codec = dice.choice((Codec.NONE, Codec.ZSTD, Codec.LZ4))
    client = Client([codec.name.lower()] if codec else [])
    words = iter(said(dice, codec))
    await client.hear(next(words))
    await client.ask()
    for data in words:
        await client.hear(data)
    await client.end()
    return client
