"""When a replica tries to become the coordinator, and in which order several of them try.

Nomination gives no safety, the epoch does; it only decides who asks for one, and when. A replica
asks if its coordinator is lost to it, it is its turn, and a majority of the replicas says that the
coordinator is lost to them too. Without that last condition a replica that is cut off from the
coordinator alone would depose it again and again.

Turns: replicas are ranked by the policy, and each waits a little longer than the one before.

- `balanced`: in the order of the record, whose first is the preferred coordinator;
- `oldest`: by the age of the nodes, so that the oldest running node coordinates everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from penstock.replication.assignment import PartitionRecord
from penstock.replication.options import ReplicationOptions


class Policy(Enum):
    BALANCED = "balanced"
    OLDEST = "oldest"


def candidates(
    record: PartitionRecord, alive: Mapping[str, int], *, policy: Policy, lost: str
) -> list[str]:
    """Who may coordinate next, best first. `alive` gives each node's age as a revision."""
    order = [n for n in dict.fromkeys(record.voters + record.joint) if n in alive and n != lost]
    if policy is Policy.OLDEST:
        order.sort(key=lambda node: (alive[node], node))
    return order


class Nomination:
    """One replica's attempt to become coordinator, from the first doubt to asking for an epoch."""

    def __init__(self, node: str, options: ReplicationOptions) -> None:
        self._node, self._options = node, options
        self._lost_ms: int | None = None  # since when the coordinator has been lost to us
        self._asked_ms: int | None = None  # when the others were probed last
        self._epoch = 0  # that they were probed about
        self._agree: set[str] = set()

    def reset(self) -> None:
        """There is a coordinator again."""
        self._lost_ms = self._asked_ms = None
        self._agree.clear()

    def due(self, order: list[str], now: int) -> bool:
        """The coordinator is lost; whether it is our turn to ask the others."""
        if self._lost_ms is None:
            self._lost_ms = now
        if self._node not in order:
            return False
        if now < self._lost_ms + order.index(self._node) * self._options.stagger_ms:
            return False
        return self._asked_ms is None or now >= self._asked_ms + self._options.fence_ms

    def ask(self, epoch: int, now: int) -> None:
        self._asked_ms, self._epoch = now, epoch
        self._agree = {self._node}

    def on_probed(self, node: str, *, epoch: int, silent: bool) -> None:
        if self._asked_ms is not None and epoch == self._epoch and silent:
            self._agree.add(node)

    def agreed(self, record: PartitionRecord) -> bool:
        return self._asked_ms is not None and record.majority(self._agree)

    def taken(self) -> None:
        """The epoch is being asked for: do not ask twice for one agreement."""
        self._agree.clear()
