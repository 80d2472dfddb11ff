"""Snapshots, retention and compaction on a running node: the disk shrinks, nothing alive goes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.harness import Node, payloads_of

from penstock.config import Config, UpkeepOptions
from penstock.errors import NotFound
from penstock.log.flush import LogOptions
from penstock.log.verify import verify_folder
from penstock.node.upkeep import retain


def disk_bytes(node: Node) -> int:
    return sum(path.stat().st_size for path in node.path.rglob("*.seg"))


async def looked_after(node: Node, topic: str = "jobs") -> int:
    """One round of upkeep: the last two snapshots both cover all, then retention."""
    freed = 0
    found = node.engine.topics[topic]
    for _ in range(2):
        await node.call("snapshot", topic=topic)
    for partition in found.partitions:
        freed += await retain(node.engine.hosts[found.key(partition.index)], node.clock.now_ms())
    await node.settled()
    return freed


async def fill(node: Node, topic: str, count: int = 60) -> list[bytes]:
    payloads = [b"%04d" % i + b"x" * 4000 for i in range(count)]
    for payload in payloads:
        await node.put(topic, payload)
    return payloads


async def test_settled_segments_go_after_retention(small_node: Node) -> None:
    node = small_node
    topic = await node.topic(retention_ms=10_000)
    await fill(node, topic)
    await node.ack(topic, await node.pop(topic, 60))
    before = disk_bytes(node)
    assert await looked_after(node) == 0  # too young
    await node.advance(11)
    assert await looked_after(node) > before // 2
    assert disk_bytes(node) < before // 2
    await node.stop()
    assert verify_folder(node.path).ok
    await node.start()
    assert await node.counts() == (0, 0, 0, 0)
    await node.put(topic, b"goes on")
    assert await node.popped(topic) == [b"goes on"]


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
async def test_a_few_old_messages_do_not_keep_the_rest(small_node: Node, compression: str) -> None:
    node = small_node
    topic = await node.topic(retention_ms=1000, compression=compression)
    payloads = await fill(node, topic, 80 if compression == "none" else 2000)
    messages = []
    while popped := await node.pop(topic, 1000):
        messages += popped
    kept, done = messages[::40], [m for i, m in enumerate(messages) if i % 40]
    await node.ack(topic, done)
    await node.nack(topic, kept, delay_ms=0)
    before = disk_bytes(node)
    await node.advance(2)
    freed = await looked_after(node)
    assert freed > before // 3 and disk_bytes(node) < before - freed + 4096
    assert await node.popped(topic, 1000) == payloads_of(kept) == payloads[::40]
    await node.stop()
    assert verify_folder(node.path).ok
    await node.start()
    stored = {m["payload"] for m in (await node.call("peek", topic=topic, limit=10))["messages"]}
    assert stored == set() and (await node.counts())[2] == len(kept)


async def test_leases_dedup_and_dead_letters_outlive_compaction(small_node: Node) -> None:
    node = small_node
    topic = await node.topic(retention_ms=60_000, visibility_ms=3_600_000)
    row = [{"payload": b"keyed" * 900}]
    first = await node.enqueue(topic, row, producer=("p", 1, 1))
    leased = await node.pop(topic)
    await fill(node, topic)
    rest = await node.pop(topic, 60)
    await node.advance(61)
    await node.ack(topic, rest[1:])
    await node.nack(topic, rest[:1], reject=True, reason="dead")
    assert await looked_after(node) > 0
    for _ in range(2):
        again = await node.enqueue(topic, row, producer=("p", 1, 1))
        assert again.duplicates[0].sequence == first.placed[0].sequence
        assert payloads_of(await node.dead()) == payloads_of(rest[:1])
        await node.crash()
    assert await node.ack(topic, leased) == []
    assert await node.call("dlq_replay", topic=topic) == {"replayed": 1}
    assert await node.popped(topic) == payloads_of(rest[:1])


async def test_a_short_retention_leaves_dead_letters_alone(small_node: Node) -> None:
    """Before, they went with the log: a retention of a second deleted what nobody had looked at."""
    node = small_node
    topic = await node.topic(retention_ms=1000)
    payloads = await fill(node, topic)
    await node.nack(topic, await node.pop(topic, 5), reject=True)
    await node.ack(topic, await node.pop(topic, 55))
    await node.advance(13 * 24 * 3600)
    assert await looked_after(node) > 0  # the space of the others is given back
    assert payloads_of(await node.dead()) == payloads[:5]
    await node.restart()
    assert await node.call("dlq_replay", topic=topic) == {"replayed": 5}
    assert await node.popped(topic) == payloads[:5]


async def test_dead_letters_go_after_their_retention(small_node: Node) -> None:
    node = small_node
    topic = await node.topic(retention_ms=10_000, dlq_retention_ms=10_000)
    await fill(node, topic)
    await node.nack(topic, await node.pop(topic, 60), reject=True)
    await node.advance(9)
    await looked_after(node)
    assert (await node.counts())[3] == 60
    await node.advance(2)
    assert await looked_after(node) > 0
    assert (await node.counts())[3] == 0


async def test_a_reader_of_dropped_batches_is_told(small_node: Node) -> None:
    node = small_node
    topic = await node.topic(retention_ms=0)
    stream = await node.connection.log_stream(topic, partition=0, credit_entries=1)
    await fill(node, topic)
    await node.ack(topic, await node.pop(topic, 60))
    await node.advance(1)
    assert await looked_after(node) > 0
    with pytest.raises(NotFound, match="not held"):
        async for _ in stream:
            pass
    with pytest.raises(NotFound) as refused:
        await node.connection.log_stream(topic, partition=0)
    start = refused.value.details["sequence_first"]
    assert await anext(await node.connection.log_stream(topic, partition=0, from_sequence=start))
    await node.put(topic, b"later", delay_ms=1000)  # and time goes on for everybody else
    waiting = await node.stream(topic, credits=1)
    node.clock.advance(1.001)
    assert len(await node.delivered(waiting)) == 1


async def test_a_compacted_log_still_reads_as_a_stream(small_node: Node) -> None:
    node = small_node
    topic = await node.topic(retention_ms=0)
    await fill(node, topic)
    messages = await node.pop(topic, 60)
    await node.ack(topic, messages[1:])
    await node.advance(1)
    assert await looked_after(node) > 0
    log = node.engine.topics[topic].partitions[0].log
    last = log.sequence_durable
    stream = await node.connection.log_stream(topic, partition=0)
    found = []
    while not found or found[-1].last < last:
        found += await anext(stream)
    assert [b.encode() for b in found] == [b.encode() for b in log.reader.scan(1)]
    assert any(b.compacted for b in found)
    assert all(a.last + 1 == b.first for a, b in pairwise(found))


async def test_upkeep_runs_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "data"
    log = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)
    often = UpkeepOptions(snapshot_s=0.001, snapshot_bytes=1024, retention_s=0.001)
    node = await Node(path, Config(data=path, log=log, upkeep=often)).start()
    topic = await node.topic(retention_ms=0)
    await fill(node, topic)
    await node.ack(topic, await node.pop(topic, 60))
    async with asyncio.timeout(60):
        while disk_bytes(node) > 128 << 10:
            await node.put(topic, b"x")
            await node.ack(topic, await node.pop(topic))
            node.clock.advance(1)
            await asyncio.sleep(0.02)
    assert (await node.stats())["partitions"][0]["snapshot_sequence"] > 0
    await node.stop()
    assert verify_folder(path).ok


async def test_the_scrub_finds_a_flipped_bit_while_the_node_runs(small_node: Node) -> None:
    node = small_node
    topic = await node.topic()
    await fill(node, topic)
    assert (await node.call("verify"))["ok"]
    oldest = min(node.path.rglob("*.seg"))
    with oldest.open("r+b") as file:
        file.seek(5000)
        old = file.read(1)
        file.seek(5000)
        file.write(bytes([old[0] ^ 4]))
    found = await node.call("verify")
    assert not found["ok"] and (await node.call("node_status"))["damage"]


async def test_a_delivery_between_a_rewrite_and_its_end(small_node: Node) -> None:
    """The rewritten batch begins where an older, shorter one began that is still in memory."""
    node = small_node
    topic = await node.topic(retention_ms=0)
    await node.put(topic, b"whole", priority=9)
    await node.put(topic, b"before")
    await node.put(topic, b"kept", b"gone")
    before, kept, gone = [*await node.pop(topic), *await node.pop(topic, 2)]
    await fill(node, topic)
    await node.ack(topic, [before, gone])
    await node.nack(topic, [kept], delay_ms=0, counted=False)
    partition = node.engine.topics[topic].partitions[0]
    oldest = partition.log.segments()[0]
    alive = partition.heap.alive(oldest.first, oldest.last)
    assert await asyncio.to_thread(partition.log.rewrite, oldest.first, lambda *_: alive) > 0
    assert await node.popped(topic, 1) == [b"kept"]
