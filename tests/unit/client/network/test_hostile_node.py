"""What a client makes of a node's words that are wrong: an error that says so, at once, to all who
wait, and no more memory than the words took."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from penstock.client.network.connection import ChangeStream, Connection
from penstock.errors import Corruption, PenstockError, from_wire
from penstock.model.columns import HEADER
from penstock.model.entries import CHANGES
from penstock.wire.frame import FrameType, encode
from penstock.wire.messages import Changes, Delivery, LogSlice, OpenSubscription, pack
from verification.fuzz import server_corpus
from verification.fuzz.listening import Client, Deaf, hear_case, turns
from verification.fuzz.mutation import frame_bytes
from verification.fuzz.server_corpus import Asked

CASES = 1500


@pytest.mark.parametrize("part", range(3))
async def test_words_that_no_node_would_say_are_refused_in_clear_terms(part: int) -> None:
    for number in range(part * CASES // 3, (part + 1) * CASES // 3):
        await hear_case(7, number)


async def test_words_as_they_should_be_reach_all_who_wait() -> None:
    client = Client([])
    await client.hear(frame_bytes(server_corpus.welcome("")))
    await client.ask()
    dice = random.Random(1)
    for sent in server_corpus.answers(dice):
        await client.hear(frame_bytes(sent))
    for _ in range(40):
        for kind in (server_corpus._delivery, server_corpus._slice, server_corpus._changes):
            await client.hear(frame_bytes(kind(dice)))
    assert client.connection.alive
    await client.end()
    assert [task.result() for task in client._tasks[:5]] == [1, 1, 1, 40, 40]
    assert 20 < client._tasks[5].result() < 40  # some have told a position only


class Subscribed:
    """A connection with one subscription, number 1."""

    def __init__(self) -> None:
        self.connection, self.transport = Connection(), Deaf()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.connection.data_received(frame_bytes(server_corpus.welcome("")))

    async def open(self) -> ChangeStream:
        opening = asyncio.create_task(
            self.connection.subscribe(OpenSubscription("t", 0), self._arrived)
        )
        await turns()
        self.hear(FrameType.ACK, pack({"position": 0}))
        return (await opening)[0]

    def _arrived(self, _: ChangeStream, changes: Changes, body: memoryview) -> None:
        CHANGES.decode(body, changes.count).fixed("position")

    def hear(self, type: FrameType, *payload: bytes) -> None:
        self.connection.data_received(b"".join(encode(type, 1, *payload)))


async def test_who_reads_a_stream_hears_of_an_ending_that_cannot_be_read() -> None:
    client = Subscribed()
    stream = await client.open()
    client.hear(FrameType.UNSUBSCRIBE, pack(["no map"]))
    async with asyncio.timeout(10):
        assert isinstance(await stream.ended, PenstockError)


async def test_no_room_is_made_for_rows_that_do_not_come() -> None:
    client = Subscribed()
    stream = await client.open()
    absent = HEADER.pack(1, 0, 0)  # columns that are left out have a default in every row
    client.hear(FrameType.BATCH, pack([0, 1 << 33, 5, 9]), absent)
    assert not client.connection.alive and isinstance(stream.ended.result(), PenstockError)


@pytest.mark.parametrize("answer", [{}, {"position": "x"}, {"position": b""}, []])
async def test_a_subscription_whose_start_is_not_told_is_refused(answer: Any) -> None:
    client = Subscribed()
    opening = asyncio.create_task(
        client.connection.subscribe(OpenSubscription("t", 0), client._arrived)
    )
    await turns()
    client.hear(FrameType.ACK, pack(answer))
    with pytest.raises(PenstockError):
        await opening


@pytest.mark.parametrize(
    "fields",
    [{"code": []}, {"message": 5}, {"code": "backpressure", "retry_after_s": "x"}, {"self": 1}],
)
def test_what_describes_no_error_is_one(fields: dict[str, Any]) -> None:
    with pytest.raises(Corruption, match="as errors are"):
        from_wire(fields)


async def test_a_slice_that_lies_about_its_length_is_not_acknowledged() -> None:
    connection = Connection()
    connection.connection_made(Deaf())  # type: ignore[arg-type]
    connection.data_received(frame_bytes(server_corpus.welcome("")))
    opening = asyncio.create_task(connection.log_stream("t", partition=0))
    await turns()
    connection.data_received(b"".join(encode(FrameType.ACK, 1, pack({}))))
    stream = await opening
    lie = LogSlice(0, -(1 << 63), (1 << 64) - 1, 0)
    connection.data_received(b"".join(encode(FrameType.BATCH, 1, pack(lie))))
    with pytest.raises(Corruption):
        await anext(stream)


async def test_a_delivery_of_too_many_is_refused() -> None:
    client = Client([])
    await client.hear(frame_bytes(server_corpus.welcome("")))
    await client.ask()
    control = Delivery(0, 1, 1, 1 << 33, 9, 9)
    frame = encode(FrameType.BATCH, Asked.LEASES, pack(control), HEADER.pack(1, 0, 0))
    await client.hear(b"".join(frame))
    assert not client.connection.alive
    await client.end()
