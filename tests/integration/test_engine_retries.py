"""Retries with backoff, and the dead letters at their end."""

from __future__ import annotations

import pytest
from tests.integration.harness import Node

from penstock.errors import FailedPrecondition, InvalidArgument, NotFound


async def waiting_ms(node: Node, topic: str) -> int:
    """How long until the one message of the topic is ready."""
    heap = node.engine.topics[topic].partitions[0].heap
    due_ms = heap.next_wakeup()
    return 0 if due_ms is None else due_ms - node.clock.now_ms()


async def test_backoff_doubles_up_to_its_cap_with_full_jitter(node: Node) -> None:
    topic = await node.topic(max_retries=6, backoff_ms_base=1000, backoff_ms_cap=5000, partitions=1)
    ceilings = [1000, 2000, 4000, 5000, 5000, 5000]
    waits: list[list[int]] = [[] for _ in ceilings]
    for _ in range(12):
        await node.put(topic, b"x")
        for attempt, ceiling in enumerate(ceilings):
            (message,) = await node.pop(topic)
            assert message["attempts"] == attempt
            await node.nack(topic, [message])
            waits[attempt].append(await waiting_ms(node, topic))
            assert 0 <= waits[attempt][-1] <= ceiling
            await node.advance(5)
        await node.ack(topic, await node.pop(topic))
    assert max(waits[2]) > 2000 and min(waits[3]) < 2500  # spread over the whole range
    assert len(set(waits[3])) > 6


@pytest.mark.parametrize("how", ["nack", "expire"])
async def test_past_its_retries_a_message_is_dead(node: Node, how: str) -> None:
    topic = await node.topic(max_retries=2, backoff_ms_base=0, visibility_ms=1000)
    (message_id,) = await node.put(topic, b"bad")
    for attempt in range(3):
        (message,) = await node.pop(topic)
        assert message["attempts"] == attempt
        if how == "nack":
            assert await node.nack(topic, [message], reason="no good") == []
        else:
            await node.advance(1)
    assert await node.pop(topic) == []
    (dead,) = await node.dead()
    assert (dead["message_id"], dead["reason"], dead["payload"]) == (message_id, "retries", b"bad")
    assert dead["detail"] == ("no good" if how == "nack" else "")
    assert dead["dead_ms"] == node.clock.now_ms()


async def test_a_messages_own_retries_win(node: Node) -> None:
    topic = await node.topic(max_retries=5, backoff_ms_base=0)
    await node.put(topic, b"once", max_retries=0)
    await node.nack(topic, await node.pop(topic))
    assert await node.counts() == (0, 0, 0, 1)


async def test_a_nack_may_name_its_delay(node: Node) -> None:
    topic = await node.topic(backoff_ms_base=3_600_000, backoff_ms_cap=3_600_000)
    await node.put(topic, b"x")
    await node.nack(topic, await node.pop(topic), delay_ms=2000)
    await node.advance(1.999)
    assert await node.popped(topic) == []
    await node.advance(0.001)
    (message,) = await node.pop(topic)
    assert message["attempts"] == 1
    with pytest.raises(InvalidArgument, match="delay_ms"):
        await node.nack(topic, [message], delay_ms=-1)


async def test_given_back_unused_counts_no_attempt(node: Node) -> None:
    topic = await node.topic(max_retries=0)
    await node.put(topic, b"x")
    for _ in range(3):
        await node.nack(topic, await node.pop(topic), counted=False)
    (message,) = await node.pop(topic)
    assert message["attempts"] == 0


async def test_reject_is_final(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"poison")
    message = await node.pop(topic)
    assert await node.nack(topic, message, reject=True, reason="cannot parse") == []
    (dead,) = await node.dead()
    assert (dead["reason"], dead["detail"], dead["attempts"]) == ("rejected", "cannot parse", 0)
    assert await node.ack(topic, message) == [0]


async def test_without_dead_letters_a_message_is_dropped(node: Node) -> None:
    topic = await node.topic(dlq=False, max_retries=0)
    await node.put(topic, b"x")
    await node.nack(topic, await node.pop(topic))
    assert await node.counts() == (0, 0, 0, 0)
    assert (await node.stats())["dead_total"] == 1


async def kill(node: Node, topic: str, count: int) -> None:
    await node.nack(topic, await node.pop(topic, count), reject=True)


async def test_dead_letters_are_listed_by_pages(node: Node) -> None:
    topic = await node.topic(partitions=3)
    for i in range(9):
        await node.enqueue(topic, [{"payload": b"%d" % i}], partition=i % 3)
    await kill(node, topic, 9)
    seen: list[bytes] = []
    after = None
    for expected in (4, 4, 1):
        page = await node.call("dlq_list", topic=topic, limit=4, after=after)
        assert len(page["messages"]) == expected
        seen += [m["payload"] for m in page["messages"]]
        after = page["next"]
    assert after is None and sorted(seen) == [b"%d" % i for i in range(9)]
    for wrong in ("x", "1", "-1.2"):
        with pytest.raises(InvalidArgument, match="cursor"):
            await node.dead(after=wrong)


async def test_replayed_dead_letters_start_afresh(node: Node) -> None:
    topic = await node.topic(max_retries=0)
    await node.put(topic, b"a", b"b", b"c")
    messages = await node.pop(topic, 3)
    await node.nack(topic, messages)
    chosen = [messages[1]["message_id"]]
    assert await node.call("dlq_replay", topic=topic, message_ids=chosen) == {"replayed": 1}
    (again,) = await node.pop(topic)
    assert (again["payload"], again["attempts"]) == (b"b", 0)
    assert await node.call("dlq_replay", topic=topic, limit=1) == {"replayed": 1}
    assert await node.call("dlq_replay", topic=topic) == {"replayed": 1}
    assert await node.counts() == (2, 0, 1, 0)
    with pytest.raises(NotFound):
        await node.call("dlq_replay", topic=topic, message_ids=chosen)


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_replay_of_nothing_is_refused(node: Node, limit: int) -> None:
    topic = await node.topic()
    with pytest.raises(InvalidArgument, match="limit"):
        await node.call("dlq_replay", topic=topic, limit=limit)


async def test_dead_letters_are_deleted_only_when_confirmed(node: Node) -> None:
    topic = await node.topic()
    ids = await node.put(topic, b"a", b"b")
    await kill(node, topic, 2)
    with pytest.raises(FailedPrecondition, match="force"):
        await node.call("dlq_delete", topic=topic)
    with pytest.raises(FailedPrecondition, match="confirmation"):
        await node.call("dlq_delete", topic=topic, force=True, confirm="made up")
    assert await node.forced("dlq_delete", topic, message_ids=ids[:1]) == {"deleted": 1}
    assert [m["payload"] for m in await node.dead()] == [b"b"]
    assert await node.forced("dlq_delete", topic) == {"deleted": 1}
    assert await node.dead() == []


async def test_any_living_message_can_be_moved_to_the_dead_letters(node: Node) -> None:
    topic = await node.topic()
    ids = [*await node.put(topic, b"leased", b"ready"), *await node.put(topic, b"d", delay_ms=99)]
    leased = await node.pop(topic)
    for message_id in ids:
        await node.call("move_to_dlq", topic=topic, message_id=message_id, reason="by hand")
    dead = await node.dead()
    assert {(m["reason"], m["detail"]) for m in dead} == {("moved", "by hand")}
    assert [m["message_id"] for m in dead] == ids
    assert await node.ack(topic, leased) == [0]
    with pytest.raises(NotFound):
        await node.call("move_to_dlq", topic=topic, message_id=ids[0])


async def test_dead_letters_survive_a_restart_and_a_snapshot(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"a")
    await node.nack(topic, await node.pop(topic), reject=True, reason="why")
    before = await node.dead()
    await node.restart()
    assert await node.dead() == before
    await node.call("snapshot", topic=topic)
    await node.restart()
    assert await node.dead() == before
    assert await node.call("dlq_replay", topic=topic) == {"replayed": 1}
    assert await node.popped(topic) == [b"a"]
