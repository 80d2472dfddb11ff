"""Topics while they run: every attribute can be changed and has its effect at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.harness import Node, body

from penstock.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    LimitExceeded,
    NotFound,
)
from penstock.model.batch import Codec
from penstock.model.topic import FIXED, TopicConfig


async def visibility_ms(node: Node, topic: str) -> None:
    await node.update(topic, visibility_ms=1000)
    (message,) = await node.pop(topic)
    assert message["visibility_ms"] == 1000


async def visibility_ms_max(node: Node, topic: str) -> None:
    await node.update(topic, visibility_ms=500, visibility_ms_max=1000)
    with pytest.raises(InvalidArgument, match="visibility_ms"):
        await node.pop(topic, visibility_ms=1001)


async def max_retries(node: Node, topic: str) -> None:
    leased = await node.pop(topic)
    await node.update(topic, max_retries=0)
    await node.nack(topic, leased)
    assert (await node.counts())[3] == 1


async def backoff_ms_base(node: Node, topic: str) -> None:
    await node.update(topic, backoff_ms_base=0)
    await node.nack(topic, await node.pop(topic))
    assert len(await node.pop(topic, 2)) == 2


async def backoff_ms_cap(node: Node, topic: str) -> None:
    await node.update(topic, backoff_ms_cap=0)
    await node.nack(topic, await node.pop(topic))
    assert len(await node.pop(topic, 2)) == 2


async def payload_bytes_max(node: Node, topic: str) -> None:
    await node.update(topic, payload_bytes_max=10)
    with pytest.raises(InvalidArgument) as refused:
        await node.put(topic, b"x" * 11)
    assert (refused.value.field, refused.value.limit) == ("payload", 10)


async def compression(node: Node, topic: str) -> None:
    await node.update(topic, compression="zstd")
    await node.put(topic, b"x" * 5000)
    log = node.engine.topics[topic].partitions[0].log
    assert list(log.reader.scan(1))[-1].codec is Codec.ZSTD


async def inflight_max(node: Node, topic: str) -> None:
    await node.update(topic, inflight_max=1)
    assert len(await node.pop(topic, 2)) == 1
    await node.update(topic, inflight_max=2)
    assert len(await node.pop(topic, 2)) == 1


async def consumer_leases_max(node: Node, topic: str) -> None:
    stream = await node.stream(topic, credits=2)
    first = await node.delivered(stream)
    assert first[0].delivery.count == 2
    await node.update(topic, consumer_leases_max=1)
    with pytest.raises(InvalidArgument, match="credits"):
        await node.stream(topic, credits=2)


async def key_streams_max(node: Node, topic: str) -> None:
    await node.update(topic, key_streams_max=1)
    first = await node.stream(topic, credits=1)
    with pytest.raises(LimitExceeded):
        await node.stream(topic, credits=1)
    await first.close()
    await node.stream(topic, credits=1)


async def dedup_ms(node: Node, topic: str) -> None:
    rows = [{"payload": b"x"}]
    await node.enqueue(topic, rows, producer=("p", 1, 1))
    await node.update(topic, dedup_ms=1000)
    await node.advance(2)
    await node.enqueue(topic, rows, producer=("p", 1, 2))
    assert not (await node.enqueue(topic, rows, producer=("p", 1, 1))).duplicates


async def ageing_per_s(node: Node, topic: str) -> None:
    await node.advance(10)
    await node.put(topic, b"urgent", priority=-5)
    await node.update(topic, ageing_per_s=1)
    assert await node.popped(topic, 1) == [b"a"]


async def dlq(node: Node, topic: str) -> None:
    await node.update(topic, dlq=False)
    await node.nack(topic, await node.pop(topic), reject=True)
    assert await node.dead() == []


async def replay_per_s(node: Node, topic: str) -> None:
    await node.nack(topic, await node.pop(topic, 2), reject=True)
    await node.update(topic, replay_per_s=10)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await node.put(topic, *[b"x"] * 10)
    await node.nack(topic, await node.pop(topic, 10), reject=True)
    assert await node.call("dlq_replay", topic=topic) == {"replayed": 12}
    assert loop.time() - began > 0.15  # ten at once, then two


async def paused(node: Node, topic: str) -> None:
    stream = await node.stream(topic, credits=10)
    leased = await node.delivered(stream)
    await node.update(topic, paused=True)
    await node.put(topic, b"waits")
    assert await node.delivered(stream) == [] and await node.pop(topic) == []
    assert sum(batch.delivery.count for batch in leased) == 2
    await node.update(topic, paused=False)
    (batch,) = await node.delivered(stream)
    assert list(batch.columns.binary("payload")) == [b"waits"]


async def k(node: Node, topic: str) -> None:
    await node.update(topic, k=7)
    assert node.engine.topics[topic].dispatch.spine.k == 7


async def retention_ms(node: Node, topic: str) -> None:
    await node.nack(topic, await node.pop(topic), reject=True)
    await node.update(topic, retention_ms=1000)
    assert node.engine.topics[topic].config.retention_ms == 1000
    await node.advance(2)
    await retained(node, topic)
    assert len(await node.dead()) == 1


async def dlq_retention_ms(node: Node, topic: str) -> None:
    await node.nack(topic, await node.pop(topic), reject=True)
    await node.update(topic, dlq_retention_ms=1000)
    await node.advance(2)
    await retained(node, topic)
    assert await node.dead() == []


async def retained(node: Node, topic: str) -> None:
    from penstock.node.upkeep import retain

    found = node.engine.topics[topic]
    for partition in found.partitions:
        await retain(node.engine.hosts[found.key(partition.index)], node.clock.now_ms())
    await node.settled()


CHANGES: dict[str, Callable[[Node, str], Awaitable[Any]]] = {
    check.__name__: check
    for check in (
        visibility_ms, visibility_ms_max, max_retries, backoff_ms_base, backoff_ms_cap,
        payload_bytes_max, compression, inflight_max, consumer_leases_max, key_streams_max,
        dedup_ms, ageing_per_s, dlq, replay_per_s, paused, k, retention_ms,
        dlq_retention_ms,
    )
}  # fmt: skip


def test_every_changeable_attribute_is_tried() -> None:
    assert CHANGES.keys() == set(TopicConfig.__struct_fields__) - FIXED


@pytest.mark.parametrize("attribute", CHANGES)
async def test_a_change_has_its_effect_while_the_topic_runs(node: Node, attribute: str) -> None:
    topic = await node.topic(backoff_ms_base=3_600_000, backoff_ms_cap=3_600_000)
    await node.put(topic, b"a", b"b")
    await CHANGES[attribute](node, topic)


async def test_changes_are_there_after_a_restart(node: Node) -> None:
    topic = await node.topic()
    changed = await node.update(topic, max_retries=9, paused=True)
    await node.restart()
    assert await node.call("topic_get", topic=topic) == changed
    assert node.engine.topics[topic].partitions[0].heap.config.max_retries == 9


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"partitions": 2}, "partitions"), ({"mode": "max"}, "mode"), ({"nonsense": 1}, "nonsense"),
     ({"k": 0}, "k"), ({"visibility_ms": 2**40}, "visibility_ms"), ({"paused": 3}, "paused")],
)  # fmt: skip
async def test_a_wrong_change_changes_nothing(node: Node, changes: Any, field: str) -> None:
    topic = await node.topic()
    before = await node.call("topic_get", topic=topic)
    with pytest.raises(InvalidArgument) as refused:
        await node.call("topic_update", topic=topic, changes=changes)
    assert refused.value.field == field
    assert await node.call("topic_get", topic=topic) == before


async def test_a_topic_is_made_once(node: Node) -> None:
    made = await node.call("topic_create", config={"name": "jobs", "max_retries": 7})
    again = await node.call("topic_create", config={"name": "jobs"}, exists_ok=True)
    assert again == made
    with pytest.raises(AlreadyExists):
        await node.topic()
    for name in ("", "a/b", "../x", "x" * 256, "ä"):
        with pytest.raises(InvalidArgument, match="name"):
            await node.topic(name)


async def test_deleting_a_topic_takes_everything_with_it(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"x")
    old = node.engine.topics[topic].config.id
    stream = await node.stream(topic, credits=1)
    await node.delivered(stream)
    with pytest.raises(FailedPrecondition):
        await node.call("topic_delete", topic=topic, force=True)
    await node.forced("topic_delete", topic)
    with pytest.raises(NotFound):
        await anext(stream)
    with pytest.raises(NotFound):
        await node.put(topic, b"x")
    assert not list(Path(node.path, "topics").iterdir())
    await node.topic()
    assert node.engine.topics[topic].config.id != old
    assert await node.counts() == (0, 0, 0, 0)


async def test_a_confirmation_is_good_for_one_call_and_one_minute(node: Node) -> None:
    topic = await node.topic()
    other = await node.topic("other")
    token = (await node.call("confirm", method="purge", subject=topic))["confirm"]
    for method, name in (("purge", other), ("topic_delete", topic)):
        with pytest.raises(FailedPrecondition):
            await node.call(method, topic=name, force=True, confirm=token)
    token = (await node.call("confirm", method="purge", subject=topic))["confirm"]
    await node.advance(60)
    with pytest.raises(FailedPrecondition):
        await node.call("purge", topic=topic, force=True, confirm=token)
    with pytest.raises(InvalidArgument, match="method"):
        await node.call("confirm", method="peek", subject=topic)


async def test_purge_drops_what_waits_and_nothing_else(node: Node) -> None:
    topic = await node.topic(partitions=2)
    await node.put(topic, b"dead", priority=-2)
    await node.nack(topic, await node.pop(topic), reject=True)
    await node.put(topic, b"leased", priority=-1)
    leased = await node.pop(topic)
    for i in range(6):
        delay_ms = 1000 * (i % 2)
        await node.put(topic, b"%d" % i, key=b"%d" % i, delay_ms=delay_ms)
    assert await node.forced("purge", topic) == {"purged": 6}
    assert await node.counts() == (0, 0, 1, 1)
    await node.put(topic, b"after")
    await node.restart()
    assert await node.counts() == (1, 0, 1, 1)
    assert await node.ack(topic, leased) == []


async def test_an_update_while_enqueueing_loses_nothing(node: Node) -> None:
    topic = await node.topic(partitions=2)
    puts = [node.put(topic, b"%d" % i, key=b"%d" % i) for i in range(50)]
    updates = [node.update(topic, max_retries=i) for i in range(10)]
    await asyncio.gather(*puts, *updates)
    assert await node.counts() == (50, 0, 0, 0)
    part = (0, 1, body([{"payload": b"x"}]))
    assert (await node.connection.enqueue(topic, [part])).placed
