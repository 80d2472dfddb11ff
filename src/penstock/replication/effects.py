"""What a replica asks its driver to do. Effects are performed in the order they are returned.

Three orders carry the safety: a `Persist` is on disk before anything after it is done, a `Truncate`
before any later `Write`, and nothing is acknowledged that `on_durable` did not report.
"""

from __future__ import annotations

import msgspec

from penstock.model.batch import Batch
from penstock.replication.assignment import PartitionRecord
from penstock.replication.messages import Append, Follow, Letter


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
