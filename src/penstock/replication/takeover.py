"""How an epoch changes hands: the promise, the nomination, and the votes for who takes over.

**The promise** of a replica is to listen to no epoch below the one it names. It is made in memory
first (`asked`), and from then on lower epochs are refused; it may be relied on once it is on disk
(`kept`). Whoever asked for it is answered only then.

**Nomination** gives no safety, the epoch does; it only decides who asks for one, and when. A
replica asks if its coordinator is lost to it, it is its turn, and a majority of the replicas says
that the coordinator is lost to them too. Without that last condition a replica that is cut off from
the coordinator alone would depose it again and again.

Turns: replicas are ranked by the policy, and each waits a little longer than the one before. The
replicas notice a loss at different moments, so whoever has the turn asks again before the next one
has it: otherwise the first would be refused once, and the second would be taken.

- `balanced`: in the order of the record, whose first is the preferred coordinator;
- `oldest`: by the age of the nodes, so that the oldest running node coordinates everything.

**The votes** are the promises of our own epoch: when a quorum has given theirs, the best of their
logs is what the epoch begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from penstock.replication import rules
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Effects, Fence, Fenced, Persist, Probe, Send, TakeEpoch
from penstock.replication.facts import ReplicationOptions
from penstock.replication.rules import End


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


class Policy(Enum):
    BALANCED = "balanced"
    OLDEST = "oldest"


def candidates(
    record: PartitionRecord, alive: Mapping[str, int], *, policy: Policy, lost: str
) -> list[str]:
    """Who may coordinate next, best first. `alive` gives each node's age as a revision."""
    order = [node for node in record.voters_but(lost) if node in alive]
    if policy is Policy.OLDEST:
        order.sort(key=lambda node: (alive[node], node))
    return order


class Nomination:
    """One replica's attempt to become coordinator, from the first doubt to asking for an epoch."""

    def __init__(
        self, node: str, options: ReplicationOptions, policy: Policy = Policy.BALANCED
    ) -> None:
        self._node, self._options, self._policy = node, options, policy
        self._resigned_ms: int | None = None  # when we gave an epoch up that nobody has taken yet
        self._lost_ms: int | None = None  # since when the coordinator has been lost to us
        self._asked_ms: int | None = None  # when the others were probed last
        self._epoch = 0  # that they were probed about
        self._agree: set[str] = set()
        self._taking = False  # they agreed, and the epoch was asked for

    def reset(self) -> None:
        """There is a coordinator again."""
        self._lost_ms = self._asked_ms = None
        self._agree.clear()

    def on_resigned(self, now: int) -> None:
        """We gave the epoch up: for a while it is for the others to take the next."""
        self._resigned_ms = now

    def on_lost(
        self, record: PartitionRecord, alive: Mapping[str, int], now: int, *, last: bool
    ) -> Effects:
        """The coordinator is lost: ask the others if it is our turn. Ours is the `last` if another
        log is better."""
        silence_ms = self._options.silence_ms
        if self._resigned_ms is not None and now - self._resigned_ms <= silence_ms:
            return []
        # Who lost the epoch is no candidate for the next; a node that lost its own is.
        lost = "" if record.coordinator == self._node else record.coordinator
        order = candidates(record, alive, policy=self._policy, lost=lost)
        if last:
            order.sort(key=lambda node: node == self._node)
        if not self.due(order, now):
            return []
        self.ask(record.epoch, now)
        probe = Probe(self._node, record.epoch)
        return [*(Send(n, probe) for n in record.voters_but(self._node)), *self.take(record)]

    def due(self, order: list[str], now: int) -> bool:
        """The coordinator is lost; whether it is our turn to ask the others."""
        if self._lost_ms is None:
            self._lost_ms = now
        if self._node not in order:
            return False
        turn_ms = self._lost_ms + order.index(self._node) * self._options.stagger_ms
        if now < turn_ms:
            return False
        return self._asked_ms is None or now >= self._asked_ms + self._pause_ms(now - turn_ms)

    def _pause_ms(self, since_turn_ms: int) -> int:
        """Between two questions: short while others may be about to notice the loss."""
        stagger_ms = self._options.stagger_ms
        if self._taking or since_turn_ms >= 2 * stagger_ms:
            return self._options.fence_ms
        return stagger_ms // 2

    def ask(self, epoch: int, now: int) -> None:
        self._asked_ms, self._epoch, self._taking = now, epoch, False
        self._agree = {self._node}

    def on_probed(self, node: str, *, epoch: int, silent: bool) -> None:
        if self._asked_ms is not None and epoch == self._epoch and silent:
            self._agree.add(node)

    def take(self, record: PartitionRecord) -> Effects:
        """Ask for the epoch if a majority has agreed, once for each agreement."""
        if self._asked_ms is None or not record.majority(self._agree):
            return []
        self._agree.clear()
        self._taking = True
        return [TakeEpoch()]


class Votes:
    """Who has promised the epoch that we hold, and what each has told with its promise."""

    def __init__(self, now: int) -> None:
        self.ends: dict[str, End] = {}  # where their logs end
        self.sought: End | None = None  # the end of the log that we adopt
        self.asked_ms = now
        self._clocks: dict[str, int] = {}  # how far their clocks are past our `now`

    def add(self, reply: Fenced, now: int) -> None:
        self.ends[reply.node] = reply.end
        if reply.time_ms:
            self._clocks[reply.node] = reply.time_ms - now

    def quorum_ms(self, record: PartitionRecord, *, node: str, own_ms: int, now: int) -> int:
        """The highest time that the clocks of a quorum have reached, as far as they have told;
        `own_ms` is what the clock of our own `node` shows.

        A partition's time may begin there: one fast clock cannot put it ahead. What was on its way
        for a while makes it a little too low, never too high. Who does not say is taken to agree
        with us.
        """
        told = {voter: self._clocks.get(voter, own_ms - now) + now for voter in self.ends}
        return record.committed(told | {node: own_ms})
