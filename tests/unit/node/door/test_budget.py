"""The budget of what callers make a node hold: shares, room for who holds little, and relief."""

from __future__ import annotations

import asyncio

import pytest

from penstock.config import Limits
from penstock.errors import Backpressure
from penstock.node.door import budget as module
from penstock.node.door.budget import LITTLE_BYTES, Account, Budget, Held
from penstock.node.door.flow import Flow

MIB = 1 << 20
FRAME = 64 * MIB + 20


@pytest.fixture
def budget() -> Budget:
    return Budget(112 * MIB)


class Caller:
    """Holds what it is told to, and lets go of it when it is cut off."""

    def __init__(self, budget: Budget, *, stuck_s: float = 0.0, overdue: str | None = None) -> None:
        self.account = budget.account(self)
        self._stuck_s, self._overdue = stuck_s, overdue
        self.evicted: str | None = None

    def stuck_s(self) -> float:
        return self._stuck_s

    def overdue(self) -> str | None:
        return self._overdue

    def evict(self, reason: str) -> None:
        self.evicted = reason
        self.account.hold(0, Held.FRAMES)
        self.account.close()


def filled(account: Account, step: int) -> int:
    """Take as much as there is room for, in steps."""
    while account.has_room(step):
        account.take(step, Held.FRAMES)
    return account.held


def test_the_largest_frame_fits_and_a_second_caller_still_finds_room(budget: Budget) -> None:
    first, second = budget.account(), budget.account()
    first.check(FRAME)
    first.take(FRAME, Held.FRAMES)
    with pytest.raises(Backpressure):
        second.check(FRAME)
    second.check(16 * MIB)


def test_however_many_callers_there_are_something_is_left(budget: Budget) -> None:
    shares = [filled(budget.account(), MIB) for _ in range(40)]
    assert shares[0] > 60 * MIB and sum(shares) <= budget.bytes_large_max
    for _ in range(40):  # who holds little finds room besides
        little = budget.account()
        little.check(LITTLE_BYTES)
        little.take(LITTLE_BYTES, Held.REQUESTS)


def test_connections_of_one_key_share(budget: Budget) -> None:
    held = [filled(budget.account(key_id="a"), MIB) for _ in range(10)]
    alone = sum(held)
    assert held[0] == alone
    joined = budget.account()
    joined.join("a")
    assert not joined.has_room(2 * MIB) and budget.account(key_id="b").has_room(2 * MIB)


def test_what_is_given_back_is_free_again(budget: Budget) -> None:
    account = budget.account()
    account.hold(5 * MIB, Held.ANSWERS)
    assert budget.by_kind[Held.ANSWERS] == budget.held == account.party.held == 5 * MIB
    account.hold(0, Held.ANSWERS)
    account.close()
    assert budget.held == account.held == 0 and not any(budget.by_kind)


def test_who_is_stuck_makes_way_for_who_holds_little(budget: Budget) -> None:
    stuck = [Caller(budget, stuck_s=1 + n) for n in range(budget.bytes_max // LITTLE_BYTES)]
    for caller in stuck:
        caller.account.take(LITTLE_BYTES, Held.FRAMES)
    budget.account().check(1000)
    gone = [caller for caller in stuck if caller.evicted == "held_bytes"]
    assert gone == stuck[-len(gone) :] and budget.bytes_max // 16 < len(gone) * LITTLE_BYTES


def test_who_is_not_stuck_is_not_cut_off(budget: Budget) -> None:
    reasons: list[str] = []
    budget.on_refused = reasons.append
    busy = Caller(budget)
    busy.account.take(budget.bytes_max, Held.FRAMES)
    with pytest.raises(Backpressure) as refused:
        budget.account().check(1000)
    assert refused.value.retry_after_s > 0 and reasons == ["held_bytes"] and not busy.evicted


async def test_who_waits_for_room_gets_it(budget: Budget) -> None:
    first, second = budget.account(), budget.account()
    first.take(FRAME, Held.BODIES)
    waiting = asyncio.ensure_future(second.acquire(FRAME, Held.BODIES))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.give_back(FRAME, Held.BODIES)
    await waiting
    assert second.held == FRAME == budget.held


async def test_who_waits_too_long_is_refused(
    budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    budget.account().take(FRAME, Held.BODIES)
    with pytest.raises(Backpressure):
        await budget.account().acquire(FRAME, Held.BODIES)
    assert not budget.waiting and budget.held == FRAME


async def test_who_is_overdue_is_cut_off(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_S", 0.01)
    reasons: list[str] = []
    budget.on_evicted = reasons.append
    late, in_time = Caller(budget, overdue="frame"), Caller(budget)
    budget.watch(late)
    budget.watch(in_time)
    async with asyncio.timeout(10):
        while not late.evicted:
            await asyncio.sleep(0.01)
    assert reasons == ["frame"] and not in_time.evicted
    budget.unwatch(in_time)


# --- frames that are not whole ---


def flow_of(budget: Budget) -> Flow:
    return Flow(budget, Limits(), lambda reason: None)


def test_small_frames_that_are_not_whole_have_half_of_the_budget(budget: Budget) -> None:
    """Before, 1800 connections could hold 60 KiB each, and what they took themselves on top."""
    part = 60 << 10
    count = 0
    while (flow := flow_of(budget)).account.has_room(part, Held.FRAMES):
        flow.hold_frame(part)
        count += 1
    assert count == budget.bytes_max // 2 // part
    assert flow.account.has_room(part, Held.REQUESTS)  # a whole one is another matter


def test_a_large_frame_leaves_small_ones_their_part(budget: Budget) -> None:
    large = flow_of(budget)
    large.hold_frame(LITTLE_BYTES)
    large.hold_frame(FRAME)
    assert budget.parts == 0 and flow_of(budget).account.has_room(LITTLE_BYTES, Held.FRAMES)
    large.end()
    assert budget.parts == 0 and budget.held == 0


def test_small_frames_that_are_stuck_make_way_for_several(
    budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one went for each that comes, the next would be refused until it is looked again."""
    monkeypatch.setattr(module, "STUCK_S", -1.0)
    cut_off: list[str] = []
    stuck = [Flow(budget, Limits(), cut_off.append) for _ in range(budget.parts_max >> 18)]
    for flow in stuck:
        flow.hold_frame(LITTLE_BYTES)
    assert flow_of(budget).account.makes_room(1000, Held.FRAMES)
    assert len(cut_off) * LITTLE_BYTES >= budget.bytes_max // 8
    assert budget.parts == (len(stuck) - len(cut_off)) * LITTLE_BYTES
