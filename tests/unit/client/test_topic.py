import asyncio
import logging
from typing import Any

import pytest

from penstock.client.client import Client
from penstock.errors import AlreadyExists, NotFound, PenstockError, Unavailable

MESSAGE = {
    "message_id": "01HF7YAT00000G000000000005", "partition": 0, "sequence": 5, "priority": 3,
    "attempts": 1, "time_ms": 1_700_000_000_000, "key": b"k", "headers": {"h": "1"},
    "payload": b'{"a":1}',
}  # fmt: skip


def calls(broker: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.method, call.arguments) for call in broker.calls]


async def test_a_topic_is_created_when_awaited_with_what_was_asked(
    client: Client, broker: Any
) -> None:
    topic = await client.topic("jobs", mode="max", partitions=4, max_retries=7)
    assert topic.config.id == 7
    wanted = {"name": "jobs", "mode": "max", "partitions": 4, "max_retries": 7}
    assert calls(broker) == [("topic_create", {"config": wanted, "exists_ok": True})]


async def test_a_topic_is_opened_once_by_its_first_uses(client: Client, broker: Any) -> None:
    topic = client.topic("jobs")
    with pytest.raises(RuntimeError):
        _ = topic.config
    await asyncio.gather(*(topic.put(b"x") for _ in range(10)))
    assert [method for method, _ in calls(broker)] == ["topic_create"]


async def test_topics_of_one_name_never_share_a_producer_key(client: Client, broker: Any) -> None:
    text, raw = client.topic("jobs", of=str), client.topic("jobs")
    assert client.topic("jobs", of=str) is text and text is not raw
    await asyncio.gather(text.put("a"), raw.put(b"b"), text.put("c"))
    await raw.put_many([b"d"])
    assert len(broker.written) == len(broker.ready) == 4


async def test_a_closed_client_refuses_instead_of_hanging(make_client: Any) -> None:
    async with make_client() as client:
        topic = await client.topic("jobs")
    for use in (topic.put(b"x"), topic.put_many([b"x"]), topic.stats(), anext(topic.consume())):
        with pytest.raises(PenstockError, match="closed"):
            await use


async def test_without_create_a_topic_must_exist(client: Client, broker: Any) -> None:
    broker.results["topic_get"] = NotFound("no topic")
    with pytest.raises(NotFound):
        await client.topic("jobs", create=False).put(b"x")


async def test_another_shape_is_raised(client: Client, broker: Any) -> None:
    broker.results["topic_create"] = AlreadyExists("has 1 partition")
    with pytest.raises(AlreadyExists):
        await client.topic("jobs", partitions=2)


async def test_peeked_messages_are_decoded(client: Client, broker: Any) -> None:
    broker.results["peek"] = {"messages": [MESSAGE]}
    (message,) = await client.topic("jobs", of=dict).peek(1)
    assert message.value == {"a": 1} and message.key == b"k" and message.headers == {"h": "1"}
    assert message.enqueued_at.year == 2023 and message.id in repr(message)


async def test_popped_messages_are_leases(client: Client, broker: Any) -> None:
    lease = {"lease_token": "5.0.3.64", "deadline_ms": 77, "visibility_ms": 30}
    broker.results["pop"] = {"messages": [MESSAGE | lease]}
    broker.leases[0x64] = ((0, 5, {}), broker.sessions[0], 0)
    topic = client.topic("jobs", of=dict)
    (message,) = await topic.pop(wait=2, visibility=0.03)
    assert message.lease_token == "5.0.3.64" and message.attempts == 1
    assert message.deadline_ms == 77
    async with message:
        while not broker.extended:
            await asyncio.sleep(0.005)
    assert broker.acked == [0x64]
    method, arguments = calls(broker)[-1]
    assert method == "pop" and arguments["visibility_ms"] == 30
    assert 0 < arguments["wait_ms"] <= 2000


async def test_destructive_calls_bring_their_confirmation(client: Client, broker: Any) -> None:
    broker.results["confirm"] = {"confirm": "c1"}
    broker.results["purge"] = {"purged": 4}
    topic = client.topic("jobs")
    assert await topic.purge(force=True) == 4
    assert calls(broker) == [
        ("confirm", {"method": "purge", "subject": "jobs"}),
        ("purge", {"topic": "jobs", "force": True, "confirm": "c1"}),
    ]
    await topic.purge()
    assert calls(broker)[-1] == ("purge", {"topic": "jobs", "force": False})


async def test_dead_letters_are_listed_page_by_page(client: Client, broker: Any) -> None:
    dead = MESSAGE | {"reason": "rejected", "detail": "bad", "dead_ms": 9}
    broker.results["dlq_list"] = {"messages": [dead] * 2, "next": None}
    broker.results["dlq_replay"] = {"replayed": 2}
    topic = await client.topic("jobs", of=dict)
    found = [message async for message in topic.dlq]
    assert [(m.reason, m.detail, m.dead_ms, m.value) for m in found] == [
        ("rejected", "bad", 9, {"a": 1})
    ] * 2
    assert await topic.dlq.replay(found) == 2
    assert calls(broker)[-1][1]["message_ids"] == [found[0].id] * 2


async def test_pause_and_update_change_the_known_configuration(client: Client, broker: Any) -> None:
    broker.results["topic_update"] = {"name": "jobs", "id": 7, "payload_bytes_max": 10}
    topic = await client.topic("jobs")
    await topic.pause()
    assert calls(broker)[-1] == ("topic_update", {"topic": "jobs", "changes": {"paused": True}})
    assert topic.config.payload_bytes_max == 10


async def test_reads_are_repeated_after_a_lost_connection_and_pops_are_not(
    client: Client, broker: Any
) -> None:
    topic = await client.topic("jobs")
    broker.results["stats"] = broker.results["pop"] = Unavailable("stopping")
    pop = asyncio.ensure_future(topic.pop())
    with pytest.raises(Unavailable):
        await pop
    reading = asyncio.ensure_future(topic.stats())
    await asyncio.sleep(0.02)
    broker.results["stats"] = {"topics": [{"name": "jobs", "ready": 4}]}
    assert (await reading).ready == 4


async def test_a_pop_that_leased_nothing_is_made_again_for_the_rest_of_its_wait(
    client: Client, broker: Any
) -> None:
    topic = await client.topic("jobs")
    broker.results["pop"] = Unavailable("stopping, nothing was leased", elsewhere=True)
    popping = asyncio.ensure_future(topic.pop(wait=5))
    while len([call for call in broker.calls if call.method == "pop"]) < 3:
        await asyncio.sleep(0.005)
    broker.results["pop"] = {"messages": []}
    assert await popping == []
    waits = [call.arguments["wait_ms"] for call in broker.calls if call.method == "pop"]
    assert waits == sorted(waits, reverse=True) and waits[-1] < 5000


async def test_a_pop_whose_connection_is_lost_says_that_it_may_be_repeated(
    client: Client, broker: Any
) -> None:
    topic = await client.topic("jobs")
    broker.lost.add("pop")
    with pytest.raises(Unavailable, match="connection was lost") as lost:
        await topic.pop()
    assert lost.value.retryable
    broker.lost.clear()
    broker.results["pop"] = {"messages": []}
    assert await topic.pop() == []


async def test_a_topic_that_must_be_new_is_not_created_twice(client: Client, broker: Any) -> None:
    broker.lost.add("topic_create")
    with pytest.raises(Unavailable, match="connection was lost"):
        await client.call("topic_create", config={"name": "jobs"})
    assert len(broker.calls) == 1
    opening = asyncio.ensure_future(client.topic("jobs").opened())
    async with asyncio.timeout(60):
        while len(broker.calls) < 3:
            await asyncio.sleep(0.001)
        broker.lost.clear()
        await opening


async def test_retries_are_told_to_nobody_but_the_log(
    client: Client, broker: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    topic = await client.topic("jobs")
    broker.results["stats"] = Unavailable("not yet")
    caplog.set_level(logging.DEBUG, "penstock.client")
    reading = asyncio.ensure_future(topic.stats())
    async with asyncio.timeout(30):
        while len(caplog.records) < 3:
            await asyncio.sleep(0.005)
    broker.results["stats"] = {"topics": [{"name": "jobs", "ready": 4}]}
    assert (await reading).ready == 4
    assert capfd.readouterr() == ("", "")
    assert {(r.levelname, "not yet" in r.getMessage()) for r in caplog.records} == {("DEBUG", True)}


async def test_the_log_is_read_as_messages_or_batches(client: Client) -> None:
    topic = client.topic("jobs")
    reader = topic.log(0, from_sequence=3)
    async for message in reader:
        assert (message.sequence, message.value, message.priority) == (3, b"a", 5)
        break
    assert reader.sequence_committed == 9
    async for batch in topic.log(2).batches():
        assert (batch.partition, batch.first, batch.last) == (2, 1, 2)
        break
