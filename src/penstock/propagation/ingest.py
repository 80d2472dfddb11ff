"""A bounded queue in front of a log: four classes, with ageing, and a word for those turned away.

Items wait in the class they were offered in, first come first served, and the classes are served as
lanes are. Every item counts for as many entries as the caller says; the queue holds at most
`capacity` entries, except that an item which alone is larger fits into an empty queue. What does
not fit is refused as a whole and at once: whoever offered it still has it, so nothing is lost.

How fast the queue drains is measured over the last seconds; from that follows when it is worth
coming back (`retry_after_s`).
"""

from __future__ import annotations

from collections import deque
from math import exp
from typing import Final, Generic, TypeVar

from penstock.errors import InvalidArgument
from penstock.propagation.lanes import AGEING_MS, LANES, Lanes

CAPACITY: Final = 100_000
HIGH_WATER: Final = 0.8
RETRY_AFTER_S_MIN: Final = 0.01
RETRY_AFTER_S_MAX: Final = 5.0
MEMORY_MS: Final = 1000.0  # how long what was drained counts

T = TypeVar("T")


class Ingest(Generic[T]):
    """`depth` counts entries; `depth_by_class` the same by class."""

    __slots__ = (
        "_drained", "_drained_ms", "_lanes", "_order", "_since", "capacity", "crossings", "depth",
        "depth_by_class", "high", "mark", "rejected",
    )  # fmt: skip

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
        self._lanes: list[deque[tuple[T, int, float]]] = [deque() for _ in range(LANES)]
        self.depth = 0
        self.depth_by_class = [0] * LANES
        self.high = False
        self.crossings = 0  # how often it became high
        self.rejected = 0  # entries that were refused
        self._since = 0.0  # the latest time that was told
        self._drained = 0.0  # entries taken lately, less what is forgotten
        self._drained_ms: float | None = None  # at this time

    def offer(self, item: T, *, priority: int, count: int, now_ms: float) -> bool:
        """Let an item of `count` entries wait; False: it does not fit."""
        if count < 1 or not 0 <= priority < LANES:
            raise InvalidArgument("an item has entries and a class", field="count", limit=1)
        depth = self.depth + count
        if depth > self.capacity and self.depth:
            self.rejected += count
            return False
        self._since = since_ms = max(now_ms, self._since)
        self._lanes[priority].append((item, count, since_ms))
        self.depth_by_class[priority] += count
        self._set_depth(depth)
        return True

    def take(self, count_max: int, now_ms: float) -> list[T]:
        """The items that go next: at most `count_max` entries, or one item that is larger."""
        found: list[T] = []
        taken = 0
        while self.depth:
            lane = self._next_lane()
            item, count, _ = self._lanes[lane][0]
            if taken + count > count_max and (found or count_max < 1):
                break
            self._lanes[lane].popleft()
            found.append(item)
            taken += count
            self.depth_by_class[lane] -= count
            self._set_depth(self.depth - count)
        if taken:
            self._drained = self._recently(now_ms) + taken
            self._drained_ms = max(now_ms, self._drained_ms or now_ms)
        return found

    def _next_lane(self) -> int:
        due = self._order.due
        return min(due(lane, items[0][2]) for lane, items in enumerate(self._lanes) if items)[1]

    def _set_depth(self, depth: int) -> None:
        self.depth = depth
        high = depth >= self.mark
        if high and not self.high:
            self.crossings += 1
        self.high = high

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
        by_class = [sum(count for _, count, _ in items) for items in self._lanes]
        assert by_class == self.depth_by_class
        assert sum(by_class) == self.depth
        items = sum(len(items) for items in self._lanes)
        assert self.depth <= self.capacity or items == 1
        assert self.high == (self.depth >= self.mark)
        for waiting in self._lanes:
            times = [since_ms for *_, since_ms in waiting]
            assert times == sorted(times)
