"""What a replica asks its driver to do. Effects are performed in the order they are returned.

Three orders carry the safety: a `Persist` is on disk before anything after it is done, a `Truncate`
before any later `Write`, and nothing is acknowledged that `on_durable` did not report.

Messages are what replicas of one partition say to each other. Their fields are only ever appended.
Numbers in them have bounds: a promise or an epoch beyond them could never be written to a log, and
whoever took it for true would be stuck with it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from penstock.model.batch import Batch
from penstock.replication.assignment import PartitionRecord
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


class Persist(msgspec.Struct, frozen=True):
    """Store the promise, synced, then tell `on_persisted`."""

    promised: int


class Send(msgspec.Struct, frozen=True):
    """Give `message` to node `to`. It may get lost: whoever needs an answer asks again."""

    to: str
    message: Append | Letter


class OpenStream(msgspec.Struct, frozen=True):
    """Have `to` stream its log to us; a stream that is open before is closed."""

    to: str
    follow: Follow


class CloseStream(msgspec.Struct, frozen=True):
    """Stop reading from the stream that is open."""


class Write(msgspec.Struct, frozen=True):
    """Stage these batches and sync them; `on_durable` reports how far."""

    batches: list[Batch]


class Truncate(msgspec.Struct, frozen=True):
    """Durably forget everything after `sequence`, then tell `on_truncated`."""

    sequence: int


class Reseed(msgspec.Struct, frozen=True):
    """Drop the log and start over from a snapshot of node `source`, then tell `on_seeded`."""

    source: str


class TakeEpoch(msgspec.Struct, frozen=True):
    """Try to take the next epoch in the metadata store; tell `on_epoch_taken` if that was won."""


class AppendBarrier(msgspec.Struct, frozen=True):
    """We hold `epoch` and the right log: append its first entry, as `on_staged` will hear."""

    epoch: int


class Commit(msgspec.Struct, frozen=True):
    """Everything up to `sequence` may be applied, answered and delivered."""

    sequence: int


class BeganServing(msgspec.Struct, frozen=True):
    """The barrier is committed: requests may be served."""

    epoch: int


class SteppedDown(msgspec.Struct, frozen=True):
    """We do not coordinate any more. What waits is answered *unknown*; state that was applied but
    is not committed must be rebuilt."""

    epoch: int


class AnswerUnknown(msgspec.Struct, frozen=True):
    """No quorum has been heard for long: whoever waits for a commit is told that the outcome is
    *unknown*. Nothing is given up by that: we keep the epoch, and the entries commit should a
    quorum come back. Said with every tick meanwhile, for those who began to wait since."""


class ChangeRecord(msgspec.Struct, frozen=True):
    """Swap the partition's record for this one, if it still has the revision that we know."""

    record: PartitionRecord
    revision: int


class Warn(msgspec.Struct, frozen=True):
    """For the log and the metrics: what became of the stream to a follower."""

    node: str
    what: str  # credit_low | credit_exhausted | lagging | resumed


class Retire(msgspec.Struct, frozen=True):
    """We hold this partition no longer: its folder may be removed. Said again with every record
    that comes meanwhile, and void once one of them names us."""


class Halt(msgspec.Struct, frozen=True):
    """A rule was broken that must never be: stop, keep the evidence, call an operator."""

    reason: str


Effect = (
    AnswerUnknown | AppendBarrier | BeganServing | ChangeRecord | CloseStream | Commit | Halt
    | OpenStream | Persist | Reseed | Retire | Send | SteppedDown | TakeEpoch | Truncate | Warn
    | Write
)  # fmt: skip
Effects = list[Effect]
