"""The sending end of one stream: where the reader is, what it has, how much it may be sent.

A follower, a learner and a new coordinator that copies our log before it enters its epoch are all
served by one of these. There is no queue of pending entries: the driver reads the log at `next`.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.replication.credit import Credit
from penstock.replication.facts import LogFacts
from penstock.replication.messages import Ack, Append, Follow, Followed
from penstock.replication.options import ReplicationOptions
from penstock.replication.rules import meet


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

    def opened_by(self, follow: Follow) -> bool:
        return (self.node, self.uuid, self.stream) == (follow.node, follow.uuid, follow.stream)

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
        """The head of the next slice, of `node`, who sends it."""
        return Append(node, self.epoch, self.stream, committed, resigned, self.next - 1)

    def fits(self, ack: Ack) -> bool:
        """Whether that much was sent. Else it is of an opening that was lost, and of which a late
        copy of the request began this one: their accounts differ for good."""
        return self.credit.covers(ack.entries, ack.bytes)

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
        """Entries that the reader does not hold durably."""
        return log.last - self.durable


def answer(follow: Follow, log: LogFacts, *, epoch: int, node: str, committed: int) -> Followed:
    """Where a follower's log and ours part."""
    matched = meet(follow.tail, last_of=log.last_of)
    if matched is None and log.first <= 1:
        matched = 0  # no entry in common, and ours is whole
    if matched is None or matched < log.first - 1:
        return Followed(node, epoch, follow.stream, 0, committed, reseed=True)
    return Followed(node, epoch, follow.stream, matched, committed)
