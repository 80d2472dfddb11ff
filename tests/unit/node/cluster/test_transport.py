import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.unit.node.replica.fakes import Dialling, FakeHost, FakeOutput, Spawning, info

from penstock.errors import InvalidArgument
from penstock.model.batch import SCHEMAS, Kind, decode, seal
from penstock.node.cluster.transport import FollowOutput, Peers, PeerTransport
from penstock.replication.effects import Ack, Append, Fence, Follow, Followed
from penstock.wire.frame import FrameType
from penstock.wire.messages import OpenFollow, Told, pack, unpack

KEY = (1, 0)
encode = msgspec.msgpack.encode


def follow(stream: int = 1, *, node: str = "b") -> Follow:
    return Follow(node, "uuid", 1, stream, 0, [], 10, 1000)


class Net:
    """The transport of node a, which has a host of one partition."""

    def __init__(self, *up: str) -> None:
        self.dial, self.spawn = Dialling(*up), Spawning()
        self.peers = Peers(
            "a", connect=self.dial, spawn=self.spawn,
            on_connected=lambda node: self.transport.on_connected(node),
            on_refused=lambda node: self.transport.on_refused(node),
        )  # fmt: skip
        self.host = FakeHost(KEY)

        async def fetch(*_: object) -> None:
            return

        self.transport = PeerTransport(
            "a", peers=self.peers, hosts={KEY: self.host}, fetch_seed=fetch
        )
        self.output = FakeOutput()

    def opened(self, stream: int = 1, *, number: int = 7, node: str = "b") -> FollowOutput:
        control = OpenFollow(*KEY, encode(follow(stream, node=node)))
        return self.transport.on_open(self.output, number, control)


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net("b")
    net.peers.on_members({"b": info("b")})
    await net.dial.until(1)
    yield net
    await net.spawn.close()


# --- the reading end ---


async def test_what_arrives_on_a_stream_reaches_the_host(net: Net) -> None:
    net.transport.open_stream("b", KEY, follow())
    [handle] = net.dial.connections[0].handles
    assert handle.key == KEY and handle.follow == follow()
    reply = Followed("b", 1, 1, 0, 0)
    handle.follower.on_answer(memoryview(pack(reply)))
    handle.follower.on_batch(memoryview(pack(Append("b", 1, 1, 5))))
    assert net.host.told == [("message", reply), ("slice", 5, 0)]


async def test_a_stream_replaces_the_one_before(net: Net) -> None:
    net.transport.open_stream("b", KEY, follow(1))
    net.transport.open_stream("b", KEY, follow(2))
    first, second = net.dial.connections[0].handles
    assert first.closed and not second.closed
    first.follower.on_batch(memoryview(pack(Append("b", 1, 1, 5))))
    assert net.host.told == []
    net.transport.close_stream(KEY)
    assert second.closed


async def test_a_lost_stream_is_told_once_and_not_opened_again_by_itself(net: Net) -> None:
    net.transport.open_stream("b", KEY, follow())
    net.dial.connections[0].drop()
    second = await net.dial.until(2)
    assert net.host.told == [("lost", 1, False)] and second.handles == []


async def test_a_stream_waits_for_its_connection_and_hears_that_nobody_is_there() -> None:
    net = Net()
    net.peers.on_members({"b": info("b")})
    net.transport.open_stream("b", KEY, follow())
    net.transport.on_refused("b")
    assert net.host.told == [("lost", 1, True)]
    net.dial.up.add("b")
    connection = await net.dial.until(1)
    assert [handle.follow.stream for handle in connection.handles] == [1]
    await net.spawn.close()


async def test_a_stream_to_a_node_that_nobody_knows_is_lost(net: Net) -> None:
    net.transport.open_stream("z", KEY, follow())
    assert net.host.told == []  # not from within the call
    await net.dial.until(1)
    assert net.host.told == [("lost", 1, False)]


# --- messages ---


async def test_messages_go_to_the_host_of_their_partition(net: Net) -> None:
    net.transport.send("b", KEY, Fence("a", 3))
    await net.dial.until(1)
    [[told]] = net.dial.connections[0].frames
    assert told == Told(1, 0, "fence", encode(Fence("a", 3)))
    ack = Ack("b", "uuid", 1, 1, 0, 0, 0, 1)
    later, elsewhere = Told(1, 0, "later", b""), Told(9, 9, "fence", encode(Fence("b", 1)))
    net.transport.on_told([later, elsewhere, Told(1, 0, "ack", encode(ack))])
    assert net.host.told == [("message", ack)]


async def test_an_acknowledgement_that_says_nothing_new_is_sent_once(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent() -> list[int]:
        frames = net.dial.connections[0].frames
        return [msgspec.msgpack.decode(t.message, type=Ack).durable for f in frames for t in f]

    for durable in (3, 3, 4, 4):
        net.transport.send("b", KEY, Ack("a", "uuid", 1, 1, 2, 100, durable, 1))
    await asyncio.sleep(0)
    assert sent() == [3, 4]
    monkeypatch.setattr("penstock.node.cluster.transport.ACK_AGAIN_S", 0.0)
    net.transport.send("b", KEY, Ack("a", "uuid", 1, 1, 2, 100, 4, 1))  # a sign of life
    await asyncio.sleep(0)
    assert sent() == [3, 4, 4]


async def test_a_malformed_message_is_refused(net: Net) -> None:
    with pytest.raises(InvalidArgument):
        net.transport.on_told([Told(1, 0, "fence", b"\xc1")])
    with pytest.raises(InvalidArgument):
        net.transport.on_open(net.output, 7, OpenFollow(*KEY, b"\xc1"))


# --- the sending end ---


async def test_an_opened_stream_is_answered_on_its_number(net: Net) -> None:
    net.opened()
    assert net.host.told == [("follow", "b", 1)]
    reply = Followed("a", 1, 1, 0, 0)
    net.transport.send("b", KEY, reply)
    net.transport.send("b", KEY, Followed("a", 1, 99, 0, 0))  # of a stream that is gone
    [(kind, number, payload)] = net.output.frames
    assert (kind, number) == (FrameType.ACK, 7) and unpack(payload, Followed)[0] == reply


async def test_a_slice_carries_batches_as_they_are(net: Net) -> None:
    net.opened()
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x"]})
    batch = seal(
        Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=0, first=1, count=1,
        time_ms=5, chain_previous=0,
    )  # fmt: skip
    assert net.transport.send_slice("b", KEY, Append("a", 1, 1, 0), [batch, batch])
    [(kind, number, payload)] = net.output.frames
    append, data = unpack(payload, Append)
    assert (kind, number, append) == (FrameType.BATCH, 7, Append("a", 1, 1, 0))
    assert decode(data).encode() == batch.encode() and len(data) == 2 * ((batch.size + 7) & ~7)


async def test_a_full_buffer_refuses_and_tells_when_there_is_room(net: Net) -> None:
    sending = net.opened()
    net.output.blocked = True
    assert not net.transport.send_slice("b", KEY, Append("a", 1, 1, 0), [])
    net.output.blocked = False
    net.transport.on_writable(sending)
    net.transport.on_writable(sending)  # nobody waits any more
    assert net.host.told[1:] == [("writable", "b")] and net.output.frames == []


async def test_a_new_stream_ends_the_one_before(net: Net) -> None:
    first = net.opened(1, number=7)
    net.opened(2, number=9)
    net.transport.on_closed(first)  # late, and of no consequence
    assert net.host.told == [("follow", "b", 1), ("follower lost", "b", 1), ("follow", "b", 2)]
    assert not net.transport.send_slice("b", KEY, Append("a", 1, 1, 0), [])
    assert net.transport.send_slice("b", KEY, Append("a", 1, 2, 0), [])


async def test_a_closed_stream_is_told(net: Net) -> None:
    net.transport.on_closed(net.opened())
    assert net.host.told[-1] == ("follower lost", "b", 1)
    assert not net.transport.send_slice("b", KEY, Append("a", 1, 1, 0), [])


async def test_a_partition_that_is_not_here_is_refused(net: Net) -> None:
    net.transport.on_open(net.output, 7, OpenFollow(5, 5, encode(follow())))
    [(_, _, payload)] = net.output.frames
    assert unpack(payload, Followed)[0].refused
