"""Which priority class goes next: the most urgent, unless a lesser one has waited too long.

Every class waits in a lane of its own. A lane's rank is its class, less one for every `ageing_ms`
that its eldest has waited; the smallest rank goes first, and among equals the more urgent class. So
a CRITICAL change never waits behind LOW ones unless they are older by three times `ageing_ms`, and
nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from penstock.errors import InvalidArgument
from penstock.model.delta import PriorityClass

AGEING_MS: Final = 10_000
LANES: Final = len(PriorityClass)
TAKEN: Final = LANES  # the lane of what has gone
INDEX_SLACK: Final = 1024  # places of what has gone that may linger in any case

T = TypeVar("T")
P = TypeVar("P")


class Lanes:
    __slots__ = ("ageing_ms",)

    def __init__(self, *, ageing_ms: int = AGEING_MS) -> None:
        if ageing_ms < 1:
            raise InvalidArgument("ageing_ms must be at least 1", field="ageing_ms", limit=1)
        self.ageing_ms = ageing_ms

    def choose(self, waits_ms: Sequence[float | None]) -> int:
        """The lane to serve, by how long each one's eldest has waited; None: it is empty."""
        if len(waits_ms) != LANES:
            raise InvalidArgument(f"{LANES} lanes are asked about", field="waits_ms", limit=LANES)
        full = [lane for lane, wait_ms in enumerate(waits_ms) if wait_ms is not None]
        if not full:
            raise InvalidArgument("every lane is empty", field="waits_ms")
        return min(self.due(lane, -max(waits_ms[lane] or 0, 0)) for lane in full)[1]

    def due(self, lane: int, since_ms: float) -> tuple[float, int]:
        """Its place among the lanes by when its eldest came: the smallest goes first.

        It is the rank in milliseconds, less the present, which is the same for all.
        """
        return since_ms + lane * self.ageing_ms, lane


class KeyIndex(Generic[T, P]):
    """What waits under which key, for a queue in which a more urgent item takes others along.

    It is made when it is needed for the first time, so that a queue of one class never pays for
    it. What has gone lingers until it is more than half.
    """

    __slots__ = ("_places", "by_key", "late", "size")

    def __init__(self, places: Callable[[T], Iterable[tuple[bytes, P]]]) -> None:
        self._places = places  # the keys of an item, each with what waits under it
        self.clear()

    def clear(self, items: Iterable[T] = ()) -> None:
        """Begin anew with these, in the order in which they came."""
        self.by_key: dict[bytes, list[P]] = {}
        self.size = 0  # places in there
        self.late: list[T] = list(items)  # not in there yet

    def refresh(self, waiting: int, items: Callable[[], Iterable[T]]) -> dict[bytes, list[P]]:
        """Enter what is late; begin anew with `items` if far more is in there than waits."""
        if self.size > 2 * waiting + INDEX_SLACK:
            self.clear(items())
        late, self.late, by_key = self.late, [], self.by_key
        for item in late:
            for key, place in self._places(item):
                by_key.setdefault(key, []).append(place)
                self.size += 1
        return by_key
