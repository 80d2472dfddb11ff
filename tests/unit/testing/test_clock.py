"""A clock that only a test moves."""

import asyncio
import threading

from penstock.testing.clock import AdvancingClock


def test_time_stands_still_until_it_is_advanced() -> None:
    clock = AdvancingClock(1000)
    fired: list[int] = []
    clock.call_at(1500, lambda: fired.append(clock.now_ms()))
    clock.advance(0.4)
    assert (clock.now_ms(), fired) == (1400, [])
    clock.advance(10)
    assert (clock.now_ms(), fired) == (11_400, [1500])


async def test_another_thread_advances_it_on_the_loop_s_own_thread() -> None:
    clock = AdvancingClock(0)
    clock.attach(asyncio.get_running_loop())
    threads: list[int] = []
    clock.call_at(5, lambda: threads.append(threading.get_ident()))
    await asyncio.to_thread(clock.advance, 1)
    assert threads == [threading.get_ident()]
