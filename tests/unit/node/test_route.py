"""Requests for partitions of other nodes: sent on, answered by the partition, retried in bounds."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.harness import body, ids_of, tokens_of
from tests.unit.node.conftest import Cluster

from penstock.errors import SequenceConflict, Unavailable, WrongEpoch
from penstock.model.batch import Codec, compress
from penstock.model.ids import LeaseToken
from penstock.node import route
from penstock.node.calls import table
from penstock.wire.frame import FrameType
from penstock.wire.messages import Duplicate, Enqueue, Forwarded, Outcome, Part, pack


async def test_an_enqueue_reaches_the_node_that_serves_the_partition(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    rows = [{"payload": b"x%d" % i, "key": b"k%d" % i} for i in range(12)]
    answer = await cluster["a"].enqueue("jobs", rows)
    assert len(set(ids_of(answer))) == 12
    for name, index in (("a", 0), ("b", 1), ("c", 2)):
        placed = sum(p.count for p in answer.placed if p.partition == index)
        assert cluster[name].engine.topics["jobs"].here(index).heap.ready == placed > 0


async def test_bodies_are_written_as_they_came(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    rows = [{"payload": b"y" * 100} for _ in range(80)]
    raw = body(rows)
    packed = compress(Codec.ZSTD, raw)
    await cluster["a"].connection.enqueue(
        "jobs", [(0, 80, packed)], codec=int(Codec.ZSTD), raw_lengths=[len(raw)]
    )
    log = cluster["b"].engine.topics["jobs"].here(0).log
    (stored,) = [b for b in log.reader.scan(2) if b.entries == 80]
    assert bytes(stored.body) == packed


async def test_requests_of_one_turn_share_a_frame(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.topic("jobs", "bb")
    peer, sent = cluster.views["a"].peers["b"], []
    ask = peer.ask
    monkeypatch.setattr(peer, "ask", lambda type, *rest: (sent.append(type), ask(type, *rest))[1])
    puts = [cluster["a"].put("jobs", b"p%d" % i) for i in range(10)]
    ids = await asyncio.gather(*puts)
    assert len({i for some in ids for i in some}) == 10
    assert sent == [FrameType.BATCH]


async def test_a_refused_part_does_not_fail_its_neighbours(cluster: Cluster) -> None:
    await cluster.topic("jobs", "bb")
    rows = [{"payload": b"x"}]
    refused, written = await asyncio.gather(
        cluster["a"].enqueue("jobs", rows, partition=0, expected_sequence=99),
        cluster["a"].enqueue("jobs", rows, partition=1),
        return_exceptions=True,
    )
    assert isinstance(refused, SequenceConflict)
    assert not isinstance(written, BaseException)


async def test_duplicates_are_told_by_their_place_in_the_request(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    rows = [{"payload": b"%d" % i, "key": b"k%d" % i} for i in range(9)]
    first = await cluster["a"].enqueue("jobs", rows, producer=("p", 1, 1))
    again = await cluster["b"].enqueue("jobs", rows, producer=("p", 1, 1))
    assert not again.placed
    assert ids_of(again) == ids_of(first)


async def test_leases_are_settled_returned_and_extended_from_any_node(cluster: Cluster) -> None:
    await cluster.topic("jobs", "bc")
    for index in range(2):
        rows = [{"payload": b"%d" % i} for i in range(3)]
        await cluster["a"].enqueue("jobs", rows, partition=index)
    b, c = await cluster["b"].pop("jobs", 3), await cluster["c"].pop("jobs", 3)
    held = [*b, *c]
    assert await cluster["a"].extend("jobs", held, 60_000) == []
    assert await cluster["a"].nack("jobs", [held[0], held[3]], reject=True, reason="no") == []
    assert await cluster["a"].ack("jobs", held) == [0, 3]
    assert len(tokens_of(held)) == 6


async def test_nobody_serves_it_is_said_after_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "WAIT_S", 0.1)
    await cluster.topic("jobs", "-")
    with pytest.raises(Unavailable, match="nobody serves partition 0"):
        await cluster["a"].put("jobs", b"x")


async def test_a_request_waits_for_a_coordinator(cluster: Cluster) -> None:
    await cluster.topic("jobs", "--")
    to_peer = asyncio.create_task(cluster["a"].enqueue("jobs", [{"payload": b"1"}], partition=0))
    to_self = asyncio.create_task(cluster["a"].enqueue("jobs", [{"payload": b"2"}], partition=1))
    await asyncio.sleep(0)
    cluster.give("jobs", 0, "c")
    cluster.give("jobs", 1, "a")
    assert [p.partition for p in (await to_peer).placed] == [0]
    assert [p.partition for p in (await to_self).placed] == [1]


async def test_a_node_that_does_not_serve_it_says_who_does(cluster: Cluster) -> None:
    await cluster.topic("jobs", "c")
    content = body([{"payload": b"x"}])
    request = Enqueue("jobs", [Part(0, 1, len(content))], forwarded=True)
    peer = cluster.views["a"].peers["b"]
    answer: Forwarded = await peer.ask(FrameType.BATCH, Forwarded, pack(request), content)
    assert answer.outcomes[0].error is not None
    assert answer.outcomes[0].error["code"] == WrongEpoch.code
    assert answer.outcomes[0].error["coordinator"] == "c"


async def test_a_stale_view_is_looked_up_again(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    key = (cluster["a"].engine.topics["jobs"].config.id, 0)
    cluster.coordinators[key] = "c"  # it is not, yet
    put = asyncio.create_task(cluster["a"].put("jobs", b"x"))
    while not cluster.waiters:
        await asyncio.sleep(0)
    cluster.coordinators[key] = "b"
    assert len(await put) == 1


@pytest.mark.parametrize(
    "outcomes", [[], [Outcome(), Outcome()], [Outcome(duplicates=[Duplicate(9, 0, 1, 1)])]]
)
async def test_an_answer_that_does_not_fit_leaves_the_outcome_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome]
) -> None:
    await cluster.topic("jobs", "b")

    def ask(*_: object) -> asyncio.Future[Forwarded]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(Forwarded(outcomes))
        return answer

    monkeypatch.setattr(cluster.views["a"].peers["b"], "ask", ask)
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match="does not fit"):
            await cluster["a"].put("jobs", b"x")


async def test_a_lost_connection_leaves_the_outcome_open(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    put = asyncio.create_task(
        cluster["a"].enqueue("jobs", [{"payload": b"x"}], producer=("p", 1, 1))
    )
    while not cluster.views["a"].peers["b"]._waiting:
        await asyncio.sleep(0)
    cluster.cut("a", "b")
    with pytest.raises(Unavailable):
        await put
    await cluster.connect("a", "b")
    await cluster["a"].enqueue("jobs", [{"payload": b"x"}], producer=("p", 1, 1))
    assert cluster["b"].engine.topics["jobs"].here(0).heap.ready == 1


async def made_again(cluster: Cluster) -> list[LeaseToken]:
    """A topic whose partition b serves, deleted and made again: the token of a lease of each."""
    tokens = []
    for payload in (b"old", b"new"):
        await cluster.topic("jobs", "b")
        await cluster["b"].enqueue("jobs", [{"payload": payload}], partition=0)
        tokens += tokens_of(await cluster["b"].pop("jobs"))
        if payload == b"old":
            for node in cluster.nodes.values():
                await node.forced("topic_delete", "jobs")
    return tokens


async def test_a_forwarded_token_of_a_deleted_topic_settles_nothing(cluster: Cluster) -> None:
    """Before, the node between sent the sequence on, and the successor's message was done."""
    old, new = await made_again(cluster)
    connection = cluster["a"].connection
    assert await connection.settle("jobs", [old]) == [0]
    assert await connection.give_back("jobs", [old], reject=True) == [0]
    assert await connection.extend("jobs", [old], 1000) == [0]
    assert await connection.settle("jobs", [old, new]) == [0]


async def test_a_node_that_knows_another_topic_of_the_name_is_not_taken_for_the_coordinator(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a has not heard that the topic was made again. Before, what it sent on, and its share of
    a call, reached the successor at b."""
    monkeypatch.setattr(route, "WAIT_S", 0.1)
    monkeypatch.setattr(table, "WAIT_S", 0.1)
    await cluster.topic("jobs", "b")
    await cluster["b"].forced("topic_delete", "jobs")
    await cluster["b"].topic("jobs")
    await cluster["b"].put("jobs", b"new")
    with pytest.raises(Unavailable):
        await cluster["a"].enqueue("jobs", [{"payload": b"old"}], partition=0)
    with pytest.raises(Unavailable):
        await cluster["a"].forced("purge", "jobs")
    assert await cluster["b"].counts() == (1, 0, 0, 0)
    (new,) = tokens_of(await cluster["b"].pop("jobs"))
    with pytest.raises(Unavailable, match="made again") as behind:
        await cluster["a"].connection.settle("jobs", [new])
    assert behind.value.details["elsewhere"]
    assert await cluster["b"].connection.settle("jobs", [new]) == []
