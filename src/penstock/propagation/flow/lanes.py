"""Which priority class goes next: the most urgent, unless a lesser one has waited too long.

Every class waits in a lane of its own. A lane's rank is its class, less one for every `ageing_ms`
that its eldest has waited; the smallest rank goes first, and among equals the more urgent class. So
a CRITICAL change never waits behind LOW ones unless they are older by three times `ageing_ms`, and
nothing waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from penstock.errors import InvalidArgument
from penstock.model.delta import PriorityClass
from penstock.propagation.options import AGEING_MS

LANES: Final = len(PriorityClass)
TAKEN: Final = LANES  # the lane of what has gone
INDEX_SLACK: Final = 1024  # places of what has gone that may linger in any case

T = TypeVar("T")
_NOTHING: Final[deque[Any]] = deque()
Keys = Callable[[], Collection[bytes]] | Collection[bytes]


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


class LaneItem(Generic[T]):
    __slots__ = ("_keys", "count", "item", "lane", "number", "since_ms")

    def __init__(
        self, item: T, count: int, *, lane: int, number: int, since_ms: float, keys: Keys
    ) -> None:
        self.item, self.count = item, count
        self.lane = lane  # where it counts; copies in other lanes do not
        self.number = number  # in the order of arrival
        self.since_ms = since_ms
        self._keys = keys

    @property
    def keys(self) -> Collection[bytes]:
        if callable(self._keys):
            self._keys = self._keys()
        return self._keys


class LaneQueue(Generic[T]):
    """Items that wait in the lanes of their classes, each lane first come first served.

    An item may have *keys*, the vectors that it changes. Of two items with a key in common the
    earlier one is taken first whatever their classes: where a more urgent one comes, those that it
    must not overtake move into its lane, in front of it, and with them what those must not
    overtake. They are found through an index that is made when it is needed for the first time, so
    that a queue of one class never pays for it.
    """

    def __init__(self, *, ageing_ms: int = AGEING_MS) -> None:
        self._order = Lanes(ageing_ms=ageing_ms)
        self._items: list[deque[LaneItem[T]]] = [deque() for _ in range(LANES)]
        self.count, self.counts = 0, [0] * LANES  # entries of all that waits, and by lane
        self._number = 0
        self._last_ms = 0.0  # the latest time that was told
        # The lane of what went last, and when that came: what came with it goes next.
        self._run: deque[LaneItem[T]] = _NOTHING
        self._run_lane, self._run_ms = 0, 0.0
        self._by_key: dict[bytes, list[LaneItem[T]]] = {}
        self._indexed = 0  # places in there; those of what has gone linger
        self._late: list[LaneItem[T]] = []  # not in there yet

    def put(self, item: T, *, lane: int, count: int, now_ms: float, keys: Keys = ()) -> None:
        """Let an item wait that counts for so many entries."""
        self._last_ms = since_ms = max(now_ms, self._last_ms)
        self._run = _NOTHING
        self._number += 1
        entry = LaneItem(item, count, lane=lane, number=self._number, since_ms=since_ms, keys=keys)
        if keys:
            if any(self.counts[lane + 1 :]):
                self._move_up(entry)
            self._late.append(entry)
        self._items[lane].append(entry)
        self.counts[lane] += count
        self.count += count

    def first(self) -> LaneItem[T]:
        """What goes next; there must be something."""
        items = self._run
        if items and items[0].since_ms == self._run_ms and items[0].lane == self._run_lane:
            return items[0]  # it came together with what went last
        best: tuple[float, int] | None = None
        for lane, items in enumerate(self._items):
            while items and items[0].lane != lane:
                items.popleft()  # it has moved on
            if items:
                due = self._order.due(lane, items[0].since_ms)
                best = due if best is None else min(best, due)
        assert best is not None
        self._run_lane, self._run = best[1], self._items[best[1]]
        self._run_ms = self._run[0].since_ms
        return self._run[0]

    def leave(self, first: LaneItem[T]) -> None:
        """Take out what `first` has found."""
        self._items[first.lane].popleft()
        self.counts[first.lane] -= first.count
        self.count -= first.count
        first.lane = TAKEN
        if not self.count:
            self._begin_index([])

    # --- a more urgent item takes along what it must not overtake ---

    def _move_up(self, entry: LaneItem[T]) -> None:
        by_key = self._index()
        if by_key.keys().isdisjoint(entry.keys):
            return
        lane, moved, due = entry.lane, list[LaneItem[T]](), self._due(entry)
        causes, known = [entry], dict[bytes, int]()
        while causes:
            cause = causes.pop()
            for key in cause.keys:
                if known.get(key, -1) >= cause.number:
                    continue
                known[key] = cause.number
                for other in by_key.get(key, ()):
                    overtaken = other.lane < TAKEN and self._due(other) > due
                    if overtaken and other.number < cause.number:
                        self.counts[other.lane] -= other.count
                        self.counts[lane] += other.count
                        other.lane, other.since_ms = lane, entry.since_ms
                        moved.append(other)
                        causes.append(other)
        self._items[lane].extend(sorted(moved, key=_number))

    def _due(self, entry: LaneItem[T]) -> tuple[float, int]:
        return self._order.due(entry.lane, entry.since_ms)

    def _index(self) -> dict[bytes, list[LaneItem[T]]]:
        """What waits under which key, made anew if far more is in there than waits."""
        if self._indexed > 2 * self.count + INDEX_SLACK:
            self._begin_index(sorted(self.waiting(), key=_number))
        late, self._late = self._late, []
        for entry in late:
            for key in entry.keys if entry.lane < TAKEN else ():
                self._by_key.setdefault(key, []).append(entry)
                self._indexed += 1
        return self._by_key

    def _begin_index(self, late: list[LaneItem[T]]) -> None:
        self._by_key, self._indexed, self._late = {}, 0, late

    def waiting(self) -> Iterator[LaneItem[T]]:
        for lane, items in enumerate(self._items):
            yield from (item for item in items if item.lane == lane)

    def validate(self) -> None:
        waiting = list(self.waiting())
        assert [sum(e.count for e in waiting if e.lane == n) for n in range(LANES)] == self.counts
        assert self.count == sum(self.counts)
        for lane, items in enumerate(self._items):
            times = [entry.since_ms for entry in items if entry.lane == lane]
            assert times == sorted(times)


def _number(item: LaneItem[T]) -> int:
    return item.number
