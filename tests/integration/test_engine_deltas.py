"""Delta topics: validated on the way in, read from the log alone, and nothing kept in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.integration.harness import START_MS, Node, ids_of

from penstock.errors import InvalidArgument
from penstock.model.batch import Kind
from penstock.model.delta import Delta, Op, encode, vector_hash
from penstock.model.ids import partitions_of_digests
from penstock.node.upkeep import retain

DIMENSIONS = 4


def delta(vector_id: str = "v", *, number: int = 1, **fields: Any) -> Delta:
    known: dict[str, Any] = {
        "delta_id": b"%016d" % number, "namespace": "n", "vector_id": vector_id, "op": Op.SPARSE,
        "origin": "w", "time": START_MS << 16, "clock": {"w": number},
        "indices": np.array([1, 3]), "values": np.array([0.5, 2.0]),
    }  # fmt: skip
    return Delta(**(known | fields))


def row(vector_id: str = "v", **fields: Any) -> dict[str, Any]:
    return {"payload": encode(delta(vector_id, **fields), dimensions=DIMENSIONS)}


def home(vector_id: str, partitions: int) -> int:
    digest = np.frombuffer(vector_hash("n", vector_id)[:8], "<u8")
    return int(partitions_of_digests(digest, partitions)[0])


async def delta_topic(node: Node, **config: Any) -> str:
    return await node.topic("vectors", kind="delta", dimensions=DIMENSIONS, **config)


async def test_deltas_are_in_the_log_and_nowhere_else(node: Node) -> None:
    topic = await delta_topic(node)
    await node.enqueue(topic, [row(number=i) for i in range(1, 6)])
    [partition] = node.engine.topics[topic].partitions
    batches = [b for b in partition.log.reader.scan(1) if b.kind is Kind.ENQ]
    assert [b.entries for b in batches] == [5]
    assert await node.counts(topic) == (0, 0, 0, 0)
    stats = await node.stats(topic)
    assert (stats["enqueued_total"], stats["backlog"], stats["oldest_age_ms"]) == (5, 0, None)


async def test_a_vector_has_one_partition(node: Node) -> None:
    topic = await delta_topic(node, partitions=4)
    names = [f"v{i}" for i in range(40)]
    answer = await node.enqueue(topic, [row(n, number=i + 1) for i, n in enumerate(names)])
    for placed in answer.placed:
        for index in range(placed.index, placed.index + placed.count):
            assert home(names[index], 4) == placed.partition
    with pytest.raises(InvalidArgument, match="does not belong") as refused:
        await node.enqueue(topic, [row("v0")], partition=(home("v0", 4) + 1) % 4)
    assert refused.value.field == "partition"
    await node.enqueue(topic, [row("v0")], partition=home("v0", 4))


async def test_what_is_no_delta_is_refused_with_its_field(node: Node) -> None:
    topic = await delta_topic(node)
    late = delta(time=(START_MS + 6 * 60_000) << 16)
    wide = delta(op=Op.DENSE, indices=None, values=np.zeros(5))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"payload": b"x"}, "payload"),
        ({"payload": row()["payload"][:-1]}, "payload"),
        ({"payload": encode(late, dimensions=4)}, "time"),
        ({"payload": encode(wide, dimensions=5)}, "values"),
        ({**row(), "delay_ms": 5}, "delay_ms"),
        ({**row(), "max_retries": 5}, "max_retries"),
    ]
    for bad, field in cases:
        with pytest.raises(InvalidArgument) as refused:
            await node.enqueue(topic, [row(number=1), bad])
        assert refused.value.field == field
    assert (await node.stats(topic))["enqueued_total"] == 0


async def test_deltas_are_never_leased(node: Node) -> None:
    topic = await delta_topic(node)
    answer = await node.enqueue(topic, [row()])
    [message_id] = ids_of(answer)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("peek", {}), ("pop", {}), ("purge", {"force": True}), ("dlq_list", {}),
        ("dlq_replay", {}), ("dlq_delete", {}), ("move_to_dlq", {"message_id": message_id}),
    ]  # fmt: skip
    for method, arguments in calls:
        with pytest.raises(InvalidArgument, match="is a delta topic") as refused:
            await node.call(method, topic=topic, **arguments)
        assert refused.value.field == "topic"
    with pytest.raises(InvalidArgument, match=r"read it with deltas\(\)"):
        await node.connection.lease_stream(topic, credits=1)


async def test_an_atomic_batch_stays_in_one_partition(node: Node) -> None:
    topic = await delta_topic(node, partitions=4)
    rows = [row(f"v{i}", number=i + 1) for i in range(40)]
    with pytest.raises(InvalidArgument) as refused:
        await node.enqueue(topic, rows, atomic=True)
    assert refused.value.field == "atomic"
    same = [row("v1", number=i) for i in range(1, 4)]
    assert len(ids_of(await node.enqueue(topic, same, atomic=True))) == 3


async def test_a_retry_is_recognised_after_a_snapshot_and_a_restart(node: Node) -> None:
    topic = await delta_topic(node)
    rows = [row(number=i) for i in range(1, 4)]
    first = await node.enqueue(topic, rows, producer=("p", 1, 1))
    await node.call("snapshot", topic=topic)
    tail = await node.enqueue(topic, [row(number=4)], producer=("p", 1, 4))
    await node.restart()
    again = await node.enqueue(topic, [*rows, row(number=4)], producer=("p", 1, 1))
    assert not again.placed
    assert ids_of(again) == ids_of(first) + ids_of(tail)
    assert await node.counts(topic) == (0, 0, 0, 0)
    assert (await node.call("node_status"))["format"] == 2


async def test_retention_drops_old_deltas_only_if_asked(small_node: Node) -> None:
    node = small_node
    for name, config in (("kept", {}), ("dropped", {"retention_ms": 1000})):
        await node.topic(name, kind="delta", dimensions=DIMENSIONS, **config)
        for i in range(1, 61):
            await node.enqueue(name, [row("x" * 400, number=60 * i + j) for j in range(20)])
    await node.advance(10)
    firsts = {}
    for name in ("kept", "dropped"):
        for _ in range(2):
            await node.call("snapshot", topic=name)
        topic = node.engine.topics[name]
        await retain(node.engine.hosts[topic.key(0)], node.clock.now_ms())
        firsts[name] = topic.partitions[0].log.sequence_first
    assert firsts["kept"] == 1 < firsts["dropped"]
