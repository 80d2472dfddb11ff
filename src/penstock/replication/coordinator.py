"""The coordinator of one partition in one epoch: quorum, commit, followers, reassignment.

Rules that hold at every step:

- An epoch has one coordinator. It enters with a BARRIER of its own epoch and serves nothing before
  that barrier is committed.
- An entry is committed when a quorum of the record holds it durably *and* it belongs to the
  coordinator's own epoch; entries of earlier epochs commit beneath it.
- The commit watermark never goes back.
- Without a quorum nothing is taken, and whoever waits is soon told that the outcome is *unknown*;
  the epoch and the entries are kept, since nobody may be able to take over.
- Only a replica whose disk is the one the record names counts. Another disk under a voter's name is
  served as a learner until it has caught up and the record names it.

A single node is a cluster of one: its quorum is one, and its own `durable` report commits.

**Who is away.** A member that is not streamed to has no credit either, so it is counted like one
whose credit ran out: from the moment that it did or, if there was some left, from when the member
was last heard. It is over with the first acknowledgement on a stream, not with the opening of one:
who asks again and again and hears nothing of what it is sent stays away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from penstock.errors import Backpressure, PenstockError, QuorumUnavailable
from penstock.replication import rules
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import (
    Ack,
    AnswerUnknown,
    BeganServing,
    ChangeRecord,
    Commit,
    Effects,
    Follow,
    Send,
    Warn,
)
from penstock.replication.facts import OwnCopy
from penstock.replication.sender import Credit, LogStreams, SendWindow, StreamSender


class MemberStatus(NamedTuple):
    """One member; `credit` is None while no stream is open to it."""

    node: str
    durable: int | None  # what it acknowledged last; None: nothing in this epoch
    lag: int  # entries that it is not known to hold durably
    credit: Credit | None
    lagging: bool

    @property
    def credit_share(self) -> float:
        return 0.0 if self.credit is None else max(0.0, 1 - self.credit.utilisation)


@dataclass(slots=True)
class Absence:
    """A member that has acknowledged nothing since `since_ms`."""

    since_ms: int
    durable: int = 0
    lagging: bool = False


BACKPRESSURE_RETRY_S = 0.1
UNHEARD_SILENCES: Final = 2  # that a quorum counts as gone before those who wait are told


class Coordinator(LogStreams):
    def __init__(self, own: OwnCopy, *, record: PartitionRecord, revision: int) -> None:
        super().__init__(own, record.epoch)
        self.node, self._log, self._options = own.node, own.log, own.options
        self.record, self.revision = record, revision
        self._alone = record.quorums == ((own.node,),)
        self.sequence_committed = self._committed_found = own.committed
        self.sequence_barrier = own.log.last + 1  # commits only from here upward
        self.serving = False  # the barrier is committed
        # Of members that have no sender, or are not heard yet on the one that they have. Bounded by
        # the record: others are forgotten at the next tick.
        self._absences: dict[str, Absence] = {}
        self._changing = False  # a change of the record is under way
        self._unheard_ms: int | None = None  # since when no quorum is alive

    # --- commit ---

    def on_ack(self, ack: Ack, now: int) -> Effects:
        warnings = self.take_ack(ack, now)
        if warnings is None:
            return []
        absence = self._absences.pop(ack.node, None)
        if absence is not None and absence.lagging:
            warnings = ["resumed", *warnings]
        effects: Effects = [Warn(ack.node, what) for what in warnings]
        return effects + self.advance() + self._next_change()

    def advance(self) -> Effects:
        """Commit what a quorum holds by now: our own disk got further, or another's."""
        # The quorum of one, spelt out: a single node passes here with every write.
        reached = self._log.durable if self._alone else self.record.committed(self._durable())
        if not self.serving:  # from then on a quorum holds the barrier, too, whatever it holds
            reached = rules.commit(
                reached, committed=self.sequence_committed, barrier=self.sequence_barrier
            )
        if reached <= self.sequence_committed:
            return []
        self.sequence_committed = self._own.committed = reached
        effects: Effects = [Commit(reached)]
        if not self.serving and reached >= self.sequence_barrier:
            self.serving = True
            effects.append(BeganServing(self.epoch))
        return effects

    def _durable(self) -> dict[str, int]:
        """How far each replica that counts holds our history."""
        durable = {
            node: sender.durable for node, sender in self.senders.items() if self._counts(sender)
        }
        durable[self.node] = self._log.durable
        return durable

    def _counts(self, sender: StreamSender) -> bool:
        return self.record.uuids.get(sender.node) == sender.uuid

    # --- followers ---

    def on_follow(self, follow: Follow, now: int) -> Effects:
        effects = super().on_follow(follow, now)
        absence, sender = self._absences.get(follow.node), self.senders.get(follow.node)
        if effects and absence is not None:
            # What it held beyond the place where our logs part is gone.
            absence.durable = min(absence.durable, sender.next - 1 if sender is not None else 0)
        return effects

    def _close(self, node: str) -> None:
        sender = self.senders.pop(node, None)
        if sender is None:
            return
        since = sender.heard_ms if sender.exhausted_ms is None else sender.exhausted_ms
        absence = self._absences.setdefault(node, Absence(since))  # or away for as long as it was
        absence.durable = max(absence.durable, sender.durable)
        absence.lagging |= sender.lagging

    def standings(self) -> list[MemberStatus]:
        return [self._standing(node) for node in self._others]

    def _standing(self, node: str) -> MemberStatus:
        absence, sender = self._absences.get(node, Absence(0)), self.senders.get(node)
        held, lagging, credit = absence.durable, absence.lagging, None
        if sender is not None:  # a stream vouches for nothing before its first ack
            held, credit = max(held, sender.durable), sender.credit
            lagging = lagging or sender.lagging
        return MemberStatus(node, held or None, self._log.last - held, credit, lagging)

    @property
    def _others(self) -> list[str]:
        return [node for node in self.record.members if node != self.node]

    def may_send(self, node: str) -> SendWindow | None:
        """What may be sent to `node` now; batches that are staged count, synced or not."""
        sender = self.senders.get(node)
        if sender is None:
            return None
        learns = not self.record.is_voter(node)
        return sender.window(self._log, through=self._log.last, learns=learns)

    # --- time ---

    def on_tick(self, now: int) -> Effects:
        for node in [n for n, s in self.senders.items() if s.next < self._log.first]:
            self._close(node)  # compaction has passed it: hearing nothing, it will ask again
        effects = self._look_for_absent(now)
        for node, sender in self.senders.items():
            effects += [Warn(node, what) for what in sender.on_tick(self._options, now)]
            if now - sender.sent_ms >= self._options.heartbeat_ms:
                sender.sent_ms = now
                append = sender.append(self.node, committed=self.sequence_committed)
                effects.append(Send(node, append))
        return effects + self._listen(now) + self._next_change()

    def _look_for_absent(self, now: int) -> Effects:
        before, self._absences = self._absences, {}
        for node in self._others:
            if node in before or node not in self.senders:
                self._absences[node] = before.get(node) or Absence(now)
        effects: Effects = []
        for node, absence in self._absences.items():
            if not absence.lagging and now - absence.since_ms > self._options.lagging_ms:
                absence.lagging = True
                effects.append(Warn(node, "lagging"))
        return effects

    def _listen(self, now: int) -> Effects:
        """Whether a quorum is there, by the ticks that we have seen: a node that slept has not
        listened, and hears first."""
        if self.record.majority(self._reachable(now)):
            self._unheard_ms = None
            return []
        if self._unheard_ms is None:
            self._unheard_ms = now
        waiting = self.serving and self.sequence_committed < self._log.last
        unheard = now - self._unheard_ms >= UNHEARD_SILENCES * self._options.silence_ms
        return [AnswerUnknown()] if waiting and unheard else []

    def writable(self, now: int) -> PenstockError | None:
        """Why a write cannot be taken now; None if it can."""
        if not self.record.majority(self._reachable(now)):
            return QuorumUnavailable(
                f"alive: {' '.join(sorted(self._reachable(now)))}; that is no majority of "
                + " and of ".join(" ".join(nodes) for nodes in self.record.quorums),
                alive=sorted(self._reachable(now)),
                voters=list(self.record.voters),
            )
        if not self.record.majority(self._moving(now)):
            return Backpressure(
                "a majority of the replicas is slow", retry_after_s=BACKPRESSURE_RETRY_S
            )
        return None

    def _reachable(self, now: int) -> set[str]:
        options = self._options
        alive = {n for n, s in self.senders.items() if s.alive(options, now) and self._counts(s)}
        alive.add(self.node)
        return alive

    def has_heir(self, now: int) -> bool:
        """Whether another replica that counts is heard, and holds all that is committed."""
        alive = self._reachable(now)
        return any(
            node in alive and sender.durable >= self.sequence_committed
            for node, sender in self.senders.items()
        )

    def _moving(self, now: int) -> set[str]:
        """Those of whom we hear that take what they are sent. A batch as large as the window uses
        it up each time; only who gives nothing back for a while is slow."""
        since = now - self._options.backpressure_ms
        slow = {
            node
            for node, sender in self.senders.items()
            if sender.exhausted_ms is not None and sender.exhausted_ms < since
        }
        return self._reachable(now) - slow

    # --- who the replicas are ---

    def on_record(self, record: PartitionRecord, revision: int) -> Effects:
        self._changing = False
        self.record, self.revision = record, revision
        self._alone = record.quorums == ((self.node,),)
        for node in set(self.senders) - set(record.members):
            del self.senders[node]
        return self.advance() + self._next_change()

    def on_change_lost(self) -> None:
        """The swap that we asked for did not happen; the newer record is on its way."""
        self._changing = False

    def _next_change(self) -> Effects:
        """One step towards the replica set that is wanted. Only the holder of an epoch whose
        barrier is committed may take it, and one at a time."""
        if not self.serving or self._changing or not self.record.is_voter(self.node):
            return []
        wanted = self._named() or self._let_go() or self._reassigned()
        if wanted is None:
            return []
        self._changing = True
        return [ChangeRecord(wanted, self.revision)]

    def _named(self) -> PartitionRecord | None:
        """Let a member count whose disk is not the one the record names, once it has caught up."""
        record = self.record
        for node, sender in self.senders.items():
            if record.is_voter(node) and not self._counts(sender) and self._caught_up(sender):
                return msgspec.structs.replace(record, uuids={**record.uuids, node: sender.uuid})
        if record.uuids.get(self.node) != self._own.uuid:
            uuids = {**record.uuids, self.node: self._own.uuid}
            return msgspec.structs.replace(record, uuids=uuids)
        return None

    def _let_go(self) -> PartitionRecord | None:
        """Learners that are not wanted any more, since the wish was changed while they learned."""
        record = self.record
        wanted = record.target + record.joint
        kept = tuple(node for node in record.learners if node in wanted)
        return None if kept == record.learners else msgspec.structs.replace(record, learners=kept)

    def _reassigned(self) -> PartitionRecord | None:
        record = self.record
        if record.joint:
            return self._left_joint()
        if not record.target:
            return None
        if record.target == record.voters:
            return msgspec.structs.replace(record, target=())
        coming = [n for n in record.target if n not in record.voters]
        if any(node not in record.learners for node in coming):
            learners = tuple(dict.fromkeys((*record.learners, *coming)))
            return msgspec.structs.replace(record, learners=learners)
        senders = [self.senders.get(node) for node in coming]
        if not all(s is not None and self._caught_up(s) for s in senders):
            return None
        uuids = dict(record.uuids)
        uuids |= {s.node: s.uuid for s in senders if s is not None}
        learners = tuple(n for n in record.learners if n not in coming)
        return msgspec.structs.replace(record, joint=record.target, learners=learners, uuids=uuids)

    def _left_joint(self) -> PartitionRecord | None:
        """The new set alone, once a majority of it holds all that is committed. A wish that
        came meanwhile is left for the steps to come."""
        record = self.record
        target = () if record.target == record.joint else record.target
        alone = msgspec.structs.replace(record, voters=record.joint, joint=(), target=target)
        if alone.committed(self._durable()) < self.sequence_committed:
            return None
        uuids = {n: u for n, u in record.uuids.items() if n in alone.voters}
        learners = tuple(n for n in record.learners if n not in alone.voters)
        return msgspec.structs.replace(alone, uuids=uuids, learners=learners)

    def _caught_up(self, sender: StreamSender) -> bool:
        return (
            sender.durable >= self.sequence_committed
            and sender.lag(self._log) <= self._options.caught_up_entries
        )

    def validate(self) -> None:
        last = self._log.last
        assert self.sequence_committed <= last
        # What earlier epochs left commits beneath the barrier, or not at all.
        assert self.serving == (self.sequence_committed >= self.sequence_barrier)
        assert self.serving or self.sequence_committed == self._committed_found
        for sender in self.senders.values():
            assert sender.durable < sender.next <= last + 1
