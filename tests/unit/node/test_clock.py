"""Clocks: manual time fires timers at their moments; system time never steps back."""

import asyncio

from penstock.node.clock import Alarm, ManualClock, SystemClock


def test_timers_fire_in_order_and_at_their_own_moment() -> None:
    clock = ManualClock(start_ms=1000)
    seen: list[tuple[str, int]] = []
    clock.call_at(3000, lambda: seen.append(("late", clock.now_ms())))
    clock.call_at(2000, lambda: seen.append(("early", clock.now_ms())))
    clock.advance(1.5)
    assert seen == [("early", 2000)]
    clock.advance(1)
    assert seen == [("early", 2000), ("late", 3000)]
    assert clock.now_ms() == 3500


def test_a_timer_set_by_a_timer_fires_in_the_same_advance() -> None:
    clock = ManualClock(start_ms=0)
    seen: list[int] = []
    clock.call_at(10, lambda: clock.call_at(20, lambda: seen.append(clock.now_ms())))
    clock.advance(1)
    assert seen == [20]


def test_a_cancelled_timer_does_not_fire() -> None:
    clock = ManualClock(start_ms=0)
    seen: list[int] = []
    clock.call_at(10, lambda: seen.append(1)).cancel()
    clock.advance(1)
    assert not seen


async def test_a_system_timer_is_never_early() -> None:
    clock = SystemClock()
    fired = asyncio.get_running_loop().create_future()
    due = clock.now_ms() + 20
    clock.call_at(due, lambda: fired.set_result(clock.now_ms()))
    assert await fired >= due


def test_an_alarm_rings_once_at_the_earliest_time_it_was_set_to() -> None:
    clock = ManualClock(0)
    rung: list[int] = []
    alarm = Alarm(clock, lambda: rung.append(clock.now_ms()))
    for when_ms in (50, 20, 30):
        alarm.set(when_ms)
    clock.advance(0.1)
    assert (rung, alarm.when_ms) == ([20], None)
    alarm.set(120)
    alarm.cancel()
    clock.advance(0.1)
    assert rung == [20]
