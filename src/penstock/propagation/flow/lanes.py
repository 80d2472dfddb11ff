"""Which priority class goes next: the most urgent, unless a lesser one has waited too long.

Every class waits in a lane of its own. A lane's rank is its class, less one for every `ageing_ms`
that its eldest has waited; the smallest rank goes first, and among equals the more urgent class. So
a CRITICAL change never waits behind LOW ones unless they are older by three times `ageing_ms`, and
nothing waits for ever.

`IngestQueue` is a bounded queue in front of logs, with a word for those turned away. Every item
counts for as many entries as the caller says; the queue holds at most `capacity` entries, except
that an item which alone is larger fits into an empty queue. What does not fit is refused as a whole
and at once: whoever offered it still has it, so nothing is lost. One queue may stand in front of
several logs: each is a *group* with lanes of its own (`LaneQueue`), while the bound holds for all
of them together. How fast the queue drains is measured over the last seconds; from that follows
when it is worth coming back (`retry_after_s`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from math import exp
from typing import Any, Final, Generic, TypeVar

from penstock.errors import InvalidArgument
from penstock.model.delta import PriorityClass
from penstock.propagation.options import AGEING_MS, CAPACITY, HIGH_WATER

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
        """Its place among the lanes by when its eldest came: the smallest goes first. It is the
        rank in milliseconds, less the present, which is the same for all."""
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


RETRY_AFTER_S_MIN: Final = 0.01
RETRY_AFTER_S_MAX: Final = 5.0
MEMORY_MS: Final = 1000.0  # how long what was drained counts


class IngestQueue(Generic[T]):
    """`depth` counts entries, `depths` those of each group that has any."""

    def __init__(
        self, capacity: int = CAPACITY, high_water: float = HIGH_WATER, ageing_ms: int = AGEING_MS
    ) -> None:
        if capacity < 1:
            raise InvalidArgument("capacity must be at least 1", field="capacity", limit=1)
        if not 0 < high_water <= 1:
            raise InvalidArgument("high_water must be in (0, 1]", field="high_water", limit=1)
        self.capacity, self._ageing_ms = capacity, ageing_ms
        self.mark = max(1, int(capacity * high_water))  # depth from which it counts as high
        self._groups: dict[int, LaneQueue[T]] = {}
        self.depths: dict[int, int] = {}
        self.depth = 0
        self.high = False
        self.crossings = 0  # how often it became high
        self.rejected = 0  # entries that were refused
        self._drained = 0.0  # entries taken lately, less what is forgotten
        self._drained_ms: float | None = None  # at this time

    @property
    def depth_by_class(self) -> list[int]:
        return [sum(group.counts[lane] for group in self._groups.values()) for lane in range(LANES)]

    def fits(self, count: int) -> bool:
        """Whether so many entries may be offered; if not, they count as refused."""
        if self.depth + count <= self.capacity or not self.depth:
            return True
        self.rejected += count
        return False

    def put(
        self, item: T, *, priority: int, count: int, now_ms: float, group: int = 0, keys: Keys = ()
    ) -> None:
        """Let an item of `count` entries wait; `fits` has said that it may."""
        if count < 1 or not 0 <= priority < LANES:
            raise InvalidArgument("an item has entries and a class", field="count", limit=1)
        lanes = self._groups.get(group)
        if lanes is None:
            lanes = self._groups[group] = LaneQueue(ageing_ms=self._ageing_ms)
        lanes.put(item, lane=priority, count=count, now_ms=now_ms, keys=keys)
        self._changed(group, count)

    def take(self, count_max: int, now_ms: float, *, group: int = 0) -> list[T]:
        """The items that go next: at most `count_max` entries, or one item that is larger."""
        found: list[T] = []
        taken, lanes = 0, self._groups.get(group)
        while lanes is not None and lanes.count:
            first = lanes.first()
            if taken + first.count > count_max and (found or count_max < 1):
                break
            lanes.leave(first)
            found.append(first.item)
            taken += first.count
        if taken:
            self._changed(group, -taken)
            self._drained = self._recently(now_ms) + taken
            self._drained_ms = max(now_ms, self._drained_ms or now_ms)
        return found

    def remove(self, group: int) -> list[T]:
        lanes, found = self._groups.pop(group, None), list[T]()
        if lanes is not None and lanes.count:
            self._changed(group, -lanes.count)
            while lanes.count:
                first = lanes.first()
                lanes.leave(first)
                found.append(first.item)
        return found

    def _changed(self, group: int, count: int) -> None:
        self.depth += count
        left = self.depths[group] = self.depths.get(group, 0) + count
        if not left:
            del self.depths[group]
        high = self.depth >= self.mark
        if high and not self.high:
            self.crossings += 1
        self.high = high

    # --- when to come back ---

    def _recently(self, now_ms: float) -> float:
        if self._drained_ms is None:
            return 0.0
        return self._drained * exp(min(self._drained_ms - now_ms, 0.0) / MEMORY_MS)

    def drain_rate(self, now_ms: float) -> float:
        return self._recently(now_ms) * 1000 / MEMORY_MS

    def retry_after_s(self, now_ms: float) -> float:
        """When the queue should be below its mark again, if it drains on as it did."""
        excess = max(self.depth - self.mark, 1)
        rate = self.drain_rate(now_ms)
        if rate * RETRY_AFTER_S_MAX <= excess:
            return RETRY_AFTER_S_MAX
        return max(excess / rate, RETRY_AFTER_S_MIN)

    def validate(self) -> None:
        for lanes in self._groups.values():
            lanes.validate()
        counts = {group: lanes.count for group, lanes in self._groups.items() if lanes.count}
        assert counts == self.depths
        assert sum(self.depths.values()) == self.depth
        assert self.high == (self.depth >= self.mark)
