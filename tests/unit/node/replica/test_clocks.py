"""What a node makes of the others' clocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import Unavailable
from penstock.node.clock import ManualClock
from penstock.node.replica.clocks import (
    JOINING_S,
    KEPT_S,
    Clocks,
    ClockVerdict,
    ClockWatch,
    Difference,
)

HOUR_MS = 3_600_000


def judged(*ahead_ms: float, members: int = 0, error_ms: float = 1.0) -> Clocks:
    """A clock among others that are so much ahead of it, and members that have not answered."""
    clocks = Clocks("a", tolerance_ms=2000)
    for number, ahead in enumerate(ahead_ms):
        clocks.on_difference(f"n{number}", Difference(ahead, error_ms, 0.0))
    clocks.judge({"a", *(f"m{number}" for number in range(members))}, 0.0)
    return clocks


@pytest.mark.parametrize(
    ("ahead_ms", "members", "verdict"),
    [
        ((), 0, ClockVerdict.AGREED),  # nobody else is there
        ((), 2, ClockVerdict.UNSURE),  # nobody has answered
        ((0, 0), 0, ClockVerdict.AGREED),
        ((0, HOUR_MS), 0, ClockVerdict.AGREED),
        ((HOUR_MS, HOUR_MS), 0, ClockVerdict.OFF),
        ((-HOUR_MS, -HOUR_MS), 0, ClockVerdict.OFF),
        ((HOUR_MS,), 0, ClockVerdict.UNSURE),  # one against one
        ((HOUR_MS,), 1, ClockVerdict.UNSURE),
        ((HOUR_MS, -HOUR_MS), 0, ClockVerdict.OFF),  # three times of day: none has a majority
        ((0, 0, HOUR_MS, HOUR_MS), 0, ClockVerdict.AGREED),
        ((1999, -1999), 0, ClockVerdict.AGREED),
        ((2002, 2002), 0, ClockVerdict.OFF),
    ],
)
def test_a_majority_decides(ahead_ms: tuple[int, ...], members: int, verdict: ClockVerdict) -> None:
    assert judged(*ahead_ms, members=members).verdict is verdict


def test_a_difference_is_no_more_exact_than_the_answer_was_quick() -> None:
    assert judged(2500, 2500, error_ms=600).verdict is ClockVerdict.AGREED
    assert judged(HOUR_MS, HOUR_MS, error_ms=2001).verdict is ClockVerdict.AGREED, (
        "of no use at all"
    )


def test_who_was_off_must_be_well_within_the_bound_to_return() -> None:
    clocks = judged(HOUR_MS, HOUR_MS)
    for ahead_ms, verdict in (
        (1500, ClockVerdict.OFF),
        (900, ClockVerdict.AGREED),
        (1500, ClockVerdict.AGREED),
    ):
        for node in ("n0", "n1"):
            clocks.on_difference(node, Difference(ahead_ms, 1.0, 0.0))
        assert clocks.judge({"a"}, 0.0) is verdict


def test_a_node_that_joins_waits_for_the_others_and_not_for_ever() -> None:
    clocks = judged(members=2)
    assert clocks.barred and clocks.verdict is ClockVerdict.UNSURE
    clocks.judge({"a", "b", "c"}, JOINING_S)
    assert not clocks.barred
    clocks = judged(members=2)
    for node in ("m0", "m1"):
        clocks.on_difference(node, Difference(0, 1.0, 0.1))
    clocks.judge({"a", "m0", "m1"}, 0.1)
    assert clocks.agreed and not clocks.barred


def test_what_was_measured_is_kept_for_a_while() -> None:
    clocks = judged(HOUR_MS, HOUR_MS)
    assert clocks.judge({"a"}, KEPT_S - 1) is ClockVerdict.OFF
    assert clocks.judge({"a"}, KEPT_S) is ClockVerdict.AGREED


@pytest.mark.parametrize(
    ("ahead_ms", "latest_ms"),
    [((), 0), ((-HOUR_MS,), -HOUR_MS), ((HOUR_MS,), 0), ((-HOUR_MS, -5), -5), ((5, HOUR_MS), 5)],
)
def test_time_begins_where_a_majority_has_arrived(
    ahead_ms: tuple[int, ...], latest_ms: int
) -> None:
    assert judged(*ahead_ms).latest_ms(HOUR_MS) == HOUR_MS + latest_ms


class Neighbours:
    """Nodes whose clocks show another time, and one that does not answer."""

    def __init__(self, clock: ManualClock, *ahead_ms: int) -> None:
        self._clock, self._ahead_ms = clock, ahead_ms
        self.nodes = [f"n{number}" for number in range(len(ahead_ms))]
        self.coordinated = 3
        self.clocks = Clocks("a", tolerance_ms=2000)
        self.watch = ClockWatch(
            self.clocks, clock, ask=self.ask, reached=lambda: [*self.nodes, "deaf"],
            members=lambda: ["a", *self.nodes], hand_over=self.hand_over,
        )  # fmt: skip

    async def ask(self, node: str, method: str, *, within_s: float) -> dict[str, Any]:
        assert method == "replica_clock"
        if node == "deaf":
            raise Unavailable("it does not answer")
        return {"time_ms": self._clock.now_ms() + self._ahead_ms[self.nodes.index(node)]}

    async def hand_over(self) -> bool:
        self.coordinated -= 1
        return not self.coordinated


class WallClock(ManualClock):
    """A clock that was set wrong, and reads right once it is read again."""

    wrong_ms = -HOUR_MS
    read = 0

    def resync(self) -> int:
        self.read += 1
        self._now_ms += self.wrong_ms
        step_ms, self.wrong_ms = self.wrong_ms, 0
        return step_ms


async def test_the_clock_is_read_anew_once_nothing_is_coordinated_here() -> None:
    clock = WallClock()
    around = Neighbours(clock, -HOUR_MS, -HOUR_MS)
    around._ahead_ms = (-HOUR_MS, -HOUR_MS)
    for _ in range(2):
        await around.watch.look()
        assert around.clocks.barred and clock.read == 0
    await around.watch.look()
    assert clock.read == 1
    around._ahead_ms = (0, 0)
    await around.watch.look()
    assert around.clocks.agreed and clock.read == 1


async def test_a_new_neighbour_is_asked_at_once() -> None:
    around = Neighbours(ManualClock(), 0, 0)
    await around.watch.look()
    assert around.clocks.agreed
    running = asyncio.ensure_future(around.watch.run())
    while not running.done():
        around.watch.wake()
        await asyncio.sleep(0)
