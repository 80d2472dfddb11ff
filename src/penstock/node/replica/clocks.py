"""How this node's clock compares with those of the others, and what follows from it.

The time of a partition is its coordinator's, so a coordinator whose clock is an hour ahead would
end every delay and lease of it an hour early. Nodes therefore ask each other for the time, over the
connections that they have anyway. An answer gives the difference of two clocks with a bound: it was
read at some moment between the question and the answer.

- AGREED: a majority of the nodes shows our time, give or take `clock_offset_s`.
- OFF: a majority shows another one. We coordinate nothing: what is served here is handed over, and
  the machine's clock is read again until it is right.
- UNSURE: too few have answered, or they are divided. We may coordinate, but the time of a partition
  begins no later than what a majority of the clocks has reached (`latest_ms`).

Clocks run by the monotonic one (`SystemClock`), so a difference once measured stays true while both
processes live. It is kept for a while after its node has gone: the survivors of a crash still know
whose clock was right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from penstock.errors import PenstockError
from penstock.node.clock import Clock
from penstock.node.observe.logs import get_logger
from penstock.replication.assignment import majority_of

ASK_EVERY_S: Final = 1.0
JOINING_EVERY_S: Final = 0.1  # the same while this node waits to take part
ASK_S_MAX: Final = 1.0
KEPT_S: Final = 600.0  # a difference that nobody has measured again
JOINING_S: Final = 3.0  # that a node waits for the others' time before it takes anything over
RETURN_SHARE: Final = 0.5  # of the tolerance: who was off must be this close to be right again
log = get_logger(__name__)


class ClockVerdict(Enum):
    AGREED = "agreed"
    UNSURE = "unsure"
    OFF = "off"


class Difference(NamedTuple):
    """What another clock is ahead of ours, at most `error_ms` more or less."""

    ahead_ms: float
    error_ms: float
    measured_s: float

    def beyond(self, tolerance_ms: float) -> bool:
        return abs(self.ahead_ms) - self.error_ms > tolerance_ms


class Clocks:
    """The differences that are known, and the verdict. It does no I/O."""

    def __init__(self, node: str, *, tolerance_ms: float) -> None:
        self._node, self._tolerance_ms = node, tolerance_ms
        self._known: dict[str, Difference] = {}
        self._since_s: float | None = None  # when the first verdict was asked for
        self.verdict = ClockVerdict.UNSURE
        self.joining = True  # nothing is taken over before the others were asked

    @property
    def barred(self) -> bool:
        """Whether this node must not begin to coordinate."""
        return self.verdict is ClockVerdict.OFF or self.joining

    @property
    def agreed(self) -> bool:
        return self.verdict is ClockVerdict.AGREED

    @property
    def ahead_ms(self) -> float | None:
        """What our clock is ahead of the middle one; None if no other is known."""
        if not self._known:
            return None
        others = sorted([0.0, *(each.ahead_ms for each in self._known.values())])
        return -others[(len(others) - 1) // 2]

    def on_difference(self, node: str, difference: Difference) -> None:
        """Take a measurement. One that is too coarse to judge by is of no use."""
        if difference.error_ms <= self._tolerance_ms:
            self._known[node] = difference

    def on_step(self, step_ms: float) -> None:
        self._known = {
            node: each._replace(ahead_ms=each.ahead_ms - step_ms)
            for node, each in self._known.items()
        }

    def judge(self, members: Collection[str], now_s: float) -> ClockVerdict:
        """Compare with all that are members or were measured lately."""
        if self._since_s is None:
            self._since_s = now_s
        self._known = {
            node: each for node, each in self._known.items() if now_s - each.measured_s < KEPT_S
        }
        tolerance_ms = self._tolerance_ms
        if self.verdict is ClockVerdict.OFF:
            tolerance_ms *= RETURN_SHARE
        everybody = {self._node, *members, *self._known}
        against = sum(each.beyond(tolerance_ms) for each in self._known.values())
        agreeing = 1 + len(self._known) - against
        if 2 * against > len(everybody):
            self.verdict = ClockVerdict.OFF
        else:
            enough = 2 * agreeing > len(everybody)
            self.verdict = ClockVerdict.AGREED if enough else ClockVerdict.UNSURE
        waited = now_s - self._since_s >= JOINING_S
        self.joining = self.joining and self.verdict is ClockVerdict.UNSURE and not waited
        return self.verdict

    def latest_ms(self, own_ms: int) -> int:
        """The highest time that a majority of the clocks we know of has reached."""
        shown = [own_ms, *(own_ms + round(each.ahead_ms) for each in self._known.values())]
        return sorted(shown, reverse=True)[majority_of(len(shown)) - 1]


def undisputed() -> Clocks:
    """Of a node that is alone: nobody shows another time."""
    clocks = Clocks("", tolerance_ms=0.0)
    clocks.judge((), 0.0)
    return clocks


@dataclass(slots=True, eq=False)
class ClockWatch:
    """Asks the others again and again, and acts on the verdict."""

    clocks: Clocks
    clock: Clock
    _: KW_ONLY
    ask: Callable[..., Awaitable[dict[str, Any]]]
    reached: Callable[[], Collection[str]]
    members: Callable[[], Collection[str]]
    hand_over: Callable[[], Awaitable[bool]]  # of what is coordinated here; whether nothing is left
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # somebody else can be asked

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        self._news.clear()
        await self.look()
        with suppress(TimeoutError):
            async with asyncio.timeout(JOINING_EVERY_S if self.clocks.joining else ASK_EVERY_S):
                await self._news.wait()

    async def look(self) -> None:
        await asyncio.gather(*(self._measure(node) for node in self.reached()))
        before = self.clocks.verdict
        verdict = self.clocks.judge(self.members(), time.monotonic())
        if verdict is not before:
            self._tell(before, verdict)
        if verdict is ClockVerdict.OFF and await self.hand_over():
            self.clocks.on_step(self.clock.resync())

    async def _measure(self, node: str) -> None:
        asked_s, own_ms = time.monotonic(), self.clock.now_ms()
        try:
            answer = await self.ask(node, "replica_clock", within_s=ASK_S_MAX)
        except PenstockError as error:  # it is away, or of a version that does not tell
            log.debug("no time from a peer", peer=node, error=error.message)
            return
        answered_s = time.monotonic()
        half_ms = (answered_s - asked_s) * 500
        difference = Difference(answer["time_ms"] - own_ms - half_ms, half_ms, answered_s)
        self.clocks.on_difference(node, difference)

    def _tell(self, before: ClockVerdict, verdict: ClockVerdict) -> None:
        facts = {"ahead_ms": None if self.clocks.ahead_ms is None else round(self.clocks.ahead_ms)}
        if verdict is ClockVerdict.OFF:
            log.critical(
                "the clock of this node is off from a majority of the others: "
                "it coordinates nothing until it is right", **facts,
            )  # fmt: skip
        elif before is ClockVerdict.OFF:
            log.warning("the clock of this node is right again", **facts)
        else:
            log.info("clocks compared", verdict=verdict.value, **facts)
