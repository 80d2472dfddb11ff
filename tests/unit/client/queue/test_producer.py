import asyncio
from typing import Any

import msgspec
import pytest

import penstock
from penstock.client.client import Client
from penstock.client.queue.entries import ProducerIdentity
from penstock.errors import (
    Backpressure,
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    StaleProducer,
    Unavailable,
)
from penstock.model.ids import MessageId, partition_of
from penstock.wire.frame import FrameType
from penstock.wire.messages import SlowDown


async def test_a_put_returns_the_id_of_the_durable_message(client: Client) -> None:
    topic = client.topic("t")
    assert MessageId.parse(await topic.put(b"x")).sequence == 1
    assert MessageId.parse(await topic.put(b"y")) == (1_700_000_000_000, 7, 0, 2)


async def test_puts_of_one_turn_share_a_request(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    ids = await asyncio.gather(*(topic.put(b"%d" % i, priority=i) for i in range(100)))
    assert len(broker.requests) == 1
    assert [MessageId.parse(i).sequence for i in ids] == list(range(1, 101))
    assert [fields["priority"] for *_, fields in broker.ready] == list(range(100))


async def test_puts_gather_while_the_allowed_requests_are_in_flight(
    make_client: Any, broker: Any
) -> None:
    broker.hold = asyncio.Event()
    async with make_client(requests_max=1) as client:
        topic = await client.topic("t")
        first = asyncio.ensure_future(topic.put(b"a"))
        while not broker.requests:
            await asyncio.sleep(0)
        rest = [asyncio.ensure_future(topic.put(b"b")) for _ in range(50)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(broker.requests) == 1
        broker.hold.set()
        await asyncio.gather(first, *rest)
    assert [request.parts[0].count for request, _ in broker.requests] == [1, 50]


async def test_a_retry_after_a_lost_connection_repeats_the_same_bytes(
    client: Client, broker: Any
) -> None:
    topic = await client.topic("t")
    broker.drops = 2
    ids = await asyncio.gather(*(topic.put(b"%d" % i) for i in range(3)))
    assert [MessageId.parse(i).sequence for i in ids] == [1, 2, 3]
    assert len(broker.ready) == 3  # taken in once
    assert len(broker.requests) == 3
    assert len({body for _, body in broker.requests}) == 1
    assert [MessageId.parse(i).sequence for i in await topic.put_many([b"x"])] == [4]


async def test_put_many_is_retried_with_the_same_key(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    broker.drops = 1
    assert len(await topic.put_many([b"a", b"b"])) == 2
    assert len(broker.ready) == 2 and len(broker.requests) == 2


@pytest.mark.parametrize("error", [Backpressure("full", retry_after_s=0.001), Unavailable("down")])
async def test_retryable_refusals_are_retried(client: Client, broker: Any, error: Any) -> None:
    topic = await client.topic("t")
    broker.refusals = [error, error]
    await topic.put(b"x")
    assert len(broker.requests) == 3 and len(broker.ready) == 1


@pytest.mark.parametrize("error", [FailedPrecondition("no"), StaleProducer("old")])
async def test_other_refusals_are_raised_at_once(client: Client, broker: Any, error: Any) -> None:
    topic = await client.topic("t")
    broker.refusals = [error, error]
    with pytest.raises(type(error)):
        await topic.put(b"x")
    with pytest.raises(type(error)):
        await topic.put_many([b"x"])
    assert len(broker.requests) == 2


async def test_retries_end_after_their_time(make_client: Any, broker: Any) -> None:
    async with make_client(retry_s=0.05) as client:
        topic = await client.topic("t")
        broker.refusals = [Unavailable("down")] * 1000
        with pytest.raises(Unavailable):
            await topic.put(b"x")


@pytest.mark.parametrize("taken", [True, False])
async def test_a_put_that_may_have_been_taken_is_not_called_unsent(
    make_client: Any, broker: Any, taken: bool
) -> None:
    """Before, the error of the last try spoke for all of them: no node was reached any more."""
    async with make_client(retry_s=0.05) as client:
        topic = await client.topic("t")
        broker.greeting = Unavailable("the node starts")
        if taken:
            broker.drops = 1
        else:
            broker.sessions[0].transport.abort()
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable) as failed:
            await topic.put(b"x")
        assert failed.value.details.get("sent") is (None if taken else False)
        assert len(broker.requests) == taken


async def test_a_refused_entry_does_not_fail_the_others(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    broker.refusals = [InvalidArgument("bad", field="payload")] * 2
    done = await asyncio.gather(*(topic.put(b"x") for _ in range(4)), return_exceptions=True)
    assert [type(one) for one in done] == [InvalidArgument, str, str, str]
    assert len(broker.ready) == 3


async def test_what_was_written_of_a_refused_request_is_not_written_again(
    client: Client, broker: Any
) -> None:
    broker.partitions = 3
    topic = await client.topic("t")
    broker.half_refusals = [InvalidArgument("bad", field="payload")]
    ids = await asyncio.gather(*(topic.put(b"%d" % i, key=b"%d" % i) for i in range(30)))
    assert len(broker.requests) == 31
    assert len(set(ids)) == len(broker.ready) == 30
    assert sorted(fields["payload"] for *_, fields in broker.ready) == sorted(
        b"%d" % i for i in range(30)
    )


async def test_a_refused_entry_is_found_after_a_retry_too(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    broker.refusals = [Unavailable("moved"), *[InvalidArgument("bad", field="payload")] * 2]
    done = await asyncio.gather(*(topic.put(b"x") for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in done] == [InvalidArgument, str, str]


async def test_what_the_node_would_refuse_is_refused_here(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    for field, arguments in {
        "payload": {"value": bytes(2 << 20)},
        "key": {"key": "k" * 2000},
        "headers": {"headers": {"h": "x" * 20_000}},
        "delay": {"delay": -1},
        "max_retries": {"max_retries": 5000},
        "priority": {"priority": 1 << 63},
        "value": {"value": "text"},
    }.items():
        with pytest.raises(InvalidArgument) as caught:
            await topic.put(**{"value": b"x", **arguments})
        assert caught.value.field == field
    assert broker.requests == []


async def test_every_attribute_of_an_entry_travels(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    plain = topic.put(b"a")
    await asyncio.gather(
        plain, topic.put(b"b", priority=-4, key="k", delay=1.5, headers={"h": 1}, max_retries=9)
    )
    first, second = (fields for *_, fields in broker.ready)
    assert (first["priority"], first["key"], first["delay_ms"], first["max_retries"]) == (
        0, b"", 0, -1,
    )  # fmt: skip
    assert (second["priority"], second["key"], second["delay_ms"]) == (-4, b"k", 1500)
    assert second["max_retries"] == 9 and second["headers"] == b"\x81\xa1h\x01"


async def test_keys_decide_partitions_and_ids_keep_their_order(client: Client, broker: Any) -> None:
    broker.partitions = 4
    topic = await client.topic("t")
    keys = [b"k%d" % i for i in range(40)]
    ids = await topic.put_many([penstock.Item(key, key=key) for key in keys])
    (request, _) = broker.requests[0]
    assert request.atomic and len(request.parts) == 4
    assert [MessageId.parse(i).partition for i in ids] == [partition_of(k, 4) for k in keys]
    assert {(p, f["key"]) for p, _, f in broker.ready} == {(partition_of(k, 4), k) for k in keys}


async def test_batches_without_keys_take_turns_over_partitions(client: Client, broker: Any) -> None:
    broker.partitions = 3
    topic = await client.topic("t")
    for _ in range(6):
        await topic.put_many([b"a", b"b"], atomic=False)
    assert sorted(r.parts[0].partition for r, _ in broker.requests) == [0, 0, 1, 1, 2, 2]
    assert all(len(request.parts) == 1 for request, _ in broker.requests)


def test_a_producers_sequences_are_gapless_in_each_partition() -> None:
    identity = ProducerIdentity("p", 5)
    assert [identity.take(0, 3), identity.take(1, 2), identity.take(0, 1)] == [1, 1, 4]
    assert identity.run(1, 1, 2)["run_producer"] == (b"p.1",)


async def test_a_lasting_name_that_is_soon_forgotten_holds_up_nobody(
    make_client: Any, broker: Any
) -> None:
    async with make_client(producer="p") as client, asyncio.timeout(30):
        topic = await client.topic("t")
        producer = await topic.open_producer()
        producer.config = msgspec.structs.replace(producer.config, dedup_ms=0)
        await topic.put(b"x")
        await topic.put_many([b"y"])
    assert len(broker.ready) == 2


async def test_large_batches_are_split_unless_atomic(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    ids = await topic.put_many([b"x"] * 10_001, atomic=False)
    assert len(set(ids)) == 10_001 and len(broker.requests) == 2
    with pytest.raises(InvalidArgument):
        await topic.put_many([b"x"] * 10_001)
    assert await topic.put_many([]) == []


async def test_puts_wait_at_the_bound_and_the_count_returns_to_zero(
    make_client: Any, broker: Any
) -> None:
    broker.hold = asyncio.Event()
    async with make_client(inflight_entries_max=10, batch_entries_max=4) as client:
        topic = await client.topic("t")
        puts = [asyncio.ensure_future(topic.put(b"x")) for _ in range(25)]
        for _ in range(10):
            await asyncio.sleep(0)
        producer = await topic.open_producer()
        assert producer.inflight_entries == 10
        broker.hold.set()
        await asyncio.gather(*puts)
        assert (producer.inflight_entries, producer.inflight_bytes) == (0, 0)


async def test_leaving_the_client_drains_puts_nobody_awaited(make_client: Any, broker: Any) -> None:
    async with make_client() as client:
        topic = await client.topic("t")
        puts = [asyncio.ensure_future(topic.put(b"x")) for _ in range(10)]
        await asyncio.sleep(0)
    assert len(broker.ready) == 10
    assert all([isinstance(await put, str) for put in puts])


async def test_a_cancelled_put_leaves_the_others_alone(client: Client, broker: Any) -> None:
    broker.hold = asyncio.Event()
    topic = await client.topic("t")
    puts = [asyncio.ensure_future(topic.put(b"x")) for _ in range(3)]
    while not broker.requests:
        await asyncio.sleep(0)
    puts[1].cancel()
    broker.hold.set()
    done = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(one) for one in done] == [str, asyncio.CancelledError, str]


async def test_what_cannot_be_drained_in_time_fails_instead_of_hanging(
    make_client: Any, broker: Any
) -> None:
    broker.hold = asyncio.Event()
    async with make_client(drain_s=0.05, requests_max=1) as client:
        topic = await client.topic("t")
        puts = [asyncio.ensure_future(topic.put(b"x"))]
        while not broker.requests:
            await asyncio.sleep(0)
        puts.append(asyncio.ensure_future(topic.put(b"y")))
        await asyncio.sleep(0)
    done = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(one, PenstockError) for one in done)


async def test_a_topic_that_is_to_slow_down_is_put_to_later(client: Client, broker: Any) -> None:
    slow, other = client.topic("slow", str), client.topic("other", str)
    await slow.opened()
    broker.sessions[0].send(FrameType.BACKPRESSURE, 0, SlowDown(300, "full", "slow"))
    await other.put("a")  # once it is answered, the word has come
    began = asyncio.get_running_loop().time()
    both = asyncio.gather(slow.put("b"), slow.put_many(["c"]))
    await other.put("d")
    assert [request.topic for request, _ in broker.requests] == ["other", "other"]
    await both
    assert asyncio.get_running_loop().time() - began > 0.2
    assert sorted(request.topic for request, _ in broker.requests[2:]) == ["slow", "slow"]
