"""A promise must outlive the process. Chance alone hardly ever draws the story that shows why."""

from dataclasses import replace

import pytest

from verification.checkers import Verdict
from verification.simulation.disk import Disk
from verification.simulation.profiles import PROFILES
from verification.simulation.schedule import MS, SECOND
from verification.simulation.simulation import Simulation

QUIET = replace(PROFILES["calm"], name="quiet", partitions=1, atomics=0, consumers=0, faults={})
OLD, TAKER, THIRD = "n0", "n1", "n2"


def a_replica_forgets_whom_it_promised(seed: int) -> Verdict:
    """The old coordinator is cut off and does not know that it is deposed. The third replica has
    promised the taker, dies, and is told by a store that lags of the old one only."""
    simulation = Simulation(seed, QUIET)
    schedule, store, cut = simulation.schedule, simulation.store, simulation.network.cut
    simulation.start()
    schedule.run_until(SECOND)
    seen = len(store.changes)
    store.cut_off(OLD)
    for other in (TAKER, THIRD):
        cut[OLD, other] = cut[other, OLD] = 1
    while store.records[0][0].coordinator == OLD:
        schedule.run_until(schedule.now + 1 * MS)
    while simulation.nodes[TAKER].hosts[0].replica.coordinator is None:
        schedule.run_until(schedule.now + 1)  # until the third has answered the fence
    simulation.nodes[THIRD].crash("killed")
    cut[OLD, THIRD] = cut[THIRD, OLD] = 0
    cut[TAKER, THIRD] = cut[THIRD, TAKER] = 1
    store.cut_off(THIRD)  # its watch; what it lists is old
    (*_, old) = [change for change in store.changes[:seen] if not isinstance(change, dict)]
    schedule.run_until(schedule.now + SECOND)
    third = simulation.nodes[THIRD]
    third.run(third.on_change, old)
    schedule.run_until(schedule.now + 2 * SECOND)
    for name in (OLD, THIRD):
        store.reconnect(name)
    cut.clear()
    simulation.heal()
    return simulation.verdict()


def test_promises_that_are_kept() -> None:
    assert [problem for seed in range(2) for problem in problems(seed)] == []


def problems(seed: int) -> list[str]:
    return a_replica_forgets_whom_it_promised(seed).problems


def test_promises_that_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Disk, "persist", lambda disk, promised, done: disk._after(0, done, promised)
    )
    assert any(problems(seed) for seed in range(2))
