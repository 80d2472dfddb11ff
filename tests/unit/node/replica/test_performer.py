"""Effects one after the other: a slow one holds the others up, a broken one is told."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

from penstock.errors import Corruption
from penstock.node.replica.performer import Performer, Slow
from penstock.replication.effects import Commit, Effect, Effects


class Stage:
    """Performs commits: an odd sequence takes a while, 13 is damage, 17 is a mistake of ours."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.errors: list[BaseException] = []
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.performing = Performer(
            self.do,
            perform=lambda effects: self.performing.add(effects),
            spawn=self.spawn,
            on_error=self.errors.append,
            on_fatal=self.errors.append,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    def do(self, effect: Effect) -> Slow | None:
        assert isinstance(effect, Commit)
        if effect.sequence == 13:
            raise Corruption("damaged")
        if effect.sequence == 17:
            raise ZeroDivisionError
        if effect.sequence % 2:
            return self.slowly(effect.sequence)
        self.done.append(effect.sequence)
        return None

    async def slowly(self, sequence: int) -> Effects:
        await self.go.wait()
        self.done.append(sequence)
        return []


async def test_what_follows_a_slow_effect_waits_for_it() -> None:
    stage = Stage()
    stage.performing.add([Commit(2), Commit(3), Commit(4)])
    assert stage.done == [2]
    stage.go.set()
    while len(stage.done) < 3:
        await asyncio.sleep(0)
    assert stage.done == [2, 3, 4]


async def test_a_slow_effect_that_never_began_leaves_no_coroutine_behind() -> None:
    """Before, a node that stopped in the same turn wrote that a coroutine was never awaited."""
    stage = Stage()
    stage.performing.add([Commit(3)])
    for task in stage.tasks:
        task.cancel()
    await asyncio.gather(*stage.tasks, return_exceptions=True)
    await asyncio.sleep(0)
    gc.collect()  # a coroutine that is left complains here, which fails the test
    assert stage.done == []


async def test_whatever_an_effect_raises_is_told() -> None:
    stage = Stage()
    stage.performing.add([Commit(13)])
    stage.performing.add([Commit(17)])
    assert [type(error) for error in stage.errors] == [Corruption, ZeroDivisionError]


async def test_nothing_is_done_after_the_end() -> None:
    stage = Stage()
    stage.performing.stop()
    stage.performing.add([Commit(2)])
    assert stage.done == []
