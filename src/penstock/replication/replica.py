"""One partition on one node, in whatever role: the machine that the driver talks to.

    IDLE ──record names a coordinator──► FOLLOWING ──it is lost, we agree, epoch won──► FENCING
      ▲                                      ▲                                            │
      │                                      │ another is coordinator        majority promised
      │                                      │                                            ▼
      └────────── stepped down ──────── SERVING ◄─barrier committed─ ENTERING ◄─────── ADOPTING
                                                                        (if another's log is better)

Every change of the role is in this file, by `_become`, which holds it against TRANSITIONS. A
replica leaves a role through IDLE: it steps down before it follows another or takes an epoch. Only
a takeover goes on from role to role, and begins with FENCING again when answers are slow to come.
HALTED is left by nobody.

What makes the roles safe is in `rules`; what each does is in `follower`, `takeover` and
`coordinator`. This module decides which of them is in charge, and keeps two orders. **A replica
acts in an epoch only after its promise to refuse all earlier ones is on disk**, and it tells nobody
where its log ends while the driver cuts or replaces it. What waits for either is done by
`_proceed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from penstock.errors import PenstockError, Unavailable
from penstock.model.batch import Batch
from penstock.replication import rules
from penstock.replication.assignment import PartitionRecord
from penstock.replication.coordinator import Coordinator
from penstock.replication.effects import (
    Ack,
    Append,
    AppendBarrier,
    CloseStream,
    Effects,
    Fence,
    Fenced,
    Follow,
    Followed,
    Letter,
    OpenStream,
    Probe,
    Probed,
    Retire,
    Send,
    SteppedDown,
    Warn,
)
from penstock.replication.facts import LogFacts, OwnCopy, ReplicationOptions
from penstock.replication.follower import Follower, FollowerState
from penstock.replication.sender import LogStreams, SendWindow, StreamSender
from penstock.replication.takeover import Nomination, Policy, Promise, Votes


class Role(Enum):
    IDLE = "idle"  # no coordinator is known, or we are no member
    FOLLOWING = "following"
    FENCING = "fencing"  # we hold the epoch and gather promises
    ADOPTING = "adopting"  # we copy the best log among those who promised
    ENTERING = "entering"  # our barrier is appended, not committed
    SERVING = "serving"
    HALTED = "halted"  # a rule was broken; nothing is done any more


TRANSITIONS: Final = {
    Role.IDLE: {Role.FOLLOWING, Role.FENCING},
    Role.FOLLOWING: {Role.IDLE, Role.HALTED},
    Role.FENCING: {Role.IDLE, Role.FENCING, Role.ADOPTING, Role.ENTERING},
    Role.ADOPTING: {Role.IDLE, Role.FENCING, Role.ENTERING, Role.HALTED},
    Role.ENTERING: {Role.IDLE, Role.SERVING},
    Role.SERVING: {Role.IDLE},
    Role.HALTED: set[Role](),
}


class LogHealth(Enum):
    """What the driver has found of the log. Its end and the promise are true in any case."""

    SOUND = "sound"
    DAMAGED = "damaged"  # some of it cannot be read: better that others coordinate
    FAULTY = "faulty"  # what a takeover needs of it cannot be read: it takes no part in any


class Replica(OwnCopy):
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
        options = options or ReplicationOptions()
        super().__init__(node, uuid=uuid, log=log, committed=committed, options=options)
        self.promise = Promise(promised)
        self.role = Role.IDLE
        self.health = LogHealth.SOUND  # set by the driver; a log that is replaced is sound again
        self.barred = False  # set by the driver: this node must not begin to coordinate
        self.record: PartitionRecord | None = None
        self.revision = 0
        self.coordinator: Coordinator | None = None
        self.follower: Follower | None = None
        self._alive: dict[str, int] = {}
        self._promised_ms = 0  # when we promised an epoch whose record we had not seen
        self._busy = False  # the driver cuts or replaces the log: nobody may be told where it ends
        self._votes = Votes(0)  # for the epoch that we hold
        self._lent: LogStreams | None = None  # to a taker that adopts our log
        self._streams = 0
        self._nomination = Nomination(node, options, policy)

    # --- what is known ---

    @property
    def promised(self) -> int:
        """The epoch below which we listen to nobody, as it is on disk."""
        return self.promise.kept

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

    def on_members(self, alive: Mapping[str, int]) -> None:
        """The nodes that are registered now, with the revision that each was created at."""
        self._alive = dict(alive)

    def on_message(self, letter: Letter, now: int) -> Effects:
        return _HANDLERS[type(letter)](self, letter, now)

    # --- roles ---

    def _become(self, role: Role) -> None:
        if role not in TRANSITIONS[self.role]:
            raise RuntimeError(f"illegal transition {self.role} -> {role}")
        self.role = role

    def _step_down(self) -> Effects:
        """Leave the role, whatever it is; a stream that is read from is left open."""
        if self.role not in (Role.IDLE, Role.HALTED):
            self._become(Role.IDLE)
        coordinator, self.coordinator = self.coordinator, None
        return [] if coordinator is None else [SteppedDown(coordinator.epoch)]

    def _leave(self) -> Effects:
        """Leave the role, and the stream that is read from."""
        return self._step_down() + self._close_stream()

    # --- metadata ---

    def on_record(self, record: PartitionRecord, revision: int, now: int) -> Effects:
        """A version of the partition's record; one that we have seen, or an older one, is void."""
        if revision <= self.revision or self.role is Role.HALTED:
            return []
        same = self.epoch == record.epoch
        self.record, self.revision = record, revision
        if self.coordinator is not None and record.epoch == self.coordinator.epoch:
            effects = self._from_coordinator(self.coordinator.on_record(record, revision))
            if not record.is_voter(self.node):
                effects += self.resign(now)
        elif same and self.role in (Role.FENCING, Role.ADOPTING, Role.FOLLOWING):
            effects = []  # lists changed; who takes over and who is followed did not
        else:
            effects = self._leave() + self._begin_following(now)
        if self.node not in record.members:
            effects += [*self._leave(), Retire()]
        return effects

    def on_epoch_taken(self, record: PartitionRecord, revision: int, now: int) -> Effects:
        if revision < self.revision or self.role is Role.HALTED:
            return []  # somebody was faster still
        self.record, self.revision = record, revision
        effects = self._leave()
        if not self.counts or self.health is LogHealth.FAULTY or self.barred:
            return effects
        self._become(Role.FENCING)
        self._votes = Votes(now)
        return effects + self.promise.make(record.epoch) + self._proceed(now)

    # --- promises ---

    def on_fence(self, fence: Fence, now: int) -> Effects:
        if not self.promise.accepts(fence.epoch):
            return [Send(fence.node, self._fenced())]
        effects: Effects = []
        if self.epoch < fence.epoch:
            self._promised_ms = now
            effects = self._leave()
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
            if self.health is not LogHealth.FAULTY:  # else a taker might choose what we cannot lend
                effects.append(Send(fence.node, self._fenced()))
        if self.promised != self.epoch:
            return effects
        if self.role is Role.FENCING and self.node not in self._votes.ends:
            effects += self._on_own_promise(now)
        elif self.role is Role.FOLLOWING and self.follower is None:
            effects += self._open_stream(now)
        return effects

    def _fenced(self) -> Fenced:
        """What we vouch for: synced entries only."""
        end = self.log.end_durable
        return Fenced(
            self.node, self.uuid, self.promise.asked, end.epoch, end.sequence, self.committed
        )

    # --- following ---

    def _begin_following(self, now: int) -> Effects:
        record = self.record
        if record is None or self.node not in record.members:
            return []
        if record.coordinator in ("", self.node) or not self.promise.accepts(record.epoch):
            return []
        self._become(Role.FOLLOWING)
        self._nomination.reset()
        return self.promise.make(record.epoch) + self._proceed(now)

    def _open_stream(self, now: int, *, source: str = "", adopt: bool = False) -> Effects:
        assert self.record is not None
        self._streams = max(self._streams + 1, now)  # not used before, in no life of this node
        source, epoch = source or self.record.coordinator, self.record.epoch
        self.follower = Follower(
            self, source=source, epoch=epoch, stream=self._streams, now=now, adopt=adopt
        )
        return [OpenStream(self.follower.source, self.follower.follow())]

    def _close_stream(self) -> Effects:
        follower, self.follower = self.follower, None
        return [] if follower is None else [CloseStream()]

    def on_followed(self, reply: Followed, now: int) -> Effects:
        if self.follower is None:
            return []
        return self._from_follower(self.follower.on_followed(reply, now))

    def on_append(self, append: Append, batches: list[Batch], now: int) -> Effects:
        follower = self.follower
        if follower is None or not self.promise.accepts(append.epoch):
            return []
        return self._from_follower(follower.on_append(append, batches, now))

    def on_truncated(self, sequence: int, now: int) -> Effects:
        self.log.truncate(sequence)
        self._busy = False
        effects: Effects = []
        if self.follower is not None:
            effects = self._from_follower(self.follower.on_truncated(now))
        return effects + self._proceed(now)

    def on_seeded(self, log: LogFacts, committed: int, now: int) -> Effects:
        """The log was replaced by one that begins at a snapshot, or is empty if that failed."""
        self.log, self.committed, self.health = log, committed, LogHealth.SOUND
        self._busy = False
        return self._open_again(now) + self._proceed(now)

    def on_stream_lost(self, stream: int, now: int, *, gone: bool = False) -> None:
        """The connection under a stream broke; another is opened at the next tick."""
        if self.follower is not None:
            self.follower.on_stream_lost(stream, now, gone=gone)

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
        if follower is None or self._busy or not follower.wants_another(now):
            return []
        return self._open_again(now)

    def _from_follower(self, effects: Effects) -> Effects:
        follower = self.follower
        assert follower is not None
        if follower.state is FollowerState.CLOSED:
            self._become(Role.HALTED)
            self.follower = None
        elif follower.state is FollowerState.TRUNCATING:
            self._busy = True
        elif follower.state is FollowerState.SEEDING:
            # Nothing is left of the log but the promise. A quorum that we are not part of holds
            # something committed past our end, so nobody depends on what we drop.
            self.log, self.committed, self._busy = LogFacts(), 0, True
        return effects + self._check_adopted()

    # --- taking over ---

    def _on_own_promise(self, now: int) -> Effects:
        assert self.record is not None
        self._votes.ends[self.node] = self.log.end
        fence, others = Fence(self.node, self.epoch), self.record.voters_but(self.node)
        return [*(Send(node, fence) for node in others), *self._with_promises(now)]

    def on_fenced(self, reply: Fenced, now: int) -> Effects:
        if self.role is not Role.FENCING or self.record is None:
            return []
        if reply.promised > self.epoch:
            self._become(Role.IDLE)  # a later epoch exists; its record is on its way
            return []
        if reply.promised < self.epoch or self.record.uuids.get(reply.node) != reply.uuid:
            return []  # not ours, or a disk that does not count
        self._votes.add(reply, now)
        return self._with_promises(now)

    def quorum_ms(self, own_ms: int, now: int) -> int:
        """As `Votes.quorum_ms` says, of those who promised our epoch."""
        assert self.record is not None
        return self._votes.quorum_ms(self.record, node=self.node, own_ms=own_ms, now=now)

    def _with_promises(self, now: int) -> Effects:
        """A quorum has promised: go on from the best of their logs."""
        assert self.record is not None
        votes = self._votes
        if not self.record.majority(votes.ends):
            return []
        best = rules.best_log(votes.ends, self.node)
        if best == self.node:
            return self._enter()
        self._become(Role.ADOPTING)
        votes.sought, votes.asked_ms = votes.ends[best], now
        return self._open_stream(now, source=best, adopt=True)

    def _check_adopted(self) -> Effects:
        """Enter once the log that we chose is in ours; it may have grown since it was chosen."""
        sought = self._votes.sought
        if self.role is not Role.ADOPTING or sought is None:
            return []
        return self._enter() if self.log.epoch_at(sought.sequence) == sought.epoch else []

    def _enter(self) -> Effects:
        assert self.record is not None
        self._become(Role.ENTERING)
        self._nomination.reset()
        self.coordinator = Coordinator(self, record=self.record, revision=self.revision)
        return [*self._close_stream(), AppendBarrier(self.epoch)]

    def _try_again(self, now: int) -> Effects:
        """Promises or the best log are slow to come: ask once more, from the beginning."""
        if self._busy or now - self._votes.asked_ms < self.options.fence_ms:
            return []
        if self.role is Role.ADOPTING and self.follower is not None:
            progressing = now - self.follower.heard_ms < self.options.silence_ms
            if progressing and not self.follower.broken:
                return []
        self._become(Role.FENCING)
        self._votes = Votes(now)
        return self._close_stream() + self._proceed(now)

    # --- the log ---

    def on_staged(self, batch: Batch) -> None:
        """The coordinator appended a batch of its own."""
        if self.coordinator is None or batch.epoch != self.coordinator.epoch:
            raise RuntimeError(f"a batch of epoch {batch.epoch}, which is not coordinated here")
        if batch.first != self.log.last + 1:
            raise RuntimeError(f"a batch at {batch.first} does not follow {self.log.last}")
        if batch.first == self.coordinator.sequence_barrier:  # a run of our epoch begins
            self.log.extend(epoch=batch.epoch, last=batch.last)
        else:
            self.log.last = batch.last

    def on_durable(self, sequence: int) -> Effects:
        self.log.durable = max(self.log.durable, min(sequence, self.log.last))
        if self.coordinator is not None:
            return self._from_coordinator(self.coordinator.advance())
        if self.follower is not None and self.promise.accepts(self.follower.epoch):
            return self.follower.on_durable()
        return []

    def on_unwritten(self, sequence_last: int, now: int) -> Effects:
        """Batches of a `Write` could not be staged: the log really ends here. A `Commit` that came
        with them is void too."""
        effects: Effects = []
        if self.coordinator is not None:
            if self.log.last >= self.coordinator.sequence_barrier:
                # An epoch would have two entries of one sequence.
                raise RuntimeError("what a coordinator staged may have been sent: it stays")
            effects = self.resign(now)  # what we adopted has no room here
        self.log.truncate(sequence_last)
        self.committed = min(self.committed, sequence_last)
        if self.follower is not None:
            self.follower.on_unwritten()
        return effects

    # --- coordinating ---

    def writable(self, now: int) -> PenstockError | None:
        """Why a write cannot be taken here now; None if it can."""
        if self.coordinator is None or not self.serving:
            return Unavailable("this node does not coordinate the partition")
        return self.coordinator.writable(now)

    def on_follow(self, follow: Follow, now: int) -> Effects:
        """Somebody wants our log: a follower of our epoch, or a taker that adopts it."""
        if self.coordinator is not None and follow.epoch == self.coordinator.epoch:
            return self.coordinator.on_follow(follow, now)
        lends = not self._busy and self.health is not LogHealth.FAULTY
        if follow.adopt and follow.epoch == self.promise.asked == self.promised and lends:
            if self._lent is None or self._lent.epoch != follow.epoch:
                self._lent = LogStreams(self, follow.epoch)
            return self._lent.on_follow(follow, now)
        taking = follow.epoch == self.epoch and self.role in (Role.FENCING, Role.ADOPTING)
        refusal = Followed(
            self.node, self.epoch, follow.stream, 0, self.committed, refused=True, waiting=taking
        )
        return [Send(follow.node, refusal)]

    def on_ack(self, ack: Ack, now: int) -> Effects:
        if self.coordinator is None:
            if self._outgoing is not None:
                self._outgoing.take_ack(ack, now)
            return []
        if ack.promised > self.epoch:
            return self._step_down()
        return self._from_coordinator(self.coordinator.on_ack(ack, now))

    @property
    def _outgoing(self) -> LogStreams | None:
        """Our streams to those who follow us, or to the taker that we have promised its epoch, and
        nobody a later one."""
        if self.coordinator is not None:
            return self.coordinator
        lent = self._lent
        return lent if lent is not None and lent.epoch == self.promise.asked else None

    def on_follower_lost(self, node: str, stream: int) -> None:
        if self._outgoing is not None:
            self._outgoing.on_follower_lost(node, stream)

    def may_send(self, node: str) -> SendWindow | None:
        return self._outgoing.may_send(node) if self._outgoing is not None else None

    def append_to(self, node: str) -> Append:
        sender = self._sender_to(node)
        assert sender is not None
        return sender.append(self.node, committed=self.committed)

    def on_sent(self, node: str, last: int, *, entries: int, bytes: int, now: int) -> Effects:
        sender = self._sender_to(node)
        if sender is None:
            return []
        warnings = sender.on_sent(last, entries=entries, bytes=bytes, now=now)
        return [Warn(node, what) for what in warnings if self.coordinator is not None]

    def _sender_to(self, node: str) -> StreamSender | None:
        return self._outgoing.senders.get(node) if self._outgoing is not None else None

    def on_change_lost(self) -> None:
        if self.coordinator is not None:
            self.coordinator.on_change_lost()

    def resign(self, now: int) -> Effects:
        """Give the epoch up so that another takes over at once. The driver has let everything
        that was under way commit; what has not is answered *unknown*, as in any failover."""
        if self.coordinator is None:
            return []
        last_words: Effects = [
            Send(node, sender.append(self.node, committed=self.committed, resigned=True))
            for node, sender in self.coordinator.senders.items()
        ]
        self._nomination.on_resigned(now)
        return last_words + self._step_down()

    def _from_coordinator(self, effects: Effects) -> Effects:
        assert self.coordinator is not None
        if self.coordinator.serving and self.role is Role.ENTERING:
            self._become(Role.SERVING)
        return effects

    # --- time ---

    def on_tick(self, now: int) -> Effects:
        if self.role is Role.HALTED or self.record is None:
            return []
        if self.coordinator is not None:
            return self._from_coordinator(self.coordinator.on_tick(now))
        if self.role in (Role.FENCING, Role.ADOPTING):
            return self._try_again(now)
        if self.lost(now):
            return self._nominate(now)
        self._nomination.reset()
        if self.follower is None:
            return []
        self.follower.on_tick(now)
        return self._from_follower([]) + self._open_if_broken(now)

    def lost(self, now: int) -> bool:
        """Whether there is no coordinator as far as we can tell."""
        record, follower = self.record, self.follower
        if record is None or self.coordinator is not None:
            return False
        if self.role in (Role.FENCING, Role.ADOPTING):
            return False
        if self.promised > record.epoch:  # somebody takes over; its record is on its way
            return now - self._promised_ms > self.options.silence_ms
        if record.coordinator in ("", self.node):
            return True  # nobody, or ourselves in a life before this one
        if self._alive and record.coordinator not in self._alive:
            return True
        if follower is None or follower.state is FollowerState.SEEDING:
            return False
        return follower.resigned or now - follower.heard_ms > self.options.silence_ms

    def replaceable(self, now: int) -> bool:
        """Whether another has all that is committed, and lets us copy it: it coordinates, we hear
        it, and the barrier of its epoch is committed. Meanwhile a quorum must do without us."""
        record, follower = self.record, self.follower
        return (
            self.role is Role.FOLLOWING
            and record is not None
            and record.majority([node for node in self._alive if node != self.node])
            and follower is not None
            and follower.state is FollowerState.STREAMING
            and not follower.broken
            and not self.lost(now)
            and self.log.epoch_at(self.committed) == self.epoch
        )

    def on_probe(self, probe: Probe, now: int) -> Effects:
        silent = probe.epoch >= self.epoch and self.lost(now)
        return [Send(probe.node, Probed(self.node, probe.epoch, silent))]

    def on_probed(self, reply: Probed, now: int) -> Effects:
        if self.record is None or not self.lost(now):
            return []
        self._nomination.on_probed(reply.node, epoch=reply.epoch, silent=reply.silent)
        return self._nomination.take(self.record)

    def _nominate(self, now: int) -> Effects:
        assert self.record is not None
        effects = self._open_if_broken(now)  # it may just have been restarted
        if self.health is LogHealth.FAULTY or self.barred or not self.counts:
            return effects
        damaged = self.health is not LogHealth.SOUND  # whoever else can should be first
        return effects + self._nomination.on_lost(self.record, self._alive, now, last=damaged)

    def validate(self) -> None:
        self.log.validate()
        role, promised, coordinator = self.role, self.promise.kept, self.coordinator
        assert promised <= self.promise.asked
        assert self.committed <= self.log.last or role is Role.IDLE
        assert (role in (Role.SERVING, Role.ENTERING)) == (coordinator is not None)
        if coordinator is not None:
            assert promised == coordinator.epoch
            coordinator.validate()
        if self.follower is not None:
            self.follower.validate()


_HANDLERS: Final[dict[type, Callable[[Replica, Any, int], Effects]]] = {
    Ack: Replica.on_ack,
    Fence: Replica.on_fence,
    Fenced: Replica.on_fenced,
    Followed: Replica.on_followed,
    Probe: Replica.on_probe,
    Probed: Replica.on_probed,
}
