"""Kill a server at every named point: nothing acknowledged is lost, leased twice or invented.

Each point has a server and a folder of its own. Two points lie in a start after a crash, so those
folders see two crashes.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.crashing import Ledger, check, crash_once

from verification.crash_points import LOG_POINTS, NODE_POINTS

pytestmark = pytest.mark.timeout(900)

AT_ONCE = 4
AT_START = ("log.recover.zeroed", "node.barrier.staged")
# On which pass to die: late enough for something to be at stake.
PASSES = {
    "log.write": 40, "log.sync": 40, "log.floor": 20, "log.grow": 8, "log.seal": 3, "log.roll": 3,
    "log.snapshot": 5, "log.rewrite": 2, "log.drop": 1, "node.enqueue": 30, "node.ack": 20,
    "node.commit": 60, "node.lease": 20, "node.snapshot": 5, "node.atomic": 10,
}  # fmt: skip
POINTS = [*LOG_POINTS, *NODE_POINTS]


@dataclass
class Outcome:
    exit_code: int
    ledger: Ledger


async def crash_at(point: str, folder: Path) -> Outcome:
    ledger = Ledger()
    if point in AT_START:
        await crash_once(folder, "log.write.torn:40", ledger)
        exit_code = await crash_once(folder, f"{point}:1", ledger, run=2)
    else:
        nth = PASSES[point.rpartition(".")[0]]
        exit_code = await crash_once(folder, f"{point}:{nth}", ledger)
    await check(folder, ledger, drain=True)
    return Outcome(exit_code, ledger)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("crashes")
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(point: str) -> Outcome:
        async with turn:
            return await crash_at(point, root / point)

    async def everything() -> dict[str, Outcome]:
        return dict(zip(POINTS, await asyncio.gather(*map(one, POINTS)), strict=True))

    return asyncio.run(everything())


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_breaks_no_promise(point: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[point]
    assert outcome.exit_code == -signal.SIGKILL, "the point was not reached"
    assert outcome.ledger.complaints == []
    assert len(outcome.ledger.enqueued) > 50 and outcome.ledger.done
