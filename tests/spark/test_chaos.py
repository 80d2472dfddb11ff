"""Kills under load, then the audit: the short form of `scripts/pipeline_chaos.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark import chaos


@pytest.mark.timeout(900)
async def test_kills_of_driver_node_and_redis_lose_and_double_nothing(tmp_path: Path) -> None:
    kills = ["redis", "node", "driver"]
    found = await chaos.play(tmp_path, kills=kills, rows=10_000, seconds=15, seed=1)
    assert found["put"] == 10_000
    assert found["ok"], found
    assert set(found["sinks"]) == {"lake", "index", "cache"}


@pytest.mark.timeout(900)
async def test_a_cluster_that_shares_nothing_but_a_store_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    kills = ["executor", "zombie", "driver"]
    with chaos.on_cluster(tmp_path) as stage:
        found = await chaos.play(tmp_path, kills=kills, rows=6_000, seconds=20, seed=2, stage=stage)
    assert found["put"] == 6_000
    assert found["ok"], found
    assert set(found["sinks"]) == {"lake", "index", "cache"}
