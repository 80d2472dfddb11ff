"""Chaos in short: three nodes, ten faults, and every promise kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.chaos.judging import UNMEASURED, summed
from tests.chaos.playing import Run, play
from tests.chaos.schedule import QUICK, WEIGHTS, plan

from verification.checkers import VIOLATIONS, Verdict


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
    assert {"kill", "pause", "cut_one_way", "etcd_kill"} <= verdict["faults_by_kind"].keys()
    assert verdict["acknowledged"] > 300 and verdict["settled"] > 300, text


def document(tmp_path: Path, *, done: dict[str, int]) -> dict[str, Any]:
    """The verdict on a run of two faults in which nothing else went wrong."""
    arena: Any = SimpleNamespace(endpoints=list, exits=[])
    run = Run(tmp_path, arena, planned=2, seed=1, say=print)
    run.history.close()
    run.done.update(done)
    run.progress |= {"healed": True, "workers_late": 0}
    return run.document({"ok": True, "problems": []}, [])


def test_a_run_counts_only_if_its_faults_were_played(tmp_path: Path) -> None:
    assert document(tmp_path, done={"kill": 1, "pause": 1})["ok"]
    fewer = document(tmp_path, done={"kill": 1})
    assert not fewer["ok"]
    assert fewer["problems"] == ["1 of 2 faults were played"]


def test_a_verdict_names_only_what_was_measured() -> None:
    assert not set(UNMEASURED) & summed([Verdict(), Verdict()]).keys()
    assert set(UNMEASURED) < set(VIOLATIONS)
    assert not summed([Verdict(), Verdict(undone=1)])["ok"]
