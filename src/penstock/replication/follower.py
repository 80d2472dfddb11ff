"""The receiving end of one stream: what arrives is compared, ordered, written and vouched for.

A stream begins with a handshake: we tell the epochs of our log from our commit on, the sender tells
up to where ours equals its own (`matched`). What we have beyond that conflicts and is forgotten;
from then on the log only grows by what the sender says, so `matched` is how far our log is known
to be its history. Batches that come too early wait within a bound; past it, we open a new stream.

    OPENING ──Followed──► TRUNCATING ──truncated──► STREAMING
        └──────── nothing to forget ─────────────────┘
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from penstock.model.batch import Batch
from penstock.replication import rules
from penstock.replication.effects import (
    Ack,
    Append,
    Commit,
    Effects,
    Follow,
    Followed,
    Halt,
    Reseed,
    Send,
    Truncate,
    Write,
)
from penstock.replication.facts import OwnCopy
from penstock.replication.rules import Fit


class FollowerState(Enum):
    OPENING = "opening"  # asked, not answered yet
    TRUNCATING = "truncating"  # what conflicts is being forgotten
    STREAMING = "streaming"
    SEEDING = "seeding"  # too far behind: the driver copies a snapshot
    CLOSED = "closed"


class Follower:
    """Invariants: `committed <= matched <= log.last` while streaming · the buffer is bounded."""

    def __init__(
        self, own: OwnCopy, *, source: str, epoch: int, stream: int, now: int, adopt: bool = False
    ) -> None:
        self._own, self._log, self._options = own, own.log, own.options
        self.source, self.epoch, self.stream, self.adopt = source, epoch, stream, adopt
        self.state = FollowerState.OPENING
        self.matched = 0
        self.heard_ms = self.opened_ms = now
        self.resigned = False  # the sender has given up its epoch
        self.broken = False  # the stream cannot go on: open another
        self._entries = self._bytes = 0  # received in all
        self._entries_acked = self._durable_acked = 0
        # Batches that are given to the disk: the last sequence, entries and bytes up to there.
        self._unsynced: deque[tuple[int, int, int]] = deque()
        self._taken = self._synced = (0, 0)  # entries and bytes: given to the disk, and back
        self._buffer: dict[int, Batch] = {}  # first sequence -> a batch that came too early
        self._buffered_ms = 0  # since when the buffer has not been empty
        self._heard_commit = 0

    def follow(self) -> Follow:
        own, options = self._own, self._options
        return Follow(
            own.node, own.uuid, self.epoch, self.stream, own.committed,
            own.log.tail(own.committed), options.credit_entries, options.credit_bytes, self.adopt,
        )  # fmt: skip

    # --- the handshake ---

    def on_followed(self, reply: Followed, now: int) -> Effects:
        if reply.stream != self.stream:
            return []
        if reply.refused:  # it does not coordinate, or not yet: ask again until it counts as silent
            self.broken = True
            self.heard_ms = now if reply.waiting else self.heard_ms
            return []
        if self.state is not FollowerState.OPENING:
            return []
        self.heard_ms = now
        if reply.reseed:
            self.state = FollowerState.SEEDING
            return [Reseed(self.source)]
        return self._agree(reply, now)

    def _agree(self, reply: Followed, now: int) -> Effects:
        """Forget what is not in the sender's log, unless it is committed here."""
        committed = self._own.committed
        if not rules.may_truncate(reply.matched, committed=committed):
            self.state = FollowerState.CLOSED
            held = f"{self.source} holds our history up to {reply.matched} only"
            return [Halt(f"{held}, but {committed} is committed here")]
        self.matched = reply.matched
        self._heard_commit = max(self._heard_commit, reply.committed)
        if self._log.last > reply.matched:
            self.state = FollowerState.TRUNCATING
            return [Truncate(reply.matched)]
        return self._begin_streaming(now)

    def on_truncated(self, now: int) -> Effects:
        return self._begin_streaming(now) if self.state is FollowerState.TRUNCATING else []

    def _begin_streaming(self, now: int) -> Effects:
        """What we hold already may be all that a quorum waits for: vouch for it at once."""
        self.state = FollowerState.STREAMING
        effects = self._drain(now)
        return [*effects, self._ack()]

    # --- the stream ---

    def on_append(self, append: Append, batches: list[Batch], now: int) -> Effects:
        if append.stream != self.stream or append.epoch != self.epoch:
            return []  # of a stream that we have left
        if self.state in (FollowerState.CLOSED, FollowerState.SEEDING):
            return []
        self.heard_ms = now
        self.resigned = self.resigned or append.resigned
        if self.broken:  # what it has counted so far is no longer what was sent
            return []
        self._heard_commit = max(self._heard_commit, append.committed)
        for batch in batches:
            self._receive(batch)
        if self.state is not FollowerState.STREAMING:
            self.on_tick(now)
            return []
        effects = self._drain(now)
        if not batches and append.sent > self._log.last and not self._buffer:
            self.broken = True  # a slice got lost without the stream
        ack_every = min(self._options.ack_entries, max(1, self._options.credit_entries // 2))
        if not batches or self._returned()[0] - self._entries_acked >= ack_every:
            effects.append(self._ack())  # without batches, an answer to the sign of life
        return effects

    def _receive(self, batch: Batch) -> None:
        """Credit comes back for what is new; a copy that the network made was never paid for."""
        streaming = self.state is FollowerState.STREAMING
        if batch.first in self._buffer or (streaming and batch.first <= self._log.last):
            return
        self._entries += batch.count
        self._bytes += batch.size
        self._buffer[batch.first] = batch

    def on_durable(self) -> Effects:
        """The disk got further: vouch for it at once, somebody waits for the quorum."""
        if self.state is FollowerState.STREAMING and self._vouched > self._durable_acked:
            return [self._ack()]
        return []

    def on_unwritten(self) -> None:
        """The log ends before what we took: the stream cannot go on."""
        self.broken = True
        self.matched = min(self.matched, self._log.last)

    def on_stream_lost(self, stream: int, now: int, *, gone: bool) -> None:
        """The connection broke; `gone`: nobody listens there, so the silence has lasted already."""
        if stream == self.stream:
            self.broken = True
            if gone:
                self.heard_ms = now - self._options.silence_ms - 1

    def wants_another(self, now: int) -> bool:
        """Whether this stream is of no use and another may be opened: one for each heartbeat."""
        if self.resigned or not (self.broken or self.silent(now)):
            return False
        return now - self.opened_ms >= self._options.heartbeat_ms

    def silent(self, now: int) -> bool:
        """Nothing has come of this stream for too long; before its answer, nothing else counts."""
        heard = self.opened_ms if self.state is FollowerState.OPENING else self.heard_ms
        return now - max(heard, self.opened_ms) > self._options.silence_ms

    @property
    def _vouched(self) -> int:
        return rules.acknowledged(self._log.durable, matched=self.matched)

    def _returned(self) -> tuple[int, int]:
        """Entries and bytes that credit is given back for: all that was received. While more than
        a window of bytes waits for the disk, only what is synced, so that a slow disk holds back
        the sender too, and costs two windows of memory."""
        unsynced, durable = self._unsynced, self._log.durable
        while unsynced and unsynced[0][0] <= durable:
            self._synced = unsynced.popleft()[1:]
        if self._bytes - self._synced[1] > self._options.credit_bytes:
            return self._synced
        return self._entries, self._bytes

    def _ack(self) -> Send:
        entries, size = self._returned()
        self._entries_acked = max(self._entries_acked, entries)
        self._durable_acked = self._vouched
        ack = Ack(
            self._own.node, self._own.uuid, self.epoch, self.stream, entries, size, self._vouched,
            self.epoch,
        )  # fmt: skip
        return Send(self.source, ack)

    def _drain(self, now: int) -> Effects:
        """Take what fits from the buffer, in order."""
        taken: list[Batch] = []
        while self._buffer:
            batch = self._buffer.pop(self._log.last + 1, None)
            if batch is None:
                break
            fit = rules.fit(
                batch.first, batch.last, epoch=batch.epoch, epoch_previous=batch.epoch_previous,
                end=self._log.end, epoch_at=self._log.epoch_at,
            )  # fmt: skip
            if fit is not Fit.NEXT:
                self.broken = True
                break
            self._log.extend(epoch=batch.epoch, last=batch.last)
            self.matched = batch.last
            self._taken = (self._taken[0] + batch.count, self._taken[1] + batch.size)
            self._unsynced.append((batch.last, *self._taken))
            taken.append(batch)
        effects: Effects = [Write(taken)] if taken else []
        self.on_tick(now)
        return effects + self._advance(self._heard_commit)

    def on_tick(self, now: int) -> None:
        """Give the stream up if too much waits in the buffer, or for too long."""
        if not self._buffer:
            self._buffered_ms = now
        elif (
            len(self._buffer) > self._options.buffer_batches
            or now - self._buffered_ms > self._options.buffer_ms
        ):
            self._buffer.clear()
            self.broken = True

    def _advance(self, committed: int) -> Effects:
        if self.adopt:
            return []  # its sender coordinates nothing
        own = self._own
        reached = rules.follower_commit(committed, matched=self.matched, committed=own.committed)
        if reached <= own.committed:
            return []
        own.committed = reached
        return [Commit(reached)]

    def validate(self) -> None:
        assert len(self._buffer) <= self._options.buffer_batches + 1
        if self.state is FollowerState.STREAMING:
            assert self.matched <= self._log.last
            assert self._own.committed <= self.matched or self.adopt
