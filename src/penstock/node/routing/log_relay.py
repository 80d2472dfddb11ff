"""A log stream, or a subscription, of a partition that another node serves: passed on, frame by
frame.

The reader's credit is the credit of the stream at the other node, so no more is under way than the
reader has granted, and nothing is kept here. How the stream ends is passed on as well, but not what
the other node says of itself: that a reader should go elsewhere is not true of this one.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PenstockError, Unavailable, WrongEpoch
from penstock.model.columns import Buffer
from penstock.model.delivery import most_urgent
from penstock.node.routing.ports import PeerConnection
from penstock.wire.frame import FrameFlag, FrameType, flags_of_class
from penstock.wire.messages import Changes, Grant, OpenLog, OpenSubscription, pack, unpack


class LogRelay:
    def __init__(
        self,
        peer: PeerConnection,
        control: OpenLog | OpenSubscription,
        *,
        send: Callable[..., None],
        end: Callable[[PenstockError | None], None],
    ) -> None:
        self._peer, self._send, self._end = peer, send, end
        self.opened = False  # the request is answered
        self._changes = isinstance(control, OpenSubscription)
        self.open = True
        self._number = peer.open(control, self)

    def grant(self, grant: Grant) -> None:
        self._peer.send(FrameType.ACK, self._number, pack(grant))

    def close(self) -> None:
        if self.open:
            self.open = False
            self._peer.close_stream(self._number)

    # --- what the other node says ---

    def on_answer(self, payload: Buffer) -> None:
        if self.open:
            self.opened = True
            self._send(FrameType.ACK, payload)

    def on_batch(self, payload: memoryview) -> None:
        if self.open:
            flags = int(FrameFlag.BATCHED)
            if self._changes:
                changes, body = unpack(payload, Changes)
                flags |= flags_of_class(most_urgent(body, changes.count))
            self._send(FrameType.BATCH, payload, flags=flags)

    def on_end(self, error: PenstockError | None) -> None:
        if self.open:
            self.open = False
            self._end(None if error is None else _of_the_stream(error))


def _of_the_stream(error: PenstockError) -> PenstockError:
    """Without what is true of the other node alone."""
    theirs = isinstance(error, WrongEpoch) or error.details.get("elsewhere")
    return Unavailable(error.message) if theirs else error
