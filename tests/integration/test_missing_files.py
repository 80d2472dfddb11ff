"""Files of a data folder are missing: a node says which, and begins nothing anew in their place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.integration.harness import Node

from penstock.errors import Corruption
from penstock.log.folder import INVENTORY_FILE, read_contents
from penstock.log.verify import verify_folder


def empty(folder: Path) -> None:
    for each in folder.iterdir():
        each.unlink()


LOSSES: dict[str, Callable[[Path], object]] = {
    "meta": lambda data: shutil.rmtree(data / "meta"),
    "store": lambda data: (data / "meta" / "store.bin").unlink(),
    "partition": lambda data: shutil.rmtree(data / "topics" / "00000001" / "0001"),
    "content": lambda data: empty(data / "topics" / "00000001" / "0000"),
    "topic": lambda data: shutil.rmtree(data / "topics" / "00000001"),
    "topics": lambda data: shutil.rmtree(data / "topics"),
    "all": lambda data: [shutil.rmtree(data / name) for name in ("topics", "meta")],
    "inventory": lambda data: (data / INVENTORY_FILE).unlink(),
}


async def with_messages(node: Node) -> None:
    await node.topic("jobs", partitions=2)
    for partition in (0, 1):
        await node.enqueue("jobs", [{"payload": b"old"}], partition=partition)
    await node.stop()


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_node_refuses_to_start_without_what_belongs_to_its_folder(
    node: Node, loss: str
) -> None:
    """Before, it started as if nothing had ever been there, and `fsck` said ok."""
    await with_messages(node)
    assert verify_folder(node.path).ok
    LOSSES[loss](node.path)
    with pytest.raises(Corruption, match="--accept-missing") as refused:
        await node.start()
    assert refused.value.details["file"].startswith(str(node.path))
    if loss != "inventory":  # `fsck` cannot tell it from a folder that never had one
        report = verify_folder(node.path)
        assert not report.ok and report.first_bad is not None


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_new_topic_never_serves_what_an_old_one_left(node: Node, loss: str) -> None:
    """Before, the first topic that was made after `meta` was gone had the old one's messages."""
    await with_messages(node)
    LOSSES[loss](node.path)
    node.config = msgspec.structs.replace(node.config, accept_missing=True)
    await node.start()
    await node.topic("other", partitions=2)
    assert await node.counts("other") == (0, 0, 0, 0)
    await node.put("other", b"new")
    node.config = msgspec.structs.replace(node.config, accept_missing=False)
    await node.restart()
    assert await node.popped("other") == [b"new"]


async def test_a_folder_from_before_inventories_opens_and_gets_one(node: Node) -> None:
    await with_messages(node)
    (node.path / INVENTORY_FILE).unlink()
    (node.path / "FORMAT").write_text('{"format": 1, "product": "penstock"}')
    await node.start()
    assert (await node.counts("jobs"))[0] == 2
    await node.stop()
    contents = read_contents(node.path)
    assert contents is not None and contents.meta
    assert sorted(contents.partitions) == ["00000001/0000", "00000001/0001"]
    shutil.rmtree(node.path / "topics")
    with pytest.raises(Corruption):
        await node.start()


async def test_a_damaged_inventory_is_named(node: Node) -> None:
    await with_messages(node)
    (node.path / INVENTORY_FILE).write_bytes(b'{"version": 1, "crc": 7}\n{}\n')
    with pytest.raises(Corruption, match="inventory cannot be read"):
        await node.start()
    assert not verify_folder(node.path).ok


async def test_a_deleted_topic_is_not_missed(node: Node) -> None:
    await node.topic("jobs", partitions=2)
    await node.forced("topic_delete", "jobs")
    await node.topic("next")
    await node.restart()
    contents = read_contents(node.path)
    assert contents is not None and contents.topics == {"00000002": "next"}


async def test_a_folder_that_nothing_names_is_not_taken_over(node: Node) -> None:
    """Before, the new topic got the folder's id, and making it failed with Corruption at the log
    that lay there."""
    await with_messages(node)
    shutil.copytree(node.path / "topics" / "00000001", node.path / "topics" / "00000002")
    await node.start()
    await node.topic("other")
    assert node.engine.topics["other"].config.id == 3
    assert await node.counts("other") == (0, 0, 0, 0)
    await node.stop()
    report = verify_folder(node.path)
    assert any("not in the inventory" in note for note in report.notes)
