"""One copy of a partition: what it has promised, whom it follows, what its log is worth.

This is the half of a replica that every member has, learners too. It keeps two orders: a replica
acts in an epoch only after its promise is on disk, and it tells nobody where its log ends while the
driver cuts or replaces it. What waits for either is done by `_proceed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum

from penstock.model.batch import Batch
from penstock.replication.assignment import PartitionRecord
from penstock.replication.coordinator import Coordinator
from penstock.replication.effects import (
    CloseStream,
    Effects,
    OpenStream,
    Retire,
    Send,
)
from penstock.replication.facts import LogFacts
from penstock.replication.follower import Follower
from penstock.replication.follower import State as Following
from penstock.replication.messages import (
    Append,
    Fence,
    Fenced,
    Followed,
)
from penstock.replication.nomination import Nomination, Policy
from penstock.replication.options import ReplicationOptions
from penstock.replication.promise import Promise
from penstock.replication.rules import End
from penstock.replication.sender import Sender


class Role(Enum):
    IDLE = "idle"  # no coordinator is known, or we are no member
    FOLLOWING = "following"
    FENCING = "fencing"  # we hold the epoch and gather promises
    ADOPTING = "adopting"  # we copy the best log among those who promised
    ENTERING = "entering"  # our barrier is appended, not committed
    SERVING = "serving"
    HALTED = "halted"  # a rule was broken; nothing is done any more


class Health(Enum):
    """What the driver has found of the log. Its end and the promise are true in any case."""

    SOUND = "sound"
    DAMAGED = "damaged"  # some of it cannot be read: better that others coordinate
    FAULTY = "faulty"  # what a takeover needs of it cannot be read: it takes no part in any


class Holding(ABC):
    """A member's copy; `Replica` adds taking over and coordinating."""

    def __init__(
        self,
        node: str,
        *,
        uuid: str,
        promised: int,
        committed: int,
        log: LogFacts,
        options: ReplicationOptions | None = None,
        policy: Policy = Policy.BALANCED,
    ) -> None:
        self.node, self.uuid = node, uuid
        self.promise = Promise(promised)
        self.log = log
        self.options, self.policy = options or ReplicationOptions(), policy
        self.role = Role.IDLE
        self.health = Health.SOUND  # set by the driver; a log that is replaced is sound again
        self.record: PartitionRecord | None = None
        self.revision = 0
        self.coordinator: Coordinator | None = None
        self.follower: Follower | None = None
        self._committed = committed
        self._alive: dict[str, int] = {}
        self._promised_ms = 0  # when we promised an epoch whose record we had not seen
        self._resigned_ms: int | None = None  # when we gave an epoch up that nobody has taken yet
        self._busy = False  # the driver cuts or replaces the log: nobody may be told where it ends
        self._ends: dict[str, End] = {}  # of those who promised our epoch
        self._sought: End | None = None  # the end of the log that we adopt
        self._attempt_ms = 0  # of the fencing or adopting that is under way
        self._lending: Sender | None = None  # to a taker that adopts our log
        self._lending_epoch = 0  # which it has taken
        self._streams = 0
        self._nomination = Nomination(node, self.options)

    # --- what is known ---

    @property
    def promised(self) -> int:
        """The epoch below which we listen to nobody, as it is on disk."""
        return self.promise.kept

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def epoch(self) -> int:
        return self.record.epoch if self.record else 0

    @property
    def serving(self) -> bool:
        return self.role is Role.SERVING

    @property
    def counts(self) -> bool:
        """Whether this disk is one of those that the record counts on. A disk that is not named
        might have been wiped; only where there is no other can that make no difference."""
        record = self.record
        if record is None or not record.is_voter(self.node):
            return False
        named = record.uuids.get(self.node)
        return named == self.uuid or (named is None and record.quorums == ((self.node,),))

    def _quorum_nodes(self) -> list[str]:
        assert self.record is not None
        return list(dict.fromkeys(self.record.voters + self.record.joint))

    def on_members(self, alive: Mapping[str, int], now: int) -> Effects:
        """The nodes that are registered now, with the revision that each was created at."""
        self._alive = dict(alive)
        return []

    # --- promises ---

    def on_fence(self, fence: Fence, now: int) -> Effects:
        if not self.promise.accepts(fence.epoch):
            return [Send(fence.node, self._fenced())]
        effects: Effects = []
        if self.epoch < fence.epoch:
            self._promised_ms = now
            effects += self._step_down()
            self._close_stream(effects)
        return effects + self.promise.on_fence(fence) + self._proceed(now)

    def on_persisted(self, promised: int, now: int) -> Effects:
        self.promise.on_persisted(promised)
        return self._proceed(now)

    def _proceed(self, now: int) -> Effects:
        """Do what has waited for the promise to be on disk, or for the log to be whole."""
        if self._busy:
            return []
        effects: Effects = []
        for fence in self.promise.ready():
            if self.health is not Health.FAULTY:  # else the taker might choose what we cannot lend
                effects.append(Send(fence.node, self._fenced()))
        if self.promised != self.epoch:
            return effects
        if self.role is Role.FENCING and self.node not in self._ends:
            effects += self._on_own_promise(now)
        elif self.role is Role.FOLLOWING and self.follower is None:
            effects += self._open_stream(now)
        return effects

    def _fenced(self) -> Fenced:
        """What we vouch for: synced entries only."""
        end = self.log.end_durable
        return Fenced(
            self.node, self.uuid, self.promise.asked, end.epoch, end.sequence, self._committed
        )

    # --- following ---

    def _begin_following(self, now: int) -> Effects:
        record = self.record
        if record is None or self.node not in record.members:
            return []
        if record.coordinator in ("", self.node) or not self.promise.accepts(record.epoch):
            return []
        self.role = Role.FOLLOWING
        self._nomination.reset()
        return self.promise.make(record.epoch) + self._proceed(now)

    def _open_stream(self, now: int, *, source: str = "", adopt: bool = False) -> Effects:
        assert self.record is not None
        self._streams = max(self._streams + 1, now)  # not used before, in no life of this node
        self.follower = Follower(
            self.node,
            uuid=self.uuid,
            source=source or self.record.coordinator,
            epoch=self.record.epoch,
            stream=self._streams,
            log=self.log,
            committed=self._committed,
            options=self.options,
            now=now,
            adopt=adopt,
        )
        return [OpenStream(self.follower.source, self.follower.follow())]

    def _close_stream(self, effects: Effects) -> None:
        if self.follower is not None:
            self.follower = None
            effects.append(CloseStream())

    def on_followed(self, reply: Followed, now: int) -> Effects:
        follower = self.follower
        if follower is None or reply.stream != follower.stream:
            return []
        if reply.refused:  # it does not coordinate, or not yet: ask again until it counts as silent
            follower.broken = True
            if reply.waiting:
                follower.heard_ms = now
            return []
        return self._from_follower(follower.on_followed(reply, now), now)

    def on_append(self, append: Append, batches: list[Batch], now: int) -> Effects:
        follower = self.follower
        if follower is None or not self.promise.accepts(append.epoch):
            return []
        return self._from_follower(follower.on_append(append, batches, now), now)

    def on_truncated(self, sequence: int, now: int) -> Effects:
        self.log.truncate(sequence)
        self._busy = False
        effects: Effects = []
        if self.follower is not None:
            effects = self._from_follower(self.follower.on_truncated(now), now)
        return effects + self._proceed(now)

    def on_seeded(self, log: LogFacts, committed: int, now: int) -> Effects:
        """The log was replaced by one that begins at a snapshot, or is empty if that failed."""
        self.log, self._committed, self.health = log, committed, Health.SOUND
        self._busy = False
        return self._open_again(now) + self._proceed(now)

    def on_stream_lost(self, stream: int, now: int, *, gone: bool = False) -> Effects:
        """The connection under a stream broke; another is opened at the next tick. `gone`: nobody
        listens there any more, so there is no need to wait for the silence to last."""
        follower = self.follower
        if follower is not None and follower.stream == stream:
            follower.broken = True
            if gone:
                follower.heard_ms = now - self.options.silence_ms - 1
        return []

    def _open_again(self, now: int) -> Effects:
        before = self.follower
        if before is None:
            return []
        effects = self._open_stream(now, source=before.source, adopt=before.adopt)
        assert self.follower is not None
        self.follower.heard_ms, self.follower.resigned = before.heard_ms, before.resigned
        return effects

    def _open_if_broken(self, now: int) -> Effects:
        follower = self.follower
        if follower is None or self._busy or follower.resigned:
            return []
        if not follower.broken and not follower.silent(now):
            return []
        if now - follower.opened_ms < self.options.heartbeat_ms:
            return []
        return self._open_again(now)

    def _from_follower(self, effects: Effects, now: int) -> Effects:
        follower = self.follower
        assert follower is not None
        self._committed = max(self._committed, follower.committed)
        if follower.state is Following.CLOSED:
            self._halt()
        elif follower.state is Following.TRUNCATING:
            self._busy = True
        elif follower.state is Following.SEEDING:
            # Nothing is left of the log but the promise. A quorum that we are not part of holds
            # something committed past our end, so nobody depends on what we drop.
            self.log, self._committed, self._busy = LogFacts(), 0, True
        return effects + self._check_adopted(now)

    # --- the end of a role ---

    def _step_down(self) -> Effects:
        effects: Effects = []
        if self.coordinator is not None:
            effects = self.coordinator.depose()
            self.coordinator = None
        if self.role is not Role.HALTED:
            self.role = Role.IDLE
        return effects

    def _retire(self) -> Effects:
        effects: Effects = []
        self._close_stream(effects)
        self.role = Role.IDLE
        return [*effects, Retire()]

    def _halt(self) -> None:
        self.role = Role.HALTED
        self.follower = None

    @abstractmethod
    def _on_own_promise(self, now: int) -> Effects:
        """We hold the epoch, our promise is on disk and our log is whole."""

    @abstractmethod
    def _check_adopted(self, now: int) -> Effects:
        """Something was done with the stream: it may have brought what we sought."""
