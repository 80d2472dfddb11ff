"""Work that an engine runs beside everything else, and what is left of it when the node stops."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.harness import Node

from penstock.node.engine import Engine


async def work() -> None:
    raise AssertionError("it was cancelled before it began")


@pytest.mark.parametrize(
    "spawn",
    [
        lambda engine: engine.spawn(work(), name="work"),
        lambda engine: engine.spawn(work(), name="work", vital=True),
    ],
)
async def test_work_that_never_began_leaves_no_coroutine_behind(
    tmp_path: Path, spawn: Callable[[Engine], object]
) -> None:
    """Before, a node that stopped in the same turn wrote that a coroutine was never awaited."""
    node = await Node(tmp_path / "data").start()
    engine = node.engine
    before = set(engine.spawned)
    spawn(engine)
    for task in engine.spawned - before:
        task.cancel()
    await node.stop()
    gc.collect()  # a coroutine that is left complains here, which fails the test
    assert engine.fatal_error is None
