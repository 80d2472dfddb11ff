"""Ticks of a load: none too early, none lost."""

from __future__ import annotations

import time

import pytest

from penstock.bench.live.ticks import ticks


async def test_ticks_come_when_they_are_due() -> None:
    seen = [(due, time.perf_counter()) async for due in ticks(0.002, 30)]
    assert all(now >= due for due, now in seen)
    first = seen[0][0]
    wanted = [first + 0.002 * number for number in range(30)]
    assert [due for due, _ in seen] == pytest.approx(wanted)


async def test_what_was_missed_comes_at_once() -> None:
    seen: list[float] = []
    woke = 0.0
    async for due in ticks(0.002, 10):
        if not seen:
            time.sleep(0.03)  # nobody looks at the timer meanwhile
            woke = time.perf_counter()
        seen.append(due)
    assert len(seen) == 10
    assert max(seen) < woke
