"""Topics on a disk that is full: made, opened again, and deleted to get out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.harness import Node
from tests.integration.test_storage_failures import ROW, fill_up
from tests.unit.log.mounts import fill, tmpfs

from penstock.config import Config, UpkeepOptions
from penstock.errors import DiskFull, NotFound
from penstock.log.flush import LogOptions
from penstock.log.verify import verify_folder
from penstock.model.batch import Kind


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", size=4 << 20) as path:
        yield path


@pytest.fixture
def config(disk: Path) -> Config:
    log = LogOptions(segment_bytes=128 << 10, allocate_bytes=64 << 10, reserve_bytes=48 << 10)
    never = UpkeepOptions(snapshot_s=3600, retention_s=3600)
    return Config(data=disk / "data", log=log, upkeep=never, drain_s=5.0)


async def names(node: Node) -> list[str]:
    return [topic["name"] for topic in (await node.call("topic_list"))["topics"]]


@pytest.mark.parametrize("kind", [{}, {"kind": "delta", "dimensions": 2}, {"partitions": 20}])
async def test_a_topic_that_finds_no_space_is_not_made(
    config: Config, disk: Path, kind: dict[str, Any]
) -> None:
    """Before, the call failed, the topic was recorded all the same, and a node with such a topic
    of a queue could not start again."""
    node = await Node(config.data, config).start()
    topic = await node.topic()
    await fill_up(node, topic)
    fill(disk)
    for _ in range(2):
        with pytest.raises(DiskFull):
            await node.topic("more", **kind)
    assert await names(node) == ["jobs"]
    await node.restart()
    assert await names(node) == ["jobs"]
    assert await node.ack(topic, await node.pop(topic, 10)) == []
    await node.forced("topic_delete", topic)
    (disk / "filler").unlink()
    await node.topic("more", **kind)
    await node.stop()
    assert verify_folder(config.data).ok


async def test_a_topic_whose_space_goes_to_another_meanwhile_is_undone(
    config: Config, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the disk and the files others may take what there was."""
    node = await Node(config.data, config).start()
    monkeypatch.setattr(node.engine.room, "check", lambda _: fill(disk))
    with pytest.raises(DiskFull):
        await node.topic("more", partitions=3)
    assert await names(node) == []
    assert list((config.data / "topics").iterdir()) == []
    monkeypatch.undo()
    (disk / "filler").unlink()
    await node.topic("more", partitions=3)
    assert (await node.call("node_status"))["healthy"]
    await node.stop()


async def half_made(node: Node, disk: Path) -> None:
    """A topic that is recorded and has no files, as a crash in the middle leaves it."""
    await node.engine.catalog.create({"name": "half", "partitions": 2})
    await node.stop()
    fill(disk)
    await node.start()


async def test_a_node_with_a_half_made_topic_starts_on_a_full_disk(
    config: Config, disk: Path
) -> None:
    """Before, it did not start until there was space."""
    node = await Node(config.data, config).start()
    topic = await node.topic()
    await node.put(topic, b"x")
    await half_made(node, disk)
    assert await names(node) == ["half", "jobs"]
    assert await node.popped(topic) == [b"x"]
    with pytest.raises(DiskFull, match="topic half is not open"):
        await node.put("half", b"y")
    status = await node.call("node_status")
    assert status["healthy"] and [t["topic"] for t in status["unopened"]] == ["half"]
    (disk / "filler").unlink()
    async with asyncio.timeout(60):
        while (await node.call("node_status"))["unopened"]:
            await asyncio.sleep(0.1)
    assert len(await node.put("half", b"y")) == 1
    await node.stop()
    assert verify_folder(config.data).ok


async def test_a_half_made_topic_can_be_deleted_on_a_full_disk(config: Config, disk: Path) -> None:
    """Before, there was no node to ask for it."""
    node = await Node(config.data, config).start()
    await half_made(node, disk)
    await node.forced("topic_delete", "half")
    assert await names(node) == []
    with pytest.raises(NotFound):
        await node.put("half", b"y")
    await node.restart()
    assert (await node.call("node_status"))["unopened"] == []
    await node.stop()


async def test_a_topic_without_any_room_left_does_not_keep_the_node_from_starting(
    config: Config, disk: Path
) -> None:
    """Settling uses up what is reserved, and every start takes a little. Before, the start that
    found no more of it failed, and so did all later ones."""
    node = await Node(config.data, config).start()
    topic = await node.topic(max_retries=1000)
    other = await node.topic("other")
    await node.put(other, b"x")
    await fill_up(node, topic)
    fill(disk)
    log = node.engine.topics[topic].local[0].log
    async with asyncio.timeout(60):
        while log.room(False) > 2000:
            messages = await node.pop(topic, 5)
            if not messages:
                break
            await node.nack(topic, messages, delay_ms=0)
    partition = node.engine.topics[topic].local[0]
    while partition.has_room(900):  # what leases leave, for instance to a purge
        partition.append_record(Kind.SNAPSHOT_MARK, 1, {"through": [1]})
    node.engine.topics[topic].wake()
    await node.settled()
    node.engine.reserve.release()
    fill(disk)
    await node.restart()
    assert await node.popped(other) == [b"x"]
    assert (await node.call("node_status"))["healthy"]
    await node.forced("topic_delete", topic)
    await node.enqueue(other, ROW)
    await node.stop()
    assert verify_folder(config.data).ok
