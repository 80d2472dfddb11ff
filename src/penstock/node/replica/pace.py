"""How fast replicas are copied, so that moving them leaves room for the traffic."""

from __future__ import annotations

import asyncio


class CopyPace:
    """So many bytes per second, over all who ask."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # when what was taken so far is paid for

    def take(self, count: int) -> float:
        """In how many seconds these bytes, and all that were taken before, are paid for."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count / self._bytes_per_s
        return self._free_at - now

    async def spend(self, count: int) -> None:
        await asyncio.sleep(self.take(count))
