"""Chaos in short: three nodes, ten faults, and every promise kept."""

import json
from pathlib import Path

import pytest
from tests.chaos.playing import play
from tests.chaos.schedule import QUICK, WEIGHTS, plan


def test_a_seed_decides_the_schedule() -> None:
    one, two = (plan(seconds=600, count=60, seed=7) for _ in range(2))
    assert one == two != plan(seconds=600, count=60, seed=8)
    assert len(one) == 60 and {planned.kind for planned in one} == set(WEIGHTS)
    assert one[0].at_s > 0 and one[-1].at_s < 600


@pytest.mark.timeout(400)
async def test_nothing_is_lost_while_everything_breaks(tmp_path: Path) -> None:
    verdict = await play(
        tmp_path / "chaos", seconds=90, faults=len(QUICK), kinds=QUICK, seed=1, say=print
    )
    text = json.dumps(verdict, indent=2)
    assert verdict["ok"], text
    assert verdict["faults"] >= 8, text
    assert {"kill", "pause", "cut_one_way", "etcd_kill"} <= verdict["faults_by_kind"].keys()
    assert verdict["acknowledged"] > 300 and verdict["settled"] > 300, text
