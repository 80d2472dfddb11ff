"""The promise of one replica: to listen to no epoch below the one it names.

It is made in memory first (`asked`), and from then on lower epochs are refused; it may be relied on
once it is on disk (`kept`). Whoever asked for it is answered only then.
"""

from __future__ import annotations

from penstock.replication import rules
from penstock.replication.effects import Effects, Persist
from penstock.replication.messages import Fence


class Promise:
    """Invariant: `kept <= asked`. Both only grow."""

    __slots__ = ("_fences", "asked", "kept")

    def __init__(self, kept: int) -> None:
        self.kept = self.asked = kept
        self._fences: dict[str, Fence] = {}  # taker -> its fence, until the promise is on disk

    def accepts(self, epoch: int) -> bool:
        return rules.accepts(self.asked, epoch)

    def make(self, epoch: int) -> Effects:
        if epoch <= self.asked:
            return []
        self.asked = epoch
        return [Persist(epoch)]

    def on_fence(self, fence: Fence) -> Effects:
        """To be answered once `ready` returns it. A taker that asks twice is answered once."""
        self._fences[fence.node] = fence
        return self.make(fence.epoch)

    def on_persisted(self, epoch: int) -> None:
        self.kept = max(self.kept, epoch)

    def ready(self) -> list[Fence]:
        """The fences that may be answered now, each returned once."""
        ready = [fence for fence in self._fences.values() if fence.epoch <= self.kept]
        for fence in ready:
            del self._fences[fence.node]
        return ready
