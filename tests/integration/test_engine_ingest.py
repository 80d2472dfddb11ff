"""The queue in front of a delta topic's log: bounded, the most urgent first, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.integration.harness import Node
from tests.integration.test_engine_deltas import delta_topic, home, row

from penstock.config import Config
from penstock.errors import Backpressure, NotFound
from penstock.model.batch import Kind
from penstock.model.delta import PriorityClass
from penstock.model.delta_batch import DeltaBatch
from penstock.node.serve.topic import TURN_ENTRIES
from penstock.propagation.flow.lanes import IngestQueue
from penstock.propagation.options import LiveOptions
from penstock.wire.messages import OpenSubscription

CRITICAL, _, NORMAL, LOW = PriorityClass


class Room:
    """A live path that has room for so many more deltas, of those that the log has by then."""

    def __init__(self, node: Node, topic: str) -> None:
        self.node, self.topic = node, node.engine.topics[topic]
        self.allowed = 0
        self.topic.live_room = self

    def __call__(self) -> int:
        return self.allowed - sum(p.log.sequence_last for p in self.topic.local)

    def open(self) -> None:
        self.allowed = 1 << 40
        self.node.clock.advance(0.01)  # it is looked at again after a while


def queue_of(node: Node, topic: str) -> IngestQueue[Any]:
    ingest = node.engine.topics[topic].ingest
    assert ingest is not None
    return ingest.queue


@pytest.fixture
async def narrow_node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node on which a hundred deltas of a topic may wait."""
    live = LiveOptions(ingest_max=100, ingest_high_water=0.5)
    node = Node(tmp_path / "data", Config(data=tmp_path / "data", live=live, drain_s=5.0))
    await node.start()
    yield node
    await node.stop()


def rows(count: int, name: str = "v", **fields: Any) -> list[dict[str, Any]]:
    return [
        row(f"{name}{i}", clock={"w": 1}, delta_id=f"{name}{i}".encode().ljust(16, b"."), **fields)
        for i in range(count)
    ]


def log_of(node: Node, topic: str, partition: int = 0) -> DeltaBatch:
    log = node.engine.topics[topic].partitions[partition].log
    parts = [b.columns().binary("payload") for b in log.reader.scan(1) if b.kind is Kind.ENQ]
    return DeltaBatch.concat([DeltaBatch.of(part) for part in parts])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_critical_delta_is_written_before_fifty_thousand_low_ones(node: Node) -> None:
    topic = await delta_topic(node)
    room, queue = Room(node, topic), queue_of(node, topic)
    low = rows(1000, priority=LOW)
    async with asyncio.TaskGroup() as group:
        for n in range(50):
            group.create_task(node.enqueue(topic, low, producer=("bulk", 1, n * 1000)))
        await until(lambda: queue.depth == 50_000)
        group.create_task(node.enqueue(topic, rows(1, "u", priority=CRITICAL)))
        await until(lambda: queue.depth == 50_001)
        assert queue.depth_by_class == [1, 0, 0, 50_000]
        room.open()
    found = log_of(node, topic)
    assert len(found) == 50_001
    assert found.priority.tolist().index(CRITICAL) == 0


async def test_what_is_on_its_way_is_bounded_by_a_turn(node: Node) -> None:
    topic = await delta_topic(node)
    queue, many = queue_of(node, topic), rows(1000, priority=LOW)
    most = 0
    partition = node.engine.topics[topic].local[0]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.enqueue(topic, many)) for _ in range(40)]
        while not all(task.done() for task in tasks):
            committed = partition.coordinator.sequence_committed
            most = max(most, partition.log.sequence_last - committed)
            await asyncio.sleep(0)
    assert most <= TURN_ENTRIES + 1000
    assert queue.depth == 0
    assert len(log_of(node, topic)) == 40_000


async def test_a_full_queue_refuses_and_loses_nothing(narrow_node: Node) -> None:
    node = narrow_node
    topic = await delta_topic(node)
    room, queue = Room(node, topic), queue_of(node, topic)
    taken = [asyncio.create_task(node.enqueue(topic, rows(40, n))) for n in "ab"]
    await until(lambda: queue.depth == 80)
    with pytest.raises(Backpressure) as refused:
        await node.enqueue(topic, rows(40, "c"))
    assert refused.value.retry_after_s == pytest.approx(5)
    assert (queue.high, queue.crossings, queue.rejected) == (True, 1, 40)
    assert not written_deltas(node, topic)
    [status] = (await node.call("live_status", topic=topic))["topics"]
    [state] = status["ingest"]
    assert (state["depth"], state["high"], state["high_water"]) == (80, True, 50)
    assert (state["depth_by_class"]["normal"], state["rejected"], state["live_room"]) == (
        80,
        40,
        -1,
    )
    room.open()
    for answer in await asyncio.gather(*taken):
        assert sum(placed.count for placed in answer.placed) == 40
    await node.enqueue(topic, rows(40, "c"))
    assert len(set(log_of(node, topic).delta_ids())) == len(log_of(node, topic)) == 120
    text = node.engine.metrics.text().decode()
    assert f'penstock_ingest_rejected_deltas_total{{topic="{topic}"}} 40.0' in text
    assert f'penstock_ingest_high_water_crossings_total{{topic="{topic}"}} 1.0' in text


def written_deltas(node: Node, topic: str) -> int:
    log = node.engine.topics[topic].partitions[0].log
    return sum(b.entries for b in log.reader.scan(1) if b.kind is Kind.ENQ)


async def test_a_live_path_that_lags_stops_the_writers(narrow_node: Node) -> None:
    node, got, failed = narrow_node, list[int](), list[Exception]()
    topic = node.engine.topics[await delta_topic(node)]
    await node.engine.hub(topic).subscribe(
        0, OpenSubscription("vectors", 0, start="sequence", at=1),
        send=lambda changes, *_: got.append(changes.count), fail=failed.append,
    )  # fmt: skip
    assert topic.live is not None
    feed, queue = topic.live.partitions[0], queue_of(node, "vectors")
    feed._thread.busy = True  # as while a thread has the fold
    await node.enqueue("vectors", rows(150, "a"))
    waiting = asyncio.create_task(node.enqueue("vectors", rows(90, "b")))
    await until(lambda: queue.depth == 90)
    with pytest.raises(Backpressure) as refused:
        await node.enqueue("vectors", rows(90, "c"))
    assert refused.value.retry_after_s > 0
    feed._thread.busy = False
    feed._run()
    node.clock.advance(0.01)
    await waiting
    await node.enqueue("vectors", rows(90, "c"))
    await until(lambda: sum(got) == 330)
    assert len(set(log_of(node, "vectors").delta_ids())) == 330
    assert not failed


async def test_a_retry_of_what_still_waits_is_written_once(node: Node) -> None:
    topic = await delta_topic(node)
    room, queue = Room(node, topic), queue_of(node, topic)
    same = [
        asyncio.create_task(node.enqueue(topic, rows(3), producer=("p", 1, 0))) for _ in range(2)
    ]
    await until(lambda: queue.depth == 6)
    room.open()
    first, second = await asyncio.gather(*same)
    assert sum(placed.count for placed in first.placed) == len(second.duplicates) == 3
    assert written_deltas(node, topic) == 3


async def test_a_child_is_not_written_before_its_parent(node: Node) -> None:
    topic = await delta_topic(node)
    room, queue = Room(node, topic), queue_of(node, topic)
    writes = [
        ("v", LOW, 1), ("w", LOW, 2), ("v", CRITICAL, 3), ("x", NORMAL, 4),
    ]  # fmt: skip
    tasks = []
    for depth, (vector, priority, number) in enumerate(writes, 1):
        one = row(vector, number=number, priority=priority)
        tasks.append(asyncio.create_task(node.enqueue(topic, [one])))
        await until(lambda depth=depth: queue.depth == depth)
    room.open()
    await asyncio.gather(*tasks)
    numbers = [int(id_) for id_ in log_of(node, topic).delta_ids()]
    assert numbers == [1, 3, 4, 2]


async def test_a_partition_that_cannot_write_does_not_hold_up_the_others(node: Node) -> None:
    topic = await delta_topic(node, partitions=2)
    queue, done = queue_of(node, topic), Event()
    stuck, free = ([f"v{i}" for i in range(99) if home(f"v{i}", 2) == p] for p in (0, 1))
    flusher = node.engine.topics[topic].local[0].flusher
    writer = asyncio.create_task(flusher.alone(lambda: done.wait(60)))
    some = [row(stuck[0], number=i + 1) for i in range(1000)]
    waiting = [asyncio.create_task(node.enqueue(topic, some)) for _ in range(10)]
    await until(lambda: queue.depths == {0: 1000})
    await node.enqueue(topic, [row(free[0])])
    assert queue.depths == {0: 1000}
    done.set()
    await writer
    node.engine.topics[topic].wake()
    await asyncio.gather(*waiting)
    assert written_deltas(node, topic) == 10_000


async def test_those_who_wait_are_told_when_the_topic_goes(node: Node) -> None:
    topic = await delta_topic(node)
    Room(node, topic)
    queue = queue_of(node, topic)
    waiting = asyncio.create_task(node.enqueue(topic, rows(5)))
    await until(lambda: queue.depth == 5)
    await node.forced("topic_delete", topic)
    with pytest.raises(NotFound):
        await waiting
    assert queue.depth == 0


async def test_a_queue_topic_has_none_of_it(node: Node) -> None:
    topic = await node.topic("jobs")
    assert node.engine.topics[topic].ingest is None
