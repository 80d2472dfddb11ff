"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.harness import Node

from penstock.config import Config, UpkeepOptions
from penstock.log.flush import LogOptions


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A running node with a topic-less folder of its own."""
    node = Node(tmp_path / "data")
    await node.start()
    yield node
    await node.stop()


@pytest.fixture
async def small_node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with segments of 64 KiB, so that little traffic fills several."""
    path = tmp_path / "data"
    log = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)
    never = UpkeepOptions(snapshot_s=3600, retention_s=3600)
    node = Node(path, Config(data=path, log=log, upkeep=never, drain_s=5.0))
    await node.start()
    yield node
    await node.stop()
