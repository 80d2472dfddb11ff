"""What a replica does about damage to its log: hand over, then start over as a copy of the others.

Nothing is dropped before another replica coordinates with a barrier of its own that is committed:
that one has all that was ever committed. Nor is it while there would be no majority without it.
Until then the damaged replica follows and votes, because where its log ends and what it has
promised is true; whoever has the only other copy may need that vote. It coordinates only if nobody
else does, so that one bad block does not stop a partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.errors import Corruption
from penstock.replication.replica import LogHealth, Replica

ASK_AGAIN_MS: Final = 1_000  # while it may not be replaced yet: another one is, or etcd is away
RESIGN_AGAIN_MS: Final = 10_000  # doubled each time: perhaps all of them are damaged
RESIGN_AGAIN_MS_MAX: Final = 600_000


class Repair:
    def __init__(
        self,
        replica: Replica,
        *,
        now: Callable[[], int],
        resign: Callable[[], None],
        renew: Callable[[], None],
        report: Callable[[Corruption], None],
    ) -> None:
        self._replica, self._now = replica, now
        self._resign, self._renew, self._report = resign, renew, report
        self.damage = ""  # what was found first
        self._ask_ms = 0  # to be replaced, and not before
        self._resign_ms = 0  # the same
        self._resign_again_ms = RESIGN_AGAIN_MS

    def on_damage(self, error: Corruption, *, faulty: bool = False) -> None:
        """Some of the log cannot be read; `faulty`: what coordinating or lending it takes."""
        if faulty:
            self._replica.health = LogHealth.FAULTY
        elif self._replica.health is LogHealth.SOUND:
            self._replica.health = LogHealth.DAMAGED
        if not self.damage:
            self.damage = error.message
            self._report(error)

    def on_replaced(self) -> None:
        self.damage = ""

    def on_tick(self) -> None:
        if not self.damage:
            return
        now, coordinator = self._now(), self._replica.coordinator
        if coordinator is not None:
            if now >= self._resign_ms and coordinator.serving and coordinator.has_heir(now):
                self._resign_ms = now + self._resign_again_ms
                self._resign_again_ms = min(2 * self._resign_again_ms, RESIGN_AGAIN_MS_MAX)
                self._resign()
        elif now >= self._ask_ms and self._replica.replaceable(now):
            self._ask_ms = now + ASK_AGAIN_MS
            self._renew()
