"""The sending end of streams: where each reader is, what it has, how much it may be sent.

A follower, a learner and a new coordinator that copies our log before it enters its epoch are all
served by one of these. Nothing is queued: the driver reads the log at `next` when there is room, so
that a slow reader costs at most its window.

*Credit* is how much may be under way to one reader:

    room = window − (sent − received)

Both totals only ever grow. A replica's acknowledgement names the reader's total, so that one which
is lost, late or repeated does no harm; a subscriber gives back what it has handled since
(`give_back`), on a connection that loses nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import InvalidArgument
from penstock.replication.effects import Ack, Append, Effects, Follow, Followed, Send
from penstock.replication.facts import LogFacts, OwnCopy, ReplicationOptions
from penstock.replication.rules import meet


class Credit:
    """The sender's account of one stream, in entries and in bytes."""

    __slots__ = (
        "bytes_received", "bytes_sent", "bytes_window", "entries_received", "entries_sent",
        "entries_window",
    )  # fmt: skip

    def __init__(self, *, entries: int, bytes: int) -> None:
        if entries < 1 or bytes < 1:
            raise ValueError("a window is at least 1")
        self.entries_window, self.bytes_window = entries, bytes
        self.entries_sent = self.bytes_sent = 0
        self.entries_received = self.bytes_received = 0

    @property
    def entries_out(self) -> int:
        return self.entries_sent - self.entries_received

    @property
    def bytes_out(self) -> int:
        return self.bytes_sent - self.bytes_received

    @property
    def entries(self) -> int:
        """Left to send. A lone batch larger than the window may overdraw it, never twice."""
        left = self.entries_window - self.entries_sent + self.entries_received
        return left if left > 0 else 0

    @property
    def bytes(self) -> int:
        """Left to send. While no entry is under way that is something, so that nobody waits for
        bytes that will not come back."""
        left = self.bytes_window - self.bytes_sent + self.bytes_received
        return left if left > 0 else int(self.entries_sent == self.entries_received)

    @property
    def exhausted(self) -> bool:
        # As `entries` and `bytes` say; asked for every reader at every step.
        return (
            self.entries_sent - self.entries_received >= self.entries_window
            or self.bytes_sent - self.bytes_received >= self.bytes_window
        )

    @property
    def low(self) -> bool:
        return self.utilisation > 0.8

    @property
    def utilisation(self) -> float:
        """How much of the window is used, of entries or bytes, whichever is more; 1: all."""
        return max(self.entries_out / self.entries_window, self.bytes_out / self.bytes_window)

    def on_sent(self, entries: int, bytes: int) -> None:
        if self.exhausted:
            raise RuntimeError("sent without credit")
        self.use(entries, bytes)

    def use(self, entries: int, bytes: int) -> None:
        """Count what was sent, even if its frames came to more bytes than its rows."""
        self.entries_sent += entries
        self.bytes_sent += bytes

    def covers(self, entries: int, bytes: int) -> bool:
        return entries <= self.entries_sent and bytes <= self.bytes_sent

    def on_received(self, entries: int, bytes: int) -> None:
        """The reader has taken this much in all."""
        if not self.covers(entries, bytes):
            raise ValueError(f"{entries} entries received, {self.entries_sent} sent")
        self.entries_received = max(self.entries_received, entries)
        self.bytes_received = max(self.bytes_received, bytes)

    def give_back(self, entries: int, bytes: int) -> None:
        """The reader has handled this much more."""
        if not (0 <= entries <= self.entries_out and 0 <= bytes <= self.bytes_out):
            raise InvalidArgument("more credit returned than is out", field="entries")
        self.entries_received += entries
        self.bytes_received += bytes


class SendWindow(NamedTuple):
    """What may be sent now: batches from `first` on, none past `through`."""

    first: int
    through: int
    entries: int
    bytes: int
    copying: bool = False  # by a new replica, of what was there when it came: it need not hurry


class StreamSender:
    """Invariants: `durable < next` · `next - 1 <= log.last` · credit is never below zero."""

    def __init__(self, follow: Follow, *, matched: int, now: int, last: int = 0) -> None:
        self.node, self.uuid, self.stream = follow.node, follow.uuid, follow.stream
        self.epoch = follow.epoch
        self.credit = Credit(entries=follow.entries, bytes=follow.bytes)
        self.next = matched + 1
        self.last_found = last  # where the log ended when the stream was opened
        self.durable = 0  # nothing is vouched for before the first acknowledgement
        self.heard_ms = now
        self.sent_ms = now
        self.exhausted_ms: int | None = None  # since when there is no credit
        self.low = False
        self.lagging = False

    def window(self, log: LogFacts, *, through: int, learns: bool = False) -> SendWindow | None:
        """`learns`: nobody waits for this reader yet. Only what it found counts as a copy, so that
        it catches up in the end however fast the log grows."""
        if self.next > through or self.credit.exhausted:
            return None
        if self.next < log.first:  # compacted meanwhile: it will ask again, and start over
            return None
        copying = learns and self.next <= self.last_found
        return SendWindow(self.next, through, self.credit.entries, self.credit.bytes, copying)

    def on_sent(self, last: int, *, entries: int, bytes: int, now: int) -> list[str]:
        """Returns what is worth a warning."""
        self.credit.on_sent(entries, bytes)
        self.next = last + 1
        self.sent_ms = now
        warnings = []
        if self.credit.low and not self.low:
            self.low = True
            warnings.append("credit_low")
        if self.credit.exhausted and self.exhausted_ms is None:
            self.exhausted_ms = now
            warnings.append("credit_exhausted")
        return warnings

    def append(self, node: str, *, committed: int, resigned: bool = False) -> Append:
        return Append(node, self.epoch, self.stream, committed, resigned, self.next - 1)

    def on_ack(self, ack: Ack, now: int) -> list[str]:
        self.credit.on_received(ack.entries, ack.bytes)
        self.heard_ms = max(self.heard_ms, now)
        self.durable = max(self.durable, min(ack.durable, self.next - 1))
        if not self.credit.low:
            self.low = False
        if not self.credit.exhausted:
            self.exhausted_ms = None
            if self.lagging:
                self.lagging = False
                return ["resumed"]
        return []

    def on_tick(self, options: ReplicationOptions, now: int) -> list[str]:
        since = self.exhausted_ms
        if since is not None and not self.lagging and now - since > options.lagging_ms:
            self.lagging = True
            return ["lagging"]
        return []

    def alive(self, options: ReplicationOptions, now: int) -> bool:
        return now - self.heard_ms <= options.silence_ms

    def lag(self, log: LogFacts) -> int:
        return log.last - self.durable


def answer(follow: Follow, log: LogFacts, *, epoch: int, node: str, committed: int) -> Followed:
    """Where a follower's log and ours part."""
    matched = meet(follow.tail, last_of=log.last_of)
    if matched is None and log.first <= 1:
        matched = 0  # no entry in common, and ours is whole
    if matched is None or matched < log.first - 1:
        return Followed(node, epoch, follow.stream, 0, committed, reseed=True)
    return Followed(node, epoch, follow.stream, matched, committed)


class LogStreams:
    """The streams that go out of a replica in one epoch, by their readers: from its coordinator, or
    from one who lends its log to the taker that it has promised the epoch."""

    def __init__(self, own: OwnCopy, epoch: int) -> None:
        self._own, self.epoch = own, epoch
        self.senders: dict[str, StreamSender] = {}

    def on_follow(self, follow: Follow, now: int) -> Effects:
        """Open a stream to a reader; a stream that it had before is void."""
        own, before = self._own, self.senders.get(follow.node)
        if before is not None and (before.uuid, before.stream) == (follow.uuid, follow.stream):
            return []  # a copy that the network made
        reply = answer(follow, own.log, epoch=self.epoch, node=own.node, committed=own.committed)
        self._close(follow.node)
        if not reply.reseed:
            self.senders[follow.node] = StreamSender(
                follow, matched=reply.matched, now=now, last=own.log.last
            )
        return [Send(follow.node, reply)]

    def on_follower_lost(self, node: str, stream: int) -> None:
        sender = self.senders.get(node)
        if sender is not None and sender.stream == stream:
            self._close(node)

    def may_send(self, node: str) -> SendWindow | None:
        """What may be sent to `node` now: of a log that is lent, what is synced."""
        sender, log = self.senders.get(node), self._own.log
        return None if sender is None else sender.window(log, through=log.durable)

    def take_ack(self, ack: Ack, now: int) -> list[str] | None:
        """Returns what is worth a warning; None if the acknowledgement is of no stream here."""
        sender = self.senders.get(ack.node)
        if sender is None or sender.stream != ack.stream or ack.epoch != self.epoch:
            return None  # of a stream that is closed
        if sender.uuid != ack.uuid:
            return None  # of a disk that is gone
        if not sender.credit.covers(ack.entries, ack.bytes):
            # It is of an opening that was lost, and of which a late copy of the request began this
            # one: their accounts differ for good. Hearing nothing, the reader will ask again.
            self._close(ack.node)
            return None
        return sender.on_ack(ack, now)

    def _close(self, node: str) -> None:
        self.senders.pop(node, None)
