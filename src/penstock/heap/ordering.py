"""How a priority becomes a key: smaller keys are delivered first.

MIN orders by the priority itself, MAX by its bitwise complement, which reverses int64 without an
overflow. Ageing lets every waiting message gain the same amount per second; the differences
between messages then never change, so it is enough to add the enqueue time, once, at the same
rate: the key is static, and a message that came a second later stands that much behind.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.topic import Mode, TopicConfig

KEY_MAX: Final = (1 << 63) - 1


class Ordering:
    __slots__ = ("_ageing_per_s", "_reversed")

    def __init__(self, config: TopicConfig) -> None:
        self._reversed = config.mode is Mode.MAX
        self._ageing_per_s = config.ageing_per_s

    def keys(self, priorities: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keys without ageing; also turns such keys back into priorities."""
        return ~priorities if self._reversed else priorities

    def key(self, priority: int) -> int:
        return ~priority if self._reversed else priority

    def aged(self, keys: NDArray[np.int64], times_ms: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Keys as the index orders them; saturating at the worst key."""
        if not self._ageing_per_s:
            return keys
        # Rate and time are bounded such that the product fits (see model.topic.BOUNDS).
        lateness = (
            times_ms // 1000 * self._ageing_per_s + times_ms % 1000 * self._ageing_per_s // 1000
        )
        return np.where(keys > KEY_MAX - lateness, KEY_MAX, keys + lateness)

    def aged_one(self, key: int, time_ms: int) -> int:
        return min(KEY_MAX, key + self._ageing_per_s * time_ms // 1000)
