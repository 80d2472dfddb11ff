"""What an attack is given, and the list of all attacks.

An attack is a coroutine that opens connections of its crowd, holds them for a while and returns;
the runner closes what it left open. What it expects beyond the bars it says by `expect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.hostile.crowd import FAR, Crowd, Tally
from tests.hostile.site import CLOSED, OPEN, Profile, Site


@dataclass
class Stage:
    site: Site
    crowd: Crowd
    tally: Tally
    seconds: float  # that an attack holds what it has
    problems: list[str] = field(default_factory=list)

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    async def hold(self) -> None:
        await asyncio.sleep(self.seconds)


Play = Callable[[Stage], Awaitable[None]]


class Attack(NamedTuple):
    name: str
    play: Play
    profiles: tuple[Profile, ...]
    short: Profile | None  # where the short form plays it
    sources: tuple[str, ...]
    about: str


ATTACKS: Final[dict[str, Attack]] = {}


def attack(
    *profiles: Profile, short: Profile | None = None, sources: Sequence[str] = FAR
) -> Callable[[Play], Play]:
    """Register an attack under its function's name; its docstring says what it is."""

    def register(play: Play) -> Play:
        name = play.__name__
        about = (play.__doc__ or "").strip().splitlines()[0]
        where = profiles or (OPEN, CLOSED)
        ATTACKS[name] = Attack(name, play, where, short, tuple(sources), about)
        return play

    return register
