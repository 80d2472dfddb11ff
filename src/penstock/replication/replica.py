"""One partition on one node, in whatever role: the machine that the driver talks to.

    IDLE ──record names a coordinator──► FOLLOWING ──it is lost, we agree, epoch won──► FENCING
      ▲                                      ▲                                            │
      │                                      │ another is coordinator        majority promised
      │                                      │                                            ▼
      └────────── stepped down ──────── SERVING ◄─barrier committed─ ENTERING ◄─────── ADOPTING
                                                                        (if another's log is better)

What makes the roles safe is in `rules`; what each does is in `follower`, `coordinator` and
`nomination`. This module decides which of them is in charge, and keeps the promise: **a replica
acts in an epoch only after its promise to refuse all earlier ones is on disk.**
"""

from __future__ import annotations

from penstock.errors import PenstockError, Unavailable
from penstock.model.batch import Batch
from penstock.replication import rules
from penstock.replication.assignment import PartitionRecord
from penstock.replication.coordinator import Coordinator
from penstock.replication.effects import (
    AppendBarrier,
    Effects,
    Halt,
    Send,
    SteppedDown,
    TakeEpoch,
)
from penstock.replication.follower import State as Following
from penstock.replication.holding import Health, Holding, Role
from penstock.replication.messages import (
    Ack,
    Append,
    Fence,
    Fenced,
    Follow,
    Followed,
    Probe,
    Probed,
)
from penstock.replication.nomination import candidates
from penstock.replication.sender import Sender, Window, answer


class Replica(Holding):
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
            effects = self._step_down()
            self._close_stream(effects)
            effects += self._begin_following(now)
        if self.node not in record.members:
            effects += self._retire()
        return effects

    def on_epoch_taken(self, record: PartitionRecord, revision: int, now: int) -> Effects:
        """We have won the epoch of this record."""
        if revision < self.revision or self.role is Role.HALTED:
            return []  # somebody was faster still
        self.record, self.revision = record, revision
        effects = self._step_down()
        self._close_stream(effects)
        if not self.counts or self.health is Health.FAULTY:
            return effects
        self.role = Role.FENCING
        self._ends, self._sought = {}, None
        self._attempt_ms = now
        return effects + self.promise.make(record.epoch) + self._proceed(now)

    # --- taking over ---

    def _on_own_promise(self, now: int) -> Effects:
        assert self.record is not None
        self._ends[self.node] = self.log.end
        others = [n for n in self._quorum_nodes() if n != self.node]
        fences: Effects = [Send(node, Fence(self.node, self.epoch)) for node in others]
        return fences + self._with_promises(now)

    def on_fenced(self, reply: Fenced, now: int) -> Effects:
        if self.role is not Role.FENCING or self.record is None:
            return []
        if reply.promised > self.epoch:
            self.role = Role.IDLE  # a later epoch exists; its record is on its way
            return []
        if reply.promised < self.epoch or self.record.uuids.get(reply.node) != reply.uuid:
            return []  # not ours, or a disk that does not count
        self._ends[reply.node] = reply.end
        return self._with_promises(now)

    def _with_promises(self, now: int) -> Effects:
        """A quorum has promised: go on from the best of their logs."""
        assert self.record is not None
        if not self.record.majority(self._ends):
            return []
        best = rules.best_log(self._ends, self.node)
        if best == self.node:
            return self._enter(now)
        self.role = Role.ADOPTING
        self._sought = self._ends[best]
        self._attempt_ms = now
        return self._open_stream(now, source=best, adopt=True)

    def _check_adopted(self, now: int) -> Effects:
        """Enter once the log that we chose is in ours; it may have grown since it was chosen."""
        sought = self._sought
        if self.role is not Role.ADOPTING or sought is None:
            return []
        return self._enter(now) if self.log.epoch_at(sought.sequence) == sought.epoch else []

    def _enter(self, now: int) -> Effects:
        effects: Effects = []
        self._close_stream(effects)
        assert self.record is not None
        self.role = Role.ENTERING
        self._nomination.reset()
        self.coordinator = Coordinator(
            self.node,
            uuid=self.uuid,
            record=self.record,
            revision=self.revision,
            log=self.log,
            committed=self._committed,
            options=self.options,
        )
        return [*effects, AppendBarrier(self.epoch)]

    def _try_again(self, now: int) -> Effects:
        """Promises or the best log are slow to come: ask once more, from the beginning."""
        if self._busy or now - self._attempt_ms < self.options.fence_ms:
            return []
        if self.role is Role.ADOPTING and self.follower is not None:
            progressing = now - self.follower.heard_ms < self.options.silence_ms
            if progressing and not self.follower.broken:
                return []
        effects: Effects = []
        self._close_stream(effects)
        self._attempt_ms = now
        self.role = Role.FENCING
        self._ends, self._sought = {}, None
        return effects + self._proceed(now)

    # --- the log ---

    def on_staged(self, batch: Batch) -> None:
        """The coordinator appended a batch of its own."""
        if self.coordinator is None:
            raise RuntimeError("a replica that does not coordinate appended")
        if batch.epoch != self.coordinator.epoch:
            raise RuntimeError(f"a batch of epoch {batch.epoch} in epoch {self.coordinator.epoch}")
        if batch.first != self.log.last + 1:
            raise RuntimeError(f"a batch at {batch.first} does not follow {self.log.last}")
        self.log.extend(epoch=batch.epoch, last=batch.last)

    def on_durable(self, sequence: int, now: int) -> Effects:
        self.log.durable = max(self.log.durable, min(sequence, self.log.last))
        if self.coordinator is not None:
            return self._from_coordinator(self.coordinator.on_durable(now))
        if self.follower is not None and self.promise.accepts(self.follower.epoch):
            return self.follower.on_durable(now)
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
        self._committed = min(self._committed, sequence_last)
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
        lends = not self._busy and self.health is not Health.FAULTY
        if follow.adopt and follow.epoch == self.promise.asked == self.promised and lends:
            lent = self._lent_to(follow.node)
            if lent is not None and lent.opened_by(follow):
                return []  # a copy that the network made
            reply = answer(
                follow, self.log, epoch=follow.epoch, node=self.node, committed=self._committed
            )
            self._lending, self._lending_epoch = None, follow.epoch
            if not reply.reseed:
                self._lending = Sender(follow, matched=reply.matched, now=now)
            return [Send(follow.node, reply)]
        taking = follow.epoch == self.epoch and self.role in (Role.FENCING, Role.ADOPTING)
        refusal = Followed(
            self.node, self.epoch, follow.stream, 0, self._committed, refused=True, waiting=taking
        )
        return [Send(follow.node, refusal)]

    def on_ack(self, ack: Ack, now: int) -> Effects:
        lent = self._lent_to(ack.node)
        if lent is not None and lent.stream == ack.stream:
            if lent.fits(ack):
                lent.on_ack(ack, now)
            else:
                self._lending = None
            return []
        if self.coordinator is None:
            return []
        if ack.promised > self.epoch:
            return self._step_down()
        return self._from_coordinator(self.coordinator.on_ack(ack, now))

    def _lent_to(self, node: str) -> Sender | None:
        """The stream of the taker that we have promised its epoch, and nobody a later one."""
        lending = self._lending
        if lending is None or lending.node != node or self._lending_epoch != self.promise.asked:
            return None
        return lending

    def on_follower_lost(self, node: str, stream: int, now: int) -> Effects:
        if self.coordinator is not None:
            self.coordinator.on_follower_lost(node, stream)
        lent = self._lent_to(node)
        if lent is not None and lent.stream == stream:
            self._lending = None
        return []

    def may_send(self, node: str) -> Window | None:
        """What may be sent to `node` now; batches that are staged count, synced or not."""
        if self.coordinator is not None:
            return self.coordinator.may_send(node)
        lent = self._lent_to(node)
        return lent.window(self.log, through=self.log.durable) if lent else None

    def append_to(self, node: str) -> Append:
        """The head of the slice that goes to `node` next."""
        if self.coordinator is not None:
            return self.coordinator.append(node)
        lent = self._lent_to(node)
        assert lent is not None
        return Append(self.node, self._lending_epoch, lent.stream, self._committed)

    def on_sent(self, node: str, last: int, *, entries: int, bytes: int, now: int) -> Effects:
        if self.coordinator is not None:
            return self.coordinator.on_sent(node, last, entries=entries, bytes=bytes, now=now)
        lent = self._lent_to(node)
        if lent is not None:
            lent.on_sent(last, entries=entries, bytes=bytes, now=now)
        return []

    def on_change_lost(self, now: int) -> Effects:
        """A `ChangeRecord` did not happen."""
        if self.coordinator is not None:
            self.coordinator.on_change_lost()
        return []

    def resign(self, now: int) -> Effects:
        """Give the epoch up so that another takes over at once. The driver has let everything
        that was under way commit; what has not is answered *unknown*, as in any failover."""
        if self.coordinator is None:
            return []
        last_words: Effects = [
            Send(node, self.coordinator.append(node, resigned=True))
            for node in self.coordinator.senders
        ]
        self._resigned_ms = now
        return last_words + self._step_down()

    def _from_coordinator(self, effects: Effects) -> Effects:
        assert self.coordinator is not None
        self._committed = max(self._committed, self.coordinator.sequence_committed)
        if self.coordinator.serving and self.role is Role.ENTERING:
            self.role = Role.SERVING
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
        follower = self.follower
        if follower is None:
            return []
        return self._from_follower(follower.on_tick(now), now) + self._open_if_broken(now)

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
        if follower is None or follower.state is Following.SEEDING:
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
            and follower.state is Following.STREAMING
            and not follower.broken
            and not self.lost(now)
            and self.log.epoch_at(self._committed) == self.epoch
        )

    def on_probe(self, probe: Probe, now: int) -> Effects:
        silent = probe.epoch >= self.epoch and self.lost(now)
        return [Send(probe.node, Probed(self.node, probe.epoch, silent))]

    def on_probed(self, reply: Probed, now: int) -> Effects:
        if not self.lost(now):
            return []
        self._nomination.on_probed(reply.node, epoch=reply.epoch, silent=reply.silent)
        return self._take_if_agreed()

    def _nominate(self, now: int) -> Effects:
        assert self.record is not None
        effects = self._open_if_broken(now)  # it may just have been restarted
        if self._resigned_ms is not None and now - self._resigned_ms <= self.options.silence_ms:
            return effects  # we wanted another to have it
        order = candidates(
            self.record, self._alive, policy=self.policy, lost=self._lost_coordinator
        )
        if self.health is not Health.SOUND:
            order.sort(key=lambda node: node == self.node)  # whoever else can should be first
        if self.health is Health.FAULTY or not self.counts or not self._nomination.due(order, now):
            return effects
        self._nomination.ask(self.epoch, now)
        others = [n for n in self._quorum_nodes() if n != self.node]
        effects += [Send(node, Probe(self.node, self.epoch)) for node in others]
        return effects + self._take_if_agreed()

    @property
    def _lost_coordinator(self) -> str:
        """Who lost the epoch goes to the end of the queue; a node that lost its own does not."""
        assert self.record is not None
        return "" if self.record.coordinator == self.node else self.record.coordinator

    def _take_if_agreed(self) -> Effects:
        record = self.record
        if record is None or self.coordinator is not None or self.role is Role.FENCING:
            return []
        if not self._nomination.agreed(record):
            return []
        self._nomination.taken()
        return [TakeEpoch()]

    def validate(self) -> None:
        """Raise AssertionError unless every invariant holds."""
        self.log.validate()
        role, promised, coordinator = self.role, self.promise.kept, self.coordinator
        assert promised <= self.promise.asked
        assert self._committed <= self.log.last or role is Role.IDLE
        coordinating = role is Role.SERVING or role is Role.ENTERING
        assert coordinating == (coordinator is not None)
        if coordinator is not None:
            assert promised == coordinator.epoch
            coordinator.validate()
        if self.follower is not None:
            self.follower.validate()


__all__ = ["Halt", "Health", "Replica", "Role", "SteppedDown"]
