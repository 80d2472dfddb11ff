import asyncio
from typing import Any

import pytest

from penstock.client.client import Client
from penstock.errors import InvalidArgument, LeaseLost
from penstock.model.ids import partition_of


async def filled(client: Client, count: int) -> Any:
    topic = await client.topic("t")
    await topic.put_many([b"%d" % i for i in range(count)])
    return topic


async def test_leaving_a_message_acknowledges_it(client: Client, broker: Any) -> None:
    topic = await filled(client, 3)
    seen = []
    async for message in topic.consume():
        async with message:
            seen.append(message.value)
        if len(seen) == 3:
            break
    assert seen == [b"0", b"1", b"2"] and len(broker.acked) == 3


async def test_an_error_gives_the_message_back_with_its_reason(client: Client, broker: Any) -> None:
    topic = await filled(client, 1)
    async with topic.consume() as messages:
        message = await anext(messages)
        with pytest.raises(ZeroDivisionError):
            async with message:
                raise ZeroDivisionError("oh")
    assert not broker.acked
    assert [(r.counted, r.reject, r.reason) for r in broker.returned] == [
        (True, False, "ZeroDivisionError: oh")
    ]


async def test_cancellation_gives_the_message_back_uncounted(client: Client, broker: Any) -> None:
    topic = await filled(client, 1)

    async def work() -> None:
        async for message in topic.consume():
            async with message:
                await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    while not broker.leases:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [r.counted for r in broker.returned] == [False]


async def test_a_message_can_be_settled_by_hand_once(client: Client, broker: Any) -> None:
    topic = await filled(client, 4)
    async with topic.consume(concurrency=4) as messages:
        a, b, c, d = [await anext(messages) for _ in range(4)]
        await a.ack()
        await b.nack(delay=2, reason="later")
        await c.reject("bad")
        async with d:
            await d.extend(60)
            await d.ack()
        with pytest.raises(LeaseLost):
            await a.ack()
    assert len(broker.acked) == 2
    assert [(r.delay_ms, r.reject, r.reason) for r in broker.returned] == [
        (2000, False, "later"), (None, True, "bad"),
    ]  # fmt: skip
    assert broker.extended[0].extend_ms == 60_000


async def test_no_more_than_the_concurrency_is_handed_out(client: Client, broker: Any) -> None:
    topic = await filled(client, 10)
    async with topic.consume(concurrency=2, prefetch=1) as messages:
        held = [await anext(messages), await anext(messages)]
        third = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.01)
        assert not third.done() and len(broker.leases) == 3
        await held[0].ack()
        assert (await third).value == b"2"
        await held[1].ack()
        await third.result().ack()


async def test_stopping_gives_the_prefetched_back_uncounted(client: Client, broker: Any) -> None:
    topic = await filled(client, 10)
    async for message in topic.consume(prefetch=5):
        async with message:
            break
    for _ in range(100):
        await asyncio.sleep(0)
    assert not broker.leases and len(broker.acked) == 1
    (back,) = broker.returned
    assert not back.counted and back.delay_ms == 0 and back.parts[0].count >= 5


async def test_leases_are_extended_while_held_and_while_they_wait(
    client: Client, broker: Any
) -> None:
    topic = await filled(client, 3)
    async with topic.consume(visibility=0.06, prefetch=2) as messages, await anext(messages):
        while len(broker.extended) < 3:
            await asyncio.sleep(0.01)
    assert [sum(p.count for p in e.parts) for e in broker.extended[:3]] == [3, 3, 3]
    assert broker.extended[0].extend_ms == 60


async def test_a_lease_lost_while_held_is_told_on_exit(client: Client, broker: Any) -> None:
    topic = await filled(client, 1)
    async with topic.consume(visibility=0.03) as messages:
        message = await anext(messages)
        broker.leases.clear()
        while message.held:
            await asyncio.sleep(0.005)
        with pytest.raises(LeaseLost):
            async with message:
                pass
    assert broker.settles == []


async def test_a_prefetched_message_whose_lease_was_lost_is_skipped(
    client: Client, broker: Any
) -> None:
    topic = await filled(client, 3)
    async with topic.consume(visibility=0.03, prefetch=2) as messages:
        first = await anext(messages)
        lost = sorted(broker.leases)[1]
        broker.leases.pop(lost)
        while len(broker.extended) < 2:
            await asyncio.sleep(0.005)
        await first.ack()
        assert (await anext(messages)).value == b"2"


async def test_acknowledgements_of_one_turn_share_a_request(client: Client, broker: Any) -> None:
    topic = await filled(client, 20)
    async with topic.consume(concurrency=20) as messages:
        held = [await anext(messages) for _ in range(20)]
        await asyncio.gather(*(message.ack() for message in held))
    assert broker.settles == [20]


async def test_a_consumer_goes_on_after_a_lost_connection(client: Client, broker: Any) -> None:
    topic = await filled(client, 4)
    async with topic.consume() as messages:
        first = await anext(messages)
        broker.sessions[0].transport.abort()
        await asyncio.sleep(0.01)
        await first.ack()  # on the new connection: a token outlives the one it came by
        for expected in (b"1", b"2", b"3"):
            async with await anext(messages) as message:
                assert message.value == expected
    assert len(broker.acked) == 4


async def test_batches_are_settled_as_a_whole(client: Client, broker: Any) -> None:
    topic = await filled(client, 250)
    sizes = []
    async for batch in topic.consume_batches(100):
        assert batch.payloads == [message.payload for message in batch]
        assert batch.values[0] == batch[0].value
        sizes.append(len(batch))
        await batch.ack()
        if sum(sizes) == 250:
            break
    assert len(broker.acked) == 250 and max(sizes) == 100
    assert broker.settles == sizes


async def test_rows_settled_alone_are_left_out_of_the_batch(client: Client, broker: Any) -> None:
    topic = await filled(client, 5)
    async with topic.consume_batches(5) as batches, await anext(batches) as batch:
        await batch[1].reject("bad")
        await batch[-1].nack()
    assert broker.settles == [3] and len(broker.returned) == 2


async def test_a_batch_with_an_error_goes_back(client: Client, broker: Any) -> None:
    topic = await filled(client, 5)
    async with topic.consume_batches(5) as batches:
        batch = await anext(batches)
        with pytest.raises(KeyError):
            async with batch:
                raise KeyError("x")
    assert [r.parts[0].count for r in broker.returned] == [5] and not broker.acked


async def test_bounds_of_a_consumer_are_checked(client: Client) -> None:
    topic = await client.topic("t")
    for field, arguments in {
        "concurrency": {"concurrency": 0},
        "prefetch": {"prefetch": -1},
    }.items():
        with pytest.raises(InvalidArgument) as caught:
            topic.consume(**arguments)
        assert caught.value.field == field


async def test_the_client_gives_back_what_its_consumers_prefetched(
    make_client: Any, broker: Any
) -> None:
    async with make_client() as client:
        topic = await filled(client, 5)
        messages = topic.consume(prefetch=3)
        await (await anext(messages)).ack()
    assert not broker.leases


async def test_the_credit_is_never_exceeded(client: Client, broker: Any) -> None:
    topic = await filled(client, 60)
    peak = seen = 0
    async for message in topic.consume(concurrency=1, prefetch=2):
        async with message:
            peak = max(peak, len(broker.leases))
            seen += 1
        if seen == 60:
            break
    assert peak <= 3


async def test_workers_may_share_a_consumer(client: Client, broker: Any) -> None:
    topic = await filled(client, 40)
    seen: list[bytes] = []

    async def work(messages: Any) -> None:
        async for message in messages:
            async with message:
                seen.append(message.value)
            if len(seen) == 40:
                await messages.aclose()

    async with topic.consume(concurrency=4) as messages:
        await asyncio.gather(*(work(messages) for _ in range(4)))
    assert sorted(seen, key=int) == [b"%d" % i for i in range(40)]


async def test_a_tick_takes_nothing_from_one_who_waits(client: Client, broker: Any) -> None:
    topic = await client.topic("t")
    async with topic.consume() as messages:
        waiting = asyncio.ensure_future(anext(messages))
        while not broker.sessions[0].stream:
            await asyncio.sleep(0)
        await topic.put(b"x")
        messages._absorb()  # as a keeper does, between arrival and the waiter's turn
        async with asyncio.timeout(60), await waiting as message:
            assert message.value == b"x"


async def test_a_message_may_come_again_while_its_lost_lease_still_waits(
    client: Client, broker: Any
) -> None:
    topic = await filled(client, 3)
    async with topic.consume(concurrency=1, prefetch=5) as messages:
        first = await anext(messages)
        broker.ready += [item for item, *_ in broker.leases.values()]
        broker.leases.clear()
        broker.sessions[0].deliver()
        await client.call("echo")
        with pytest.raises(LeaseLost):
            await first.ack()
        assert [(await anext(messages)).value] == [b"0"]


def key_of(partition: int, partitions: int) -> bytes:
    return next(k for i in range(99) if partition_of(k := b"%d" % i, partitions) == partition)


def holding(topic: Any, partition: int) -> Any:
    """A message of a certain partition."""
    return topic.put(b"%d" % partition, key=key_of(partition, 2))


async def test_leases_are_kept_while_another_partition_is_out_of_reach(
    client: Client, broker: Any
) -> None:
    broker.partitions, broker.unreached = 2, {1}
    topic = await client.topic("t")
    await asyncio.gather(holding(topic, 0), holding(topic, 1))
    async with topic.consume(visibility=0.06, concurrency=2) as messages:
        held = [await anext(messages) for _ in range(2)]
        while sum(e.parts[0].partition == 0 for e in broker.extended) < 4:
            await asyncio.sleep(0.005)
        broker.unreached.clear()
        for message in held:
            await message.ack()


async def test_what_waits_goes_back_past_a_partition_that_is_out_of_reach(
    make_client: Any, broker: Any
) -> None:
    broker.partitions, broker.unreached = 2, {1}
    async with make_client(attempt_s=0.05) as client:
        topic = await client.topic("t")
        for partition in (0, 1, 0):
            await holding(topic, partition)
        consumer = topic.consume(prefetch=2)
        await (await anext(consumer)).ack()
        while len(broker.leases) < 2:
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(consumer.aclose())
        while len(broker.leases) > 1:
            await asyncio.sleep(0.005)
        assert not closing.done()
        broker.unreached.clear()
        await closing
    assert not broker.leases and not any(back.counted for back in broker.returned)
