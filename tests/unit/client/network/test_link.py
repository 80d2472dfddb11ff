"""A client of several nodes: scripted peers on sockets that share one queue."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import penstock
from penstock.client.client import Client
from penstock.client.network import link
from penstock.client.network.endpoints import open_connection
from penstock.client.options import Options
from penstock.errors import Backpressure, Unavailable, WrongEpoch
from penstock.model.ids import MessageId, partition_of
from penstock.wire.frame import FrameType

QUICK = Options(retry_wait_s=0.01, retry_wait_s_max=0.05, retry_s=60)


class Peers:
    """Nodes n1, n2, …; partition i is coordinated by the (i mod nodes)-th."""

    def __init__(self, broker: Any, session: Callable[..., asyncio.Protocol]) -> None:
        self.broker, self._session = broker, session
        self.servers: dict[str, asyncio.Server] = {}
        self.ports: dict[str, int] = {}
        broker.partitions = 6

    async def start(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(1, count + 1):
            node = f"n{number}"

            def made(node: str = node) -> asyncio.Protocol:
                return self._session(self.broker, node=node, cluster="c")

            self.servers[node] = await loop.create_server(made, "127.0.0.1", 0)
            self.ports[node] = self.servers[node].sockets[0].getsockname()[1]
        self.route()

    def route(self) -> None:
        """The survivors share the partitions."""
        alive = sorted(self.servers)
        nodes = [{"id": n, "host": "127.0.0.1", "port": self.ports[n]} for n in alive]
        owners = [alive[p % len(alive)] for p in range(self.broker.partitions)]
        self.broker.results["routes"] = {"cluster": "c", "nodes": nodes, "coordinators": owners}

    def owner(self, partition: int) -> str:
        found: str = self.broker.results["routes"]["coordinators"][partition]
        return found

    def kill(self, node: str) -> None:
        self.servers.pop(node).close()
        for session in list(self.broker.sessions):
            if session.node == node:
                session.transport.abort()
        if self.servers:
            self.route()

    def url(self, *nodes: str) -> str:
        chosen = nodes or tuple(self.ports)
        return "penstock://" + ",".join(f"127.0.0.1:{self.ports[n]}" for n in chosen)


@pytest.fixture
async def peers(broker: Any, session_type: Any) -> AsyncIterator[Peers]:
    made = Peers(broker, session_type)
    await made.start(3)
    yield made
    for node in list(made.servers):
        made.kill(node)


@asynccontextmanager
async def routed(
    peers: Peers, *nodes: str, options: penstock.Options = QUICK
) -> AsyncIterator[tuple[Client, Any]]:
    """A client that has learned the routes of its topic and has dialled every node."""
    async with penstock.connect(peers.url(*nodes), options=options) as client:
        topic = await client.topic("t")
        for partition in range(6):
            async with asyncio.timeout(60):
                while not _arrived(client, partition, peers.owner(partition)):
                    await asyncio.sleep(0.005)
        yield client, topic


def _arrived(client: Client, partition: int, node: str) -> bool:
    found = client.link.toward("t", partition)
    return found is not None and found.welcome.node == node


def key_of(partition: int) -> bytes:
    return next(k for i in range(1000) if partition_of(k := b"%d" % i, 6) == partition)


async def test_each_put_goes_to_the_node_that_coordinates_its_partition(peers: Peers) -> None:
    async with routed(peers, "n1") as (_, topic):
        keys = [key_of(partition) for partition in range(6)]
        ids = await asyncio.gather(*(topic.put(b"x", key=key) for key in keys))
    assert [MessageId.parse(i).partition for i in ids] == list(range(6))
    sent = {
        node: [part.partition for part in request.parts]
        for (request, _), node in zip(peers.broker.requests, peers.broker.takers, strict=True)
    }
    assert sent == {"n1": [0, 3], "n2": [1, 4], "n3": [2, 5]}


async def test_an_atomic_batch_is_one_request_and_others_are_parted(peers: Peers) -> None:
    async with routed(peers) as (_, topic):
        items = [penstock.Item(b"x", key=key_of(partition)) for partition in (5, 1, 0, 4)]
        whole = await topic.put_many(items)
        assert len(peers.broker.requests) == 1
        parted = await topic.put_many(items, atomic=False)
        assert sorted(peers.broker.takers[1:]) == ["n1", "n2", "n3"]
    for ids in (whole, parted):
        assert [MessageId.parse(i).partition for i in ids] == [5, 1, 0, 4]


async def test_acknowledgements_go_to_the_coordinator_of_the_lease(peers: Peers) -> None:
    async with routed(peers) as (_, topic):
        await topic.put(b"x", key=key_of(4))
        async for message in topic.consume():
            await message.ack()
            break
    assert peers.broker.settlers == ["n2"] and len(peers.broker.acked) == 1


async def test_a_killed_coordinator_costs_neither_a_message_nor_a_second_one(peers: Peers) -> None:
    async with routed(peers) as (_, topic):
        peers.broker.hold = asyncio.Event()
        puts = [asyncio.ensure_future(topic.put(b"%d" % i, key=key_of(2))) for i in range(5)]
        while not peers.broker.requests:
            await asyncio.sleep(0)
        peers.kill("n3")  # it took them in, and nobody heard of it
        peers.broker.hold.set()
        ids = await asyncio.gather(*puts)
    assert len(set(ids)) == 5 and len(peers.broker.ready) == 5
    assert peers.broker.takers[0] == "n3" and peers.broker.takers[-1] != "n3"
    assert len({body for _, body in peers.broker.requests}) == 1


async def test_the_client_of_one_node_learns_the_others_and_goes_on_there(peers: Peers) -> None:
    async with routed(peers, "n1") as (client, topic):
        consumer = topic.consume()
        await topic.put(b"a")
        await (await anext(consumer)).ack()
        peers.kill("n1")
        await topic.put(b"b")
        async with asyncio.timeout(60):
            message = await anext(consumer)
        assert message.value == b"b"
        assert client.link.live is not None and client.link.live.welcome.node != "n1"
        await consumer.aclose()


async def test_puts_without_a_key_keep_away_from_a_partition_that_nobody_serves(
    peers: Peers,
) -> None:
    async with routed(peers, options=penstock.Options(stay_s=0)) as (client, topic):
        peers.broker.results["routes"]["coordinators"][:3] = ["", "", ""]
        while client.link.coordinator("t", 0) != "":
            client.link.toward("t", 0)
            await client.link.request(_fail_once(), at=("t", 0))
        ids = [await topic.put(b"x") for _ in range(9)]
    assert {MessageId.parse(i).partition for i in ids} == {3, 4, 5}


async def test_few_puts_without_a_key_stay_together_for_a_moment(peers: Peers) -> None:
    options = penstock.Options(stay_s=60.0, stay_entries=4)
    async with routed(peers, options=options) as (_, topic):
        ids = [await topic.put(b"x") for _ in range(12)]
        keyed = await topic.put(b"x", key=key_of(5))
    found = [MessageId.parse(i).partition for i in ids]
    first = found[0]
    assert found == [(first + at // 4) % 6 for at in range(12)]
    assert MessageId.parse(keyed).partition == 5


async def test_a_partition_in_trouble_is_left_at_once(peers: Peers) -> None:
    async with routed(peers, options=penstock.Options(stay_s=60.0)) as (client, topic):
        first = MessageId.parse(await topic.put(b"x")).partition
        peers.broker.results["routes"]["coordinators"][first] = ""
        while client.link.coordinator("t", first) != "":
            client.link.toward("t", first)
            await client.link.request(_fail_once(), at=("t", first))
        assert MessageId.parse(await topic.put(b"x")).partition == (first + 1) % 6


def _fail_once() -> Callable[[Any], Any]:
    errors = [Unavailable("moved")]

    async def act(_: Any) -> None:
        if errors:
            raise errors.pop()

    return act


async def test_a_stale_epoch_is_tried_again(peers: Peers) -> None:
    async with routed(peers) as (_, topic):
        peers.broker.refusals = [WrongEpoch("moved", coordinator="n2")]
        await topic.put(b"x")
    assert len(peers.broker.requests) == 2 and len(peers.broker.ready) == 1


async def test_the_first_node_that_answers_is_enough(peers: Peers) -> None:
    peers.kill("n1")
    peers.kill("n2")
    urls = [peers.url(node) for node in ("n1", "n2", "n3")]
    async with penstock.connect(urls, options=QUICK) as client:
        assert client.link.live is not None and client.link.live.welcome.node == "n3"


async def test_a_node_that_is_leaving_is_left(peers: Peers) -> None:
    async with routed(peers, "n1") as (client, topic):
        peers.broker.refusals = [Unavailable("the node is stopping", elsewhere=True)] * 2
        await topic.put(b"x", key=key_of(0))
        await client.call("stats")
        assert client.link.live is not None and client.link.live.welcome.node != "n1"


IMPATIENT = Options(retry_wait_s=0.01, retry_wait_s_max=0.05, retry_s=60, attempt_s=0.1)


async def test_a_node_that_answers_nothing_is_left(peers: Peers) -> None:
    async with routed(peers, "n1", options=IMPATIENT) as (client, topic):
        peers.broker.mute = {"n1"}  # cut off from the others, and not from us
        put = asyncio.ensure_future(topic.put(b"x", key=key_of(0)))
        peers.broker.results["routes"]["coordinators"] = ["n2"] * 6
        async with asyncio.timeout(60):
            await put
            await client.call("stats")
        assert client.link.live is not None and client.link.live.welcome.node != "n1"
    assert len(peers.broker.ready) == 1


async def test_a_put_that_is_answered_late_is_written_once(peers: Peers) -> None:
    async with routed(peers, options=IMPATIENT) as (_, topic):
        peers.broker.hold = asyncio.Event()
        put = asyncio.ensure_future(topic.put(b"x", key=key_of(1)))
        while len(peers.broker.requests) < 2:
            await asyncio.sleep(0.005)
        peers.broker.hold.set()
        await put
    assert len(peers.broker.ready) == 1
    assert len({body for _, body in peers.broker.requests}) == 1


async def test_a_pop_without_an_answer_is_not_repeated(peers: Peers) -> None:
    async with routed(peers, options=IMPATIENT) as (client, topic):
        home = client.link.live
        assert home is not None
        peers.broker.mute = {home.welcome.node}
        with pytest.raises(Unavailable, match="no answer within"):
            await topic.pop()
        assert client.link.live is not home


async def test_a_node_that_fails_again_and_again_is_left(peers: Peers) -> None:
    async with routed(peers, "n1", options=QUICK) as (client, _):
        left = client.link.live
        peers.broker.unwell = {"n1": Unavailable("no majority is here")}
        async with asyncio.timeout(60):
            await client.call("stats")
        assert client.link.live is not None and client.link.live.welcome.node != "n1"
        assert left is not None
        await left.wait_closed()  # nothing was under way there
    assert [call.method for call in peers.broker.calls].count("stats") == 4


async def test_a_node_that_was_left_is_hung_up_on_after_its_last_stream(peers: Peers) -> None:
    async with routed(peers, "n1") as (client, topic):
        left, consumer = client.link.live, topic.consume()
        await topic.put(b"x")
        await (await anext(consumer)).ack()
        peers.broker.unwell = {"n1": Unavailable("no majority is here")}
        async with asyncio.timeout(60):
            await client.call("stats")
            assert left is not None and left.alive and client.link.live is not left
            await consumer.aclose()
            await left.wait_closed()


async def test_a_node_that_asks_for_patience_is_not_left(peers: Peers) -> None:
    async with routed(peers, "n1") as (client, _):
        home = client.link.live
        peers.broker.unwell = {"n1": Backpressure("it is being filled", retry_after_s=0.001)}
        search = asyncio.ensure_future(client.call("vector_search"))
        async with asyncio.timeout(60):
            while [call.method for call in peers.broker.calls].count("vector_search") < 5:
                await asyncio.sleep(0.001)
            peers.broker.unwell.clear()
            await search
        assert home is not None and client.link.live is home


async def test_a_consumer_leaves_a_node_that_sends_it_away(peers: Peers) -> None:
    async with routed(peers, "n1") as (client, topic):
        async with topic.consume() as messages:
            waiting = asyncio.ensure_future(anext(messages))
            while not (streams := [s for s in peers.broker.sessions if s.stream]):
                await asyncio.sleep(0)
            error = Unavailable("the others are out of reach", elsewhere=True)
            streams[0].send(FrameType.UNSUBSCRIBE, streams[0].stream[0], error.to_wire())
            streams[0].stream = None
            await topic.put(b"x")
            async with asyncio.timeout(60), await waiting as message:
                assert message.value == b"x"
        assert client.link.live is not None and client.link.live.welcome.node != "n1"


async def test_the_next_home_is_one_that_was_not_tried_yet(peers: Peers) -> None:
    error = Unavailable("the others are out of reach", elsewhere=True)
    async with routed(peers) as (client, _):
        homes = []
        for _ in range(3):
            assert client.link.live is not None
            homes.append(client.link.live.welcome.node)
            peers.broker.unwell = {homes[-1]: error}
            await client.call("stats")
    assert sorted(homes) == ["n1", "n2", "n3"]


async def test_a_connection_goes_past_nodes_that_do_not_serve(peers: Peers) -> None:
    peers.kill("n1")
    connection = await open_connection(peers.url())
    assert connection.welcome.node == "n2"
    await connection.close()
    peers.broker.results["routes"] = Unavailable("the node is starting", elsewhere=True)
    with pytest.raises(Unavailable, match="starting"):
        await open_connection(peers.url())


async def test_partitions_that_a_topic_is_given_are_used_by_open_clients(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ROUTES_S", 0.02)
    async with routed(peers) as (_, topic):
        key = next(k for i in range(1000) if partition_of(k := b"%d" % i, 9) > 5)
        assert MessageId.parse(await topic.put(b"x", key=key)).partition < 6
        peers.broker.partitions = 9
        peers.route()
        async with asyncio.timeout(60):
            while MessageId.parse(await topic.put(b"x", key=key)).partition < 6:
                await asyncio.sleep(0.005)
        assert topic.config.partitions == 9
        found = {MessageId.parse(await topic.put(b"x")).partition for _ in range(9 * 100)}
    assert found == set(range(9))
