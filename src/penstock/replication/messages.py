"""What replicas of one partition say to each other. Fields are only ever appended.

Numbers have bounds: a promise or an epoch beyond them could never be written to a log, and whoever
took it for true would be stuck with it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from penstock.replication.rules import End

EPOCH_MAX: Final = (1 << 31) - 1  # half of what a log has room for
Epoch = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
CreditWindow = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class PeerMessage(msgspec.Struct, frozen=True, array_like=True):
    """`node` is always the sender."""

    node: str


class Fence(PeerMessage, frozen=True):
    """Promise to listen to no epoch below this one, and tell where your log ends."""

    epoch: Epoch


class Fenced(PeerMessage, frozen=True):
    """The answer: promised (`promised` is the fence's epoch), or refused for a greater promise.
    `time_ms` is what the sender's clock showed when it was sent; 0: it does not say."""

    uuid: str
    promised: Epoch
    end_epoch: Epoch
    end_sequence: Count
    committed: Count
    time_ms: Count = 0

    @property
    def end(self) -> End:
        return End(self.end_epoch, self.end_sequence)


class Probe(PeerMessage, frozen=True):
    """Has the coordinator of this epoch gone silent for you too?"""

    epoch: Epoch


class Probed(PeerMessage, frozen=True):
    epoch: Epoch
    silent: bool


class Follow(PeerMessage, frozen=True):
    """Stream your log to me from where ours part. `tail` are my runs of (epoch, last sequence)
    from my commit on; `entries` and `bytes` are my credit. `stream` tells one opening from the
    next. `adopt`: I hold `epoch` and copy your log before I enter it."""

    uuid: str
    epoch: Epoch
    stream: Count
    committed: Count
    tail: list[tuple[Epoch, Count]]
    entries: CreditWindow
    bytes: CreditWindow
    adopt: bool = False


class Followed(PeerMessage, frozen=True):
    """The answer: forget what you have after `matched`, the rest follows. `reseed`: what you lack
    is no longer here as it was written, start over from a snapshot. `epoch` above yours: you
    follow somebody who is not the coordinator (`refused`), or not yet (`waiting`: it is alive and
    about to enter the epoch, ask again)."""

    epoch: Epoch
    stream: Count
    matched: Count
    committed: Count
    reseed: bool = False
    refused: bool = False
    waiting: bool = False


class Append(PeerMessage, frozen=True):
    """A slice of the log; without batches a sign of life that carries the watermark. `resigned`:
    the last one, I give up the epoch. `sent`: the last sequence that went over this stream before;
    who does not have it at a sign of life has lost a slice."""

    epoch: Epoch
    stream: Count
    committed: Count
    resigned: bool = False
    sent: Count = 0


class Ack(PeerMessage, frozen=True):
    """*Received* gives credit back, *durable* counts for the quorum. Both are totals."""

    uuid: str
    epoch: Epoch
    stream: Count
    entries: Count
    bytes: Count
    durable: Count
    promised: Epoch


Letter = Ack | Fence | Fenced | Followed | Probe | Probed  # goes by itself, not within a stream
