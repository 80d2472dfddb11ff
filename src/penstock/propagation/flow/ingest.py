"""A bounded queue in front of logs: four classes, with ageing, and a word for those turned away.

Every item counts for as many entries as the caller says; the queue holds at most `capacity`
entries, except that an item which alone is larger fits into an empty queue. What does not fit is
refused as a whole and at once: whoever offered it still has it, so nothing is lost.

One queue may stand in front of several logs: each is a *group* with lanes of its own (`LaneQueue`),
while the bound holds for all of them together.

How fast the queue drains is measured over the last seconds; from that follows when it is worth
coming back (`retry_after_s`).
"""

from __future__ import annotations

from math import exp
from typing import Final, Generic, TypeVar

from penstock.errors import InvalidArgument
from penstock.propagation.flow.lanes import LANES, Keys, LaneQueue
from penstock.propagation.options import AGEING_MS, CAPACITY, HIGH_WATER

RETRY_AFTER_S_MIN: Final = 0.01
RETRY_AFTER_S_MAX: Final = 5.0
MEMORY_MS: Final = 1000.0  # how long what was drained counts

T = TypeVar("T")


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
