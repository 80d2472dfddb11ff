"""What the tests of the live path share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.conftest import small_node
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import delta_topic

__all__ = ["node", "small_node"]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A running node with a delta topic of one partition, on a clock that stands still."""
    node = Node(tmp_path / "data")
    await node.start()
    await delta_topic(node)
    yield node
    await node.stop()
