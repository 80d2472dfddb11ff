"""A log stream, or a subscription, of a partition that another node serves: passed on, frame by
frame.

What comes from the other node and does not fit the reader's connection waits in this node, so the
other one may send a part of the reader's window only (`bytes_lent`). It gets that part back as
frames are passed on, while the reader's connection takes them; and never so much that more than
the reader's window could be under way. A reader that does not read costs this node that part.

How the stream ends is passed on as well, but not what the other node says of itself: that a reader
should go elsewhere is not true of this one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.errors import PenstockError, Unavailable, WrongEpoch
from penstock.model.columns import Buffer
from penstock.model.delivery import most_urgent
from penstock.node.route.ports import PeerPort
from penstock.replication.credit import Credit
from penstock.wire.frame import FrameFlag, FrameType, flags_of_class
from penstock.wire.messages import (
    Changes,
    Grant,
    LogSlice,
    OpenLog,
    OpenSubscription,
    pack,
    unpack,
)


class LogRelay:
    """Invariant: what was granted again is no more than has arrived, and than the reader has given
    back beside what is not lent. By the second no more than the reader's window is ever under way
    to it, by the first no more than `bytes_lent` to this node."""

    def __init__(
        self,
        peer: PeerPort,
        control: OpenLog | OpenSubscription,
        *,
        number: int,
        bytes_lent: int,
        send: Callable[..., None],
        end: Callable[[PenstockError | None], None],
    ) -> None:
        self._peer, self._send, self._end = peer, send, end
        self._reader = number  # of the stream on which the reader has it
        self.opened = False  # the request is answered
        self._changes = isinstance(control, OpenSubscription)
        self.bytes_lent = min(bytes_lent, control.credit_bytes)
        self._credit = Credit(entries=control.credit_entries, bytes=control.credit_bytes)
        self._entries_granted = self._bytes_granted = 0  # to the other node, since the beginning
        # A batch that exceeds what is lent comes when nothing else is out; a delta does anyway.
        self._bytes_least = self.bytes_lent // 4 if self._changes else 0
        self.blocked = False  # the reader's connection takes no more for now
        self.open = True
        control = msgspec.structs.replace(control, credit_bytes=self.bytes_lent)
        self._number = peer.open(control, self)

    def grant(self, grant: Grant) -> None:
        self._credit.give_back(grant.entries, grant.bytes)
        if grant.position:  # a cursor moves, however full the connection is
            self._peer.send(FrameType.ACK, self._number, pack(Grant(0, 0, grant.position)))
        self.grant_due()

    def close(self) -> None:
        if self.open:
            self.open = False
            self._peer.close_stream(self._number)

    def grant_due(self) -> None:
        if self.blocked or not self.open:
            return
        credit = self._credit
        kept = credit.bytes_window - self.bytes_lent
        entries = credit.entries_received - self._entries_granted
        bytes_ = min(credit.bytes_sent, credit.bytes_received + kept) - self._bytes_granted
        if entries or bytes_ > self._bytes_least:
            self._entries_granted += entries
            self._bytes_granted += bytes_
            self._peer.send(FrameType.ACK, self._number, pack(Grant(entries, bytes_)))

    # --- what the other node says ---

    def on_answer(self, payload: Buffer) -> None:
        if self.open:
            self.opened = True
            self._send(FrameType.ACK, self._reader, payload)

    def on_batch(self, payload: memoryview) -> None:
        if not self.open:
            return
        flags = int(FrameFlag.BATCHED)
        if self._changes:
            changes, body = unpack(payload, Changes)
            flags |= flags_of_class(most_urgent(body, changes.count))
            entries = changes.count
        else:
            piece, body = unpack(payload, LogSlice)
            entries = piece.last - piece.first + 1
        self._credit.use(entries, len(body))
        self._send(FrameType.BATCH, self._reader, payload, flags=flags)
        self.grant_due()

    def on_end(self, error: PenstockError | None) -> None:
        if self.open:
            self.open = False
            if error is not None and (
                isinstance(error, WrongEpoch) or error.details.get("elsewhere")
            ):
                error = Unavailable(error.message)  # the rest is true of the other node alone
            self._end(error)
