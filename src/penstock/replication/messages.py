"""What replicas of one partition say to each other. Fields are only ever appended."""

from __future__ import annotations

import msgspec

from penstock.replication.rules import End


class Message(msgspec.Struct, frozen=True, array_like=True):
    """`node` is always the sender."""

    node: str


class Fence(Message, frozen=True):
    """Promise to listen to no epoch below this one, and tell where your log ends."""

    epoch: int


class Fenced(Message, frozen=True):
    """The answer: promised (`promised` is the fence's epoch), or refused for a greater promise."""

    uuid: str
    promised: int
    end_epoch: int
    end_sequence: int
    committed: int

    @property
    def end(self) -> End:
        return End(self.end_epoch, self.end_sequence)


class Probe(Message, frozen=True):
    """Has the coordinator of this epoch gone silent for you too?"""

    epoch: int


class Probed(Message, frozen=True):
    epoch: int
    silent: bool


class Follow(Message, frozen=True):
    """Stream your log to me from where ours part. `tail` are my runs of (epoch, last sequence)
    from my commit on; `entries` and `bytes` are my credit. `stream` tells one opening from the
    next. `adopt`: I hold `epoch` and copy your log before I enter it."""

    uuid: str
    epoch: int
    stream: int
    committed: int
    tail: list[tuple[int, int]]
    entries: int
    bytes: int
    adopt: bool = False


class Followed(Message, frozen=True):
    """The answer: forget what you have after `matched`, the rest follows. `reseed`: what you lack
    is no longer here as it was written, start over from a snapshot. `epoch` above yours: you
    follow somebody who is not the coordinator (`refused`), or not yet (`waiting`: it is alive and
    about to enter the epoch, ask again)."""

    epoch: int
    stream: int
    matched: int
    committed: int
    reseed: bool = False
    refused: bool = False
    waiting: bool = False


class Append(Message, frozen=True):
    """A slice of the log; without batches a sign of life that carries the watermark. `resigned`:
    the last one, I give up the epoch. `sent`: the last sequence that went over this stream before;
    who does not have it at a sign of life has lost a slice."""

    epoch: int
    stream: int
    committed: int
    resigned: bool = False
    sent: int = 0


class Ack(Message, frozen=True):
    """*Received* gives credit back, *durable* counts for the quorum. Both are totals."""

    uuid: str
    epoch: int
    stream: int
    entries: int
    bytes: int
    durable: int
    promised: int
