"""Disks that are full, that fail, and that lose power under a running node."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.integration.crashing import Ledger, Traffic, check, server_in
from tests.integration.harness import Node, ids_of
from tests.unit.log.mounts import cut_power, ext4, fill, make_ext4, tmpfs

from penstock.client.network.endpoints import open_connection
from penstock.config import Config, UpkeepOptions
from penstock.errors import Corruption, DiskFull, StorageFailed, Unavailable
from penstock.log.flush import LogOptions
from penstock.log.verify import verify_folder
from penstock.node.storage.log_io import Syncer
from penstock.node.upkeep import retain

# --- disks that fail ---


async def drive_until_it_fails(folder: Path, ledger: Ledger, fail: Callable[[], None]) -> int:
    """Traffic on a server, then a failure; returns the server's exit code."""
    server = server_in(folder, "")
    server.logs = folder.parent.parent
    await server.start()
    try:
        connection = await open_connection(server.url)
        traffic = asyncio.create_task(Traffic(connection, ledger, 1).until_gone())
        while len(ledger.done) < 100 and not traffic.done():
            await asyncio.sleep(0.01)
        fail()
        async with asyncio.timeout(60):
            await traffic
            return await server.ended()
    finally:
        await server.kill()


async def test_a_power_cut_breaks_no_promise(tmp_path: Path) -> None:
    image, ledger = tmp_path / "image", Ledger()
    make_ext4(image, size=48 << 20)
    with ext4(image, tmp_path / "disk") as disk:
        code = await drive_until_it_fails(disk / "data", ledger, lambda: cut_power(disk))
    assert code == 1
    with ext4(image, tmp_path / "disk") as disk:
        await check(disk / "data", ledger, drain=True)
    assert ledger.complaints == [] and len(ledger.done) >= 100


async def test_a_node_whose_sync_fails_acknowledges_nothing_more_and_ends(tmp_path: Path) -> None:
    """The file system promises space that the disk below it does not have.

    After mounting it anew, acknowledged writes were missing now and then. The kernel's log ("failed
    to convert unwritten extents") suggests that ext4 had called them safe, which is not proved. So
    the books are held against the files before that, which cannot show an answer without a sync:
    `test_whoever_waits_on_a_failing_disk_is_told` and the power cut do.
    """
    ledger = Ledger()
    with tmpfs(tmp_path / "below", size=12 << 20) as below:
        make_ext4(below / "image", size=64 << 20)
        with ext4(below / "image", tmp_path / "disk") as disk:
            code = await drive_until_it_fails(disk / "data", ledger, lambda: fill(below))
            shutil.copytree(disk / "data", tmp_path / "copy")
            (below / "filler").unlink()
    assert code == 1
    assert ledger.unanswered or ledger.acking or ledger.returning, "all was acknowledged"
    await check(tmp_path / "copy", ledger, drain=True)
    assert ledger.complaints == [] and len(ledger.done) >= 100


def fail_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process's disk takes writes and cannot keep them."""

    error = OSError(errno.EIO, "Input/output error")

    def fail(fd: int) -> None:
        raise error

    def fail_later(_: Syncer, fd: int, done: Callable[[OSError | None], None]) -> None:
        asyncio.get_running_loop().call_soon(done, error)

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(Syncer, "sync", fail_later)


ACTS: dict[str, Callable[[Node], Awaitable[object]]] = {
    "put": lambda node: node.put("jobs", b"x"),
    "atomic": lambda node: node.enqueue("jobs", KEYED, atomic=True),
    "pop": lambda node: node.pop("jobs", 5),
    "update": lambda node: node.update("jobs", max_retries=1),
    "purge": lambda node: node.forced("purge", "jobs"),
    "extend": lambda node: node.extend("jobs", node.held, 1000),
    "ack": lambda node: node.ack("jobs", node.held),
    "move": lambda node: node.call(
        "move_to_dlq", topic="jobs", message_id=node.held[0]["message_id"]
    ),
}
KEYED = [{"payload": b"x", "key": b"%d" % i} for i in range(9)]


@pytest.mark.parametrize("act", ACTS)
async def test_whoever_waits_on_a_failing_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    node = await Node(tmp_path / "data").start()
    await node.topic(partitions=2)
    await node.enqueue("jobs", KEYED)
    node.held = await node.pop("jobs", 2)
    with monkeypatch.context() as disk:
        fail_syncs(disk)
        async with asyncio.timeout(60):
            with pytest.raises(Unavailable):
                await ACTS[act](node)
            with pytest.raises(Unavailable, match="cannot go on"):
                await node.put("jobs", b"x")
        async with asyncio.timeout(60):
            with suppress(StorageFailed):  # of the audit trail
                await node.stop()
    await node.start()
    assert sum(await node.counts()) >= 9 or act in ("ack", "purge")  # written, not acknowledged
    await node.stop()


async def test_a_node_does_not_start_on_a_disk_that_cannot_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await Node(tmp_path / "data").start()
    await node.topic()
    await node.stop()
    with monkeypatch.context() as disk:
        fail_syncs(disk)
        async with asyncio.timeout(60):
            with pytest.raises((StorageFailed, Unavailable)):
                await node.start()
    await node.start()
    await node.stop()


async def with_a_damaged_message(node: Node, **config: Any) -> str:
    """A topic with 30 messages, of which the first cannot be read."""
    topic = await node.topic(**config)
    for _ in range(30):
        await node.put(topic, b"x" * 8000)
    await node.call("snapshot", topic=topic)
    await node.restart()
    oldest = min(node.path.rglob("*.seg"))
    data = bytearray(oldest.read_bytes())
    data[3000] ^= 1
    oldest.write_bytes(data)
    return topic


async def test_a_pop_of_a_damaged_message_is_refused(small_node: Node) -> None:
    node = small_node
    topic = await with_a_damaged_message(node)
    async with asyncio.timeout(60):
        with pytest.raises(Corruption):
            await node.pop(topic)
    assert (await node.call("node_status"))["damage"]
    assert len(await node.pop(topic)) == 1  # the next one


async def test_a_message_that_cannot_be_read_is_given_back_and_does_not_die(
    small_node: Node,
) -> None:
    node = small_node
    topic = await with_a_damaged_message(node, max_retries=0)
    async with asyncio.timeout(60):
        with pytest.raises(Corruption):
            await node.pop(topic)
        heap = node.engine.topics[topic].local[0].heap
        while heap.leased:
            await node.call("node_status")
    assert (heap.delayed, heap.dead, heap.ready) == (1, 0, 29)


async def test_a_damaged_message_does_not_keep_its_neighbours(small_node: Node) -> None:
    node = small_node
    topic = await with_a_damaged_message(node)
    stream = await node.stream(topic, credits=10, batch_max=10)
    got = 0
    async with asyncio.timeout(60):
        while got < 9:
            got += (await anext(stream)).delivery.count
    assert node.engine.topics[topic].local[0].heap.delayed == 1


# --- disks that are full ---

ROW = [{"payload": b"x" * 9000}]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", size=2 << 20) as path:
        yield path


@pytest.fixture
def config(disk: Path) -> Config:
    log = LogOptions(segment_bytes=128 << 10, allocate_bytes=64 << 10, reserve_bytes=48 << 10)
    never = UpkeepOptions(snapshot_s=3600, retention_s=3600)
    return Config(data=disk / "data", log=log, upkeep=never, drain_s=5.0)


async def fill_up(node: Node, topic: str) -> int:
    """Enqueue until the node says that the disk is full."""
    for count in range(1000):
        try:
            await node.enqueue(topic, ROW, producer=("p", 1, count + 1))
        except DiskFull:
            return count
    raise AssertionError("the disk has no end")


async def test_a_full_disk_still_settles_and_deletes(config: Config) -> None:
    node = await Node(config.data, config).start()
    topic = await node.topic()
    count = await fill_up(node, topic)
    for _ in range(3):
        with pytest.raises(DiskFull) as refused:
            await node.enqueue(topic, ROW)
        assert refused.value.status == "RESOURCE_EXHAUSTED" and refused.value.retry_after_s > 0
    messages = await node.pop(topic, 30)
    assert await node.ack(topic, messages[:10]) == []
    assert await node.nack(topic, messages[10:20], delay_ms=0) == []
    assert await node.nack(topic, messages[20:], reject=True) == []
    assert await node.forced("dlq_delete", topic) == {"deleted": 10}
    assert await node.forced("purge", topic) == {"purged": count - 20}
    assert await node.counts() == (0, 0, 0, 0)
    assert (await node.call("node_status"))["healthy"]
    await node.stop()
    assert verify_folder(config.data).ok


async def test_enqueues_go_on_once_there_is_space(config: Config) -> None:
    node = await Node(config.data, config).start()
    topic = await node.topic(retention_ms=0)
    count = await fill_up(node, topic)
    await node.ack(topic, await node.pop(topic, count))
    await node.advance(2)
    found = node.engine.topics[topic]
    for _ in range(2):
        await node.call("snapshot", topic=topic)
    assert await retain(node.engine.hosts[found.key(0)], node.clock.now_ms()) > 1 << 20
    await node.advance(2)  # the disk is asked again after a while
    answer = await node.enqueue(topic, ROW, producer=("p", 1, count + 1))  # what was refused
    assert not answer.duplicates and ids_of(answer)
    assert await fill_up_more(node, topic) > count // 2
    await node.stop()
    assert verify_folder(config.data).ok


async def fill_up_more(node: Node, topic: str, **where: int) -> int:
    for count in range(1000):
        try:
            await node.enqueue(topic, ROW, **where)
        except DiskFull:
            return count
    raise AssertionError("the disk has no end")


async def test_a_node_starts_on_a_full_disk_with_all_it_had(config: Config, disk: Path) -> None:
    node = await Node(config.data, config).start()
    topic = await node.topic()
    count = await fill_up(node, topic)
    leased = await node.pop(topic, 5)
    fill(disk)
    await node.restart()
    assert await node.counts() == (count - 5, 0, 5, 0)
    assert await node.ack(topic, leased) == []
    with pytest.raises(DiskFull):
        await node.enqueue(topic, ROW)
    (disk / "filler").unlink()
    await node.advance(2)
    await node.stop()
    assert verify_folder(config.data).ok


async def test_an_atomic_batch_on_a_full_disk_is_refused_whole(config: Config) -> None:
    node = await Node(config.data, config).start()
    topic = await node.topic(partitions=2)
    count = await fill_up_more(node, topic, partition=1)
    rows = [{"payload": b"x" * 9000, "key": b"%d" % i} for i in range(8)]
    with pytest.raises(DiskFull):
        await node.enqueue(topic, rows, atomic=True)
    assert (await node.counts())[0] == count
    await node.restart()
    assert (await node.counts())[0] == count
    await node.stop()


async def test_upkeep_on_a_full_disk_does_not_stop_the_node(config: Config, disk: Path) -> None:
    often = UpkeepOptions(snapshot_s=0.001, retention_s=0.001)
    config = Config(data=config.data, log=config.log, upkeep=often)
    node = await Node(config.data, config).start()
    topic = await node.topic(retention_ms=0)
    await fill_up(node, topic)
    fill(disk)
    for _ in range(4):
        await node.advance(1)
        await asyncio.sleep(0.5)
    assert (await node.call("node_status"))["healthy"]
    assert await node.ack(topic, await node.pop(topic, 20)) == []
    (disk / "filler").unlink()
    async with asyncio.timeout(60):
        while messages := await node.pop(topic, 20):
            await node.ack(topic, messages)
        while await fill_up_more(node, topic) == 0:
            await node.advance(1)
            await asyncio.sleep(0.1)
    await node.stop()
    assert verify_folder(config.data).ok
