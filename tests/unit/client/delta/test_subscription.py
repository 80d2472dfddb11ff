"""Released deltas as they arrive, over a peer that is told what to send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from penstock.client.client import Client
from penstock.client.delta.subscription import DeltaSubscription, Filter, SubscriptionProgress
from penstock.client.network.connection import ChangeStream, Connection
from penstock.client.network.endpoints import open_connection
from penstock.client.network.link import ConnectionSource
from penstock.client.options import Options
from penstock.client.topic import Topic
from penstock.errors import InvalidArgument
from penstock.model.entries import CHANGES
from penstock.wire.frame import FrameType
from penstock.wire.messages import Changes, Grant, OpenSubscription, unpack

REQUEST = OpenSubscription("vectors", 0, start="sequence", at=1, credit_entries=8, cursor="c")
ANSWER = {"position": 0, "ordinal": 0, "epoch": 1, "sequence_committed": 9}


def body(*rows: tuple[int, int], vectors: str = "") -> bytes:
    """Rows as (sequence, position), of one vector or of the one that a letter each names."""
    columns = {"sequence": [s for s, _ in rows], "position": [p for _, p in rows]}
    payloads = [b"%80s" % letter.encode() for letter in vectors or "a" * len(rows)]
    return CHANGES.encode(len(rows), {**columns, "payload": payloads})


class Peer:
    """All subscriptions that were opened, and what their readers sent."""

    def __init__(self) -> None:
        self.opened: asyncio.Queue[tuple[Any, int, OpenSubscription]] = asyncio.Queue()
        self.grants: asyncio.Queue[Grant] = asyncio.Queue()

    def session(self, session_type: type[Any], broker: Any) -> Any:
        class Node(session_type):  # type: ignore[misc]
            def on_subscribe(node, item: Any) -> None:  # noqa: N805
                try:
                    request, _ = unpack(item.payload, OpenSubscription)
                except InvalidArgument:
                    super().on_subscribe(item)
                    return
                node.send(FrameType.ACK, item.sequence, ANSWER)
                self.opened.put_nowait((node, item.sequence, request))

            def on_ack(node, item: Any) -> None:  # noqa: N805
                self.grants.put_nowait(unpack(item.payload, Grant)[0])

        return Node(broker)


class OneUrl(ConnectionSource):
    def __init__(self, url: str) -> None:
        self._url = url

    async def connect(self) -> Any:
        return await open_connection(self._url)

    async def close(self) -> None:
        """It holds nothing."""


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
async def topic(broker: Any, session_type: type[Any], peer: Peer) -> AsyncIterator[Topic[bytes]]:
    loop = asyncio.get_running_loop()
    make = lambda: peer.session(session_type, broker)  # noqa: E731
    server = await loop.create_server(make, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(OneUrl(f"penstock://127.0.0.1:{port}"), Options(retry_wait_s=0.001))
    async with asyncio.timeout(60), client:
        yield await client.topic("vectors", bytes).opened()
    server.close()


async def test_what_is_lost_with_a_connection_comes_over_the_next(
    topic: Topic[bytes], peer: Peer
) -> None:
    following = DeltaSubscription(topic, [REQUEST], Filter())
    node, number, request = await peer.opened.get()
    assert request == REQUEST
    # an urgent delta, position 7, comes before those at 5 and 6
    node.send(FrameType.BATCH, number, Changes(0, 2, 4, 9), body((4, 4), (3, 7), vectors="ab"))
    assert (await following.next()).rows is None
    node.transport.abort()
    node, number, request = await peer.opened.get()
    assert (request.start, request.at, request.cursor) == ("sequence", 5, "c")
    again = body((5, 5), (6, 6), (3, 7), vectors="acb")
    node.send(FrameType.BATCH, number, Changes(0, 3, 7, 9), again)
    assert (await following.next()).rows == [0, 1]
    await following.close()


async def test_where_it_began_stays(topic: Topic[bytes], peer: Peer) -> None:
    following = DeltaSubscription(
        topic, [REQUEST, msgspec.structs.replace(REQUEST, partition=1)], Filter()
    )
    assert await following.began() == {0: 0, 1: 0}
    for _ in range(2):
        node, number, request = await peer.opened.get()
        node.send(FrameType.BATCH, number, Changes(request.partition, 1, 4, 9), body((4, 4)))
        await following.next()
    assert await following.began() == {0: 0, 1: 0}
    await following.close()


async def test_parts_of_a_coalesced_change_do_not_come_after_it(
    topic: Topic[bytes], peer: Peer
) -> None:
    following = DeltaSubscription(
        topic, [msgspec.structs.replace(REQUEST, coalesce_ms=5)], Filter()
    )
    node, number, _ = await peer.opened.get()
    # sequence 7 stands for 5 and 6 too, which are of the same vector
    node.send(FrameType.BATCH, number, Changes(0, 1, 4, 9, 2), body((7, 7)))
    await following.next()
    node.transport.abort()
    node, number, _ = await peer.opened.get()
    node.send(FrameType.BATCH, number, Changes(0, 4, 8, 9), body((5, 5), (6, 6), (7, 7), (8, 8)))
    assert (await following.next()).rows == [3]
    await following.close()


async def test_parts_of_a_coalesced_change_may_share_its_position(
    topic: Topic[bytes], peer: Peer
) -> None:
    following = DeltaSubscription(
        topic, [msgspec.structs.replace(REQUEST, coalesce_ms=5)], Filter()
    )
    node, number, _ = await peer.opened.get()
    # sequence 5 had waited for 6, and stands for it too
    node.send(FrameType.BATCH, number, Changes(0, 1, 3, 9, 1), body((5, 6)))
    await following.next()
    node.transport.abort()
    node, number, _ = await peer.opened.get()
    again = body((6, 6), (5, 6), (4, 6), (7, 7))
    node.send(FrameType.BATCH, number, Changes(0, 4, 7, 9), again)
    assert (await following.next()).rows == [2, 3]
    await following.close()


async def test_a_batch_with_coalesced_changes_is_handled_as_a_whole(
    topic: Topic[bytes], peer: Peer
) -> None:
    following = DeltaSubscription(
        topic, [msgspec.structs.replace(REQUEST, coalesce_ms=5)], Filter()
    )
    node, number, _ = await peer.opened.get()
    for position, folded, rows in ((2, 0, [(1, 1), (2, 2)]), (6, 1, [(4, 4), (6, 6)])):
        node.send(FrameType.BATCH, number, Changes(0, 2, position, 9, folded), body(*rows))
    await anext(following)
    (await anext(following)).ack_before(1)  # 6 may stand for 3
    await following.close()
    told = [peer.grants.get_nowait().position for _ in range(peer.grants.qsize())]
    assert max(told) == 2


async def test_credit_comes_back_in_quarters(topic: Topic[bytes], peer: Peer) -> None:
    following = DeltaSubscription(topic, [REQUEST], Filter())
    node, number, _ = await peer.opened.get()
    for at in (1, 2, 3):
        node.send(FrameType.BATCH, number, Changes(0, 1, at, 9), body((at, at)))
        await following.next()
    grant = await peer.grants.get()
    assert (grant.entries, grant.bytes) == (2, 2 * len(body((1, 1))))
    assert peer.grants.empty()
    await following.close()


async def test_what_is_handled_is_told(topic: Topic[bytes], peer: Peer) -> None:
    following = DeltaSubscription(topic, [REQUEST], Filter())
    node, number, _ = await peer.opened.get()
    node.send(FrameType.BATCH, number, Changes(0, 0, 6, 9))
    arrived = await following.next()
    assert arrived.columns is None
    arrived.place.acknowledge(6)
    assert (await peer.grants.get()).position == 6
    arrived.place.acknowledge(8)
    await following.close()  # does not wait for more
    assert (await peer.grants.get()).position == 8


async def test_an_error_that_stays_is_raised(topic: Topic[bytes], peer: Peer) -> None:
    following = DeltaSubscription(topic, [REQUEST], Filter())
    node, number, _ = await peer.opened.get()
    gone = InvalidArgument("no such route", field="routes")
    node.send(FrameType.UNSUBSCRIBE, number, gone.to_wire())
    with pytest.raises(InvalidArgument, match="no such route"):
        await following.next()
    await following.close()


async def test_what_a_lost_connection_was_not_told_the_next_one_is(
    topic: Topic[bytes], peer: Peer
) -> None:
    following = DeltaSubscription(topic, [REQUEST], Filter())
    node, number, _ = await peer.opened.get()
    node.send(FrameType.BATCH, number, Changes(0, 1, 4, 9), body((4, 4)))
    arrived = await following.next()
    node.transport.abort()
    await peer.opened.get()
    arrived.place.acknowledge(4)
    assert (await peer.grants.get()).position == 4
    await following.close()


async def test_a_place_that_never_began_begins_again() -> None:
    place = SubscriptionProgress(OpenSubscription("vectors", 0, start="cursor", cursor="c"))
    assert place.next_request().start == "cursor"
    stream = ChangeStream(Connection(), 1, request=place.request, arrived=lambda *_: None)
    place.on_opened(stream, {"position": 12})
    again = place.next_request()
    assert (again.start, again.at, again.cursor) == ("sequence", 13, "c")
