"""What a replica asks its driver to do. Effects are performed in the order they are returned.

Three orders carry the safety: a `Persist` is on disk before anything after it is done, a `Truncate`
before any later `Write`, and nothing is acknowledged that `on_durable` did not report.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.batch import Batch
from penstock.replication.assignment import PartitionRecord
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


@dataclass(frozen=True, slots=True)
class Persist:
    """Store the promise, synced, then tell `on_persisted`."""

    promised: int


@dataclass(frozen=True, slots=True)
class Send:
    """Give `message` to node `to`. It may get lost: whoever needs an answer asks again."""

    to: str
    message: Ack | Append | Fence | Fenced | Followed | Probe | Probed


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Have `to` stream its log to us; a stream that is open before is closed."""

    to: str
    follow: Follow


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Stop reading from the stream that is open."""


@dataclass(frozen=True, slots=True)
class Write:
    """Stage these batches and sync them; `on_durable` reports how far."""

    batches: list[Batch]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Durably forget everything after `sequence`, then tell `on_truncated`."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Reseed:
    """Drop the log and start over from a snapshot of node `source`, then tell `on_seeded`."""

    source: str


@dataclass(frozen=True, slots=True)
class TakeEpoch:
    """Try to take the next epoch in the metadata store; tell `on_epoch_taken` if that was won."""


@dataclass(frozen=True, slots=True)
class AppendBarrier:
    """We hold `epoch` and the right log: append its first entry, as `on_staged` will hear."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything up to `sequence` may be applied, answered and delivered."""

    sequence: int


@dataclass(frozen=True, slots=True)
class BeganServing:
    """The barrier is committed: requests may be served."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SteppedDown:
    """We do not coordinate any more. What waits is answered *unknown*; state that was applied but
    is not committed must be rebuilt."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """Swap the partition's record for this one, if it still has the revision that we know."""

    record: PartitionRecord
    revision: int


@dataclass(frozen=True, slots=True)
class Warn:
    """For the log and the metrics: what became of the stream to a follower."""

    node: str
    what: str  # credit_low | credit_exhausted | lagging | resumed


@dataclass(frozen=True, slots=True)
class Retire:
    """We hold this partition no longer: its folder may be removed."""


@dataclass(frozen=True, slots=True)
class Halt:
    """A rule was broken that must never be: stop, keep the evidence, call an operator."""

    reason: str


Effect = (
    AppendBarrier | BeganServing | ChangeRecord | CloseStream | Commit | Halt | OpenStream | Persist
    | Reseed | Retire | Send | SteppedDown | TakeEpoch | Truncate | Warn | Write
)  # fmt: skip
Effects = list[Effect]
