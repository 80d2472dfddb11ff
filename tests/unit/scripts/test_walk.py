"""A request crosses few modules, and the script that counts them sees all of it."""

import asyncio
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "walk.py"
BOUNDS = {"put": (35, 180), "pop": (56, 450), "delta": (50, 370)}  # modules, calls


@pytest.mark.parametrize("way", BOUNDS)
def test_a_way_is_short(way: str) -> None:
    walk: dict[str, Any] = runpy.run_path(str(SCRIPT))
    steps = asyncio.run(walk["WAYS"][way]())
    found = walk["counted"](steps)
    modules, calls = BOUNDS[way]
    assert found["modules"] <= modules and found["calls"] <= calls, found
    rooms = {step.room for step in steps}
    assert {"client", "wire", "log"} <= {room.split("/")[0] for room in rooms}
    assert [step.us for step in steps] == sorted(step.us for step in steps)


def test_a_takeover_is_traced_in_the_node_that_takes_over() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "takeover", "--json"], capture_output=True, check=True
    )
    found = json.loads(done.stdout)
    names = {step["name"] for step in found["steps"]}
    assert any(name.startswith("Replica.") for name in names)
    assert found["calls"] == len(found["steps"]) > found["modules"] > 20
