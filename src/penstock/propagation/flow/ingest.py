"""A bounded queue in front of logs: four classes, with ageing, and a word for those turned away.

Items wait in the class they were put in, first come first served, and the classes are served as
lanes are. Every item counts for as many entries as the caller says; the queue holds at most
`capacity` entries, except that an item which alone is larger fits into an empty queue. What does
not fit is refused as a whole and at once: whoever offered it still has it, so nothing is lost.

An item may have *keys*, the vectors that it changes. Of two items with a key in common the earlier
one is taken first whatever their classes: where a more urgent one comes, those that it must not
overtake move into its class, in front of it, and with them what those must not overtake. Keys are
asked for only when that can happen, so a queue of one class never pays for it.

One queue may stand in front of several logs: each is a *group* that is taken from by itself, while
the bound holds for all of them together.

How fast the queue drains is measured over the last seconds; from that follows when it is worth
coming back (`retry_after_s`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from math import exp
from typing import Final, Generic, TypeVar

from penstock.errors import InvalidArgument
from penstock.propagation.flow.lanes import AGEING_MS, LANES, TAKEN, KeyIndex, Lanes

CAPACITY: Final = 100_000
HIGH_WATER: Final = 0.8
RETRY_AFTER_S_MIN: Final = 0.01
RETRY_AFTER_S_MAX: Final = 5.0
MEMORY_MS: Final = 1000.0  # how long what was drained counts

T = TypeVar("T")
Keys = Callable[[], Collection[bytes]]


class _Item(Generic[T]):
    __slots__ = ("_keys", "count", "group", "item", "lane", "number", "since_ms")

    def __init__(
        self, item: T, count: int, *, lane: int, group: int, number: int, since_ms: float,
        keys: Keys | Collection[bytes],
    ) -> None:  # fmt: skip
        self.item, self.count, self.group = item, count, group
        self.lane = lane  # where it counts; copies in other lanes do not
        self.number = number  # in the order of arrival
        self.since_ms = since_ms
        self._keys = keys

    @property
    def keys(self) -> Collection[bytes]:
        if callable(self._keys):
            self._keys = self._keys()
        return self._keys


class IngestQueue(Generic[T]):
    """`depth` counts entries; `depth_by_class` the same by class."""

    def __init__(
        self, capacity: int = CAPACITY, high_water: float = HIGH_WATER, ageing_ms: int = AGEING_MS
    ) -> None:
        if capacity < 1:
            raise InvalidArgument("capacity must be at least 1", field="capacity", limit=1)
        if not 0 < high_water <= 1:
            raise InvalidArgument("high_water must be in (0, 1]", field="high_water", limit=1)
        self.capacity = capacity
        self.mark = max(1, int(capacity * high_water))  # depth from which it counts as high
        self._order = Lanes(ageing_ms=ageing_ms)
        self._groups: dict[int, list[deque[_Item[T]]]] = {}
        self.depths: dict[int, int] = {}  # by group; none: nothing of it waits
        self.depth = 0
        self.depth_by_class = [0] * LANES
        self.high = False
        self.crossings = 0  # how often it became high
        self.rejected = 0  # entries that were refused
        self._number = 0
        self._last_ms = 0.0  # the latest time that was told
        self._drained = 0.0  # entries taken lately, less what is forgotten
        self._drained_ms: float | None = None  # at this time
        self._index: KeyIndex[_Item[T], _Item[T]] = KeyIndex(_places)

    # --- offering ---

    def fits(self, count: int) -> bool:
        """Whether so many entries may be offered; if not, they count as refused."""
        if self.depth + count <= self.capacity or not self.depth:
            return True
        self.rejected += count
        return False

    def put(
        self, item: T, *, priority: int, count: int, now_ms: float, group: int = 0,
        keys: Keys | Collection[bytes] = (),
    ) -> None:  # fmt: skip
        """Let an item of `count` entries wait; `fits` has said that it may."""
        if count < 1 or not 0 <= priority < LANES:
            raise InvalidArgument("an item has entries and a class", field="count", limit=1)
        self._last_ms = since_ms = max(now_ms, self._last_ms)
        self._number += 1
        entry = _Item(
            item, count, lane=priority, group=group, number=self._number, since_ms=since_ms,
            keys=keys,
        )  # fmt: skip
        if keys:
            if any(self.depth_by_class[priority + 1 :]):
                self._move_up(entry)
            self._index.late.append(entry)
        self._lane(entry).append(entry)
        self.depths[group] = self.depths.get(group, 0) + count
        self._count(priority, count)

    def _lane(self, entry: _Item[T]) -> deque[_Item[T]]:
        lanes = self._groups.get(entry.group)
        if lanes is None:
            lanes = self._groups[entry.group] = [deque() for _ in range(LANES)]
        return lanes[entry.lane]

    def _count(self, lane: int, count: int) -> None:
        self.depth_by_class[lane] += count
        self.depth += count
        high = self.depth >= self.mark
        if high and not self.high:
            self.crossings += 1
        self.high = high

    # --- a more urgent item takes along what it must not overtake ---

    def _move_up(self, entry: _Item[T]) -> None:
        by_key = self._index.refresh(self.depth, self._waiting_in_order)
        lane, moved, due = entry.lane, list[_Item[T]](), self._due(entry)
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
                        self.depth_by_class[other.lane] -= other.count
                        self.depth_by_class[lane] += other.count
                        other.lane, other.since_ms = lane, entry.since_ms
                        moved.append(other)
                        causes.append(other)
        for other in sorted(moved, key=_number):
            self._lane(other).append(other)

    def _due(self, entry: _Item[T]) -> tuple[float, int]:
        return self._order.due(entry.lane, entry.since_ms)

    def _waiting_in_order(self) -> list[_Item[T]]:
        return sorted(self._waiting(), key=_number)

    def _waiting(self) -> Iterator[_Item[T]]:
        for lanes in self._groups.values():
            for lane, items in enumerate(lanes):
                yield from (item for item in items if item.lane == lane)

    # --- taking ---

    def take(self, count_max: int, now_ms: float, *, group: int = 0) -> list[T]:
        """The items that go next: at most `count_max` entries, or one item that is larger."""
        found: list[T] = []
        taken = 0
        while self.depths.get(group):
            entry = self._next(self._groups[group])
            if taken + entry.count > count_max and (found or count_max < 1):
                break
            found.append(entry.item)
            taken += entry.count
            self._leave(entry)
        if taken:
            self._drained = self._recently(now_ms) + taken
            self._drained_ms = max(now_ms, self._drained_ms or now_ms)
        return found

    def _next(self, lanes: list[deque[_Item[T]]]) -> _Item[T]:
        best: tuple[float, int] | None = None
        for lane, items in enumerate(lanes):
            while items and items[0].lane != lane:
                items.popleft()  # it has moved on
            if items:
                due = self._due(items[0])
                best = due if best is None else min(best, due)
        assert best is not None
        return lanes[best[1]][0]

    def _leave(self, entry: _Item[T]) -> None:
        self._lane(entry).popleft()
        left = self.depths.pop(entry.group) - entry.count
        if left:
            self.depths[entry.group] = left
        else:
            self._groups.pop(entry.group)
        self._count(entry.lane, -entry.count)
        entry.lane = TAKEN
        if not self.depth and (self._index.late or self._index.size):
            self._index.clear()

    def remove(self, group: int) -> list[T]:
        """All that waits in a group, out of the queue."""
        found: list[T] = []
        while self.depths.get(group):
            entry = self._next(self._groups[group])
            found.append(entry.item)
            self._leave(entry)
        return found

    # --- when to come back ---

    def _recently(self, now_ms: float) -> float:
        if self._drained_ms is None:
            return 0.0
        return self._drained * exp(min(self._drained_ms - now_ms, 0.0) / MEMORY_MS)

    def drain_rate(self, now_ms: float) -> float:
        """Entries per second that were taken lately."""
        return self._recently(now_ms) * 1000 / MEMORY_MS

    def retry_after_s(self, now_ms: float) -> float:
        """When the queue should be below its mark again, if it drains on as it did."""
        excess = max(self.depth - self.mark, 1)
        rate = self.drain_rate(now_ms)
        if rate * RETRY_AFTER_S_MAX <= excess:
            return RETRY_AFTER_S_MAX
        return max(excess / rate, RETRY_AFTER_S_MIN)

    def validate(self) -> None:
        waiting = list(self._waiting())
        by_class = [sum(e.count for e in waiting if e.lane == lane) for lane in range(LANES)]
        assert by_class == self.depth_by_class
        assert sum(by_class) == self.depth == sum(self.depths.values())
        assert self.high == (self.depth >= self.mark)
        for lanes in self._groups.values():
            for lane, items in enumerate(lanes):
                times = [entry.since_ms for entry in items if entry.lane == lane]
                assert times == sorted(times)


def _number(item: _Item[T]) -> int:
    return item.number


def _places(item: _Item[T]) -> Iterable[tuple[bytes, _Item[T]]]:
    return [(key, item) for key in item.keys] if item.lane < TAKEN else ()
