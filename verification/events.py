"""The events of a history, and those that a committed batch stands for.

Clients tell what they tried (`Enqueuing`), what they were told (`Enqueued`, `Settled`) and what
they held (`Delivered`, `Released`). Replicas tell who entered an epoch (`Entered`), how far they
have committed (`Committed`) and what they hold at the end (`AtRest`). The rest is read off the log.

As JSON an event is an object whose field `event` is its name in small letters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from penstock.model.batch import Batch, Kind
from penstock.model.columns import Columns


def digest_of(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


class Event(msgspec.Struct, tag_field="event", tag=str.lower, gc=False):
    """Times are microseconds of one clock that all clients share."""


# --- what clients know ---


class Enqueuing(Event):
    """A client is about to send these entries. Once per key; retries are not new."""

    at_us: int
    producer: str
    epoch: int
    sequence: int  # the producer's, of the first entry
    count: int
    partition: int
    digests: list[int]  # of the payload of each entry


class Enqueued(Event):
    """It was told that they are in, as the messages from `first` on."""

    at_us: int
    producer: str
    epoch: int
    sequence: int
    count: int
    partition: int
    first: int


class Refused(Event):
    """It was told that they are not in, and never will be: there was no attempt in doubt."""

    producer: str
    epoch: int
    sequence: int


class Atomic(Event):
    """These entries go in together or not at all: (producer, epoch, sequence, count, partition)."""

    parts: list[tuple[str, int, int, int, int]]


class Delivered(Event):
    """A consumer holds a message from now on, to its own knowledge until `until_us` at most:
    counted from when it asked, not from when it was answered."""

    at_us: int
    consumer: str
    partition: int
    message: int
    token: int  # sequence of the lease
    until_us: int
    digest: int | None  # of the payload that came with it; None: it came without


class Extended(Event):
    """It was told that the lease runs longer."""

    partition: int
    token: int
    until_us: int  # counted from when it asked


class Released(Event):
    """It has stopped working on the message: it acknowledges, returns or forgets it."""

    at_us: int
    partition: int
    token: int


class Settled(Event):
    """It was told that its acknowledgement took effect."""

    at_us: int
    partition: int
    token: int


# --- what replicas know ---


class Entered(Event):
    """A node appended the barrier of an epoch."""

    partition: int
    epoch: int
    node: str


class Committed(Event):
    """A replica knows that everything up to `sequence` is committed; `chain` is its log's there.
    `life` tells one run of the process from the next."""

    partition: int
    node: str
    life: int
    sequence: int
    chain: int


class AtRest(Event):
    """A replica when all is quiet: the end of its log and a digest of its heap."""

    partition: int
    node: str
    sequence: int
    chain: int
    digest: int


class Stuck(Event):
    """Something did not come to an end although nothing was wrong any more."""

    what: str


# --- what the log says ---


class Range(Event):
    partition: int
    first: int
    last: int
    epoch: int
    epoch_previous: int
    chain: int


class Message(Event):
    partition: int
    sequence: int
    producer: str
    epoch: int
    producer_sequence: int
    digest: int
    transaction: bytes = b""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.producer, self.epoch, self.producer_sequence


class Leased(Event):
    partition: int
    token: int
    message: int


class Ended(Event):
    """A lease ended (`token`), or a message was settled without one."""

    partition: int
    sequence: int
    how: str  # ack | nack | expire | dead
    token: int = 0
    message: int = 0


class Decided(Event):
    partition: int
    transaction: bytes
    commit: bool


AnyEvent = (
    Enqueuing | Enqueued | Refused | Atomic | Delivered | Extended | Released | Settled | Entered
    | Committed | AtRest | Stuck | Range | Message | Leased | Ended | Decided
)  # fmt: skip
_decoder: Final[msgspec.json.Decoder[AnyEvent]] = msgspec.json.Decoder(AnyEvent)


def decode_event(line: bytes | str) -> AnyEvent:
    return _decoder.decode(line)


_HOW: Final = {
    Kind.ACK: "ack", Kind.NACK: "nack", Kind.EXPIRE: "expire", Kind.DEAD: "dead",
}  # fmt: skip


def log_events(batch: Batch, columns: Columns | None = None) -> Iterator[AnyEvent]:
    """What one committed batch says; `columns` if it is decoded already."""
    partition = batch.partition
    yield Range(
        partition, batch.first, batch.last, batch.epoch, batch.epoch_previous, batch.chain
    )  # fmt: skip
    if columns is None:
        columns = batch.columns()
    if batch.kind in (Kind.ENQ, Kind.PREPARE):
        yield from _messages(batch, columns)
    elif batch.kind is Kind.LEASE:
        for i, message in enumerate(columns.fixed("message").tolist()):
            yield Leased(partition, batch.first + i, message)
    elif batch.kind in _HOW:
        how, count = _HOW[batch.kind], columns.count
        tokens = columns.fixed("token").tolist() if "token" in columns.views else [0] * count
        named = columns.fixed("message").tolist() if "message" in columns.views else [0] * count
        for i in range(count):
            yield Ended(partition, batch.first + i, how, tokens[i], named[i])
    elif batch.kind is Kind.DECIDE:
        names = columns.binary("transaction")
        for name, commit in zip(names or (), columns.fixed("commit").tolist(), strict=True):
            yield Decided(partition, name, bool(commit))


def _messages(batch: Batch, columns: Columns) -> Iterator[Message]:
    names = columns.binary("run_producer")
    named = columns.binary("transaction") if batch.kind is Kind.PREPARE else None
    transaction = b"" if named is None else named[0]
    counts = columns.fixed("run_count").tolist() or [batch.count]
    payloads = columns.binary("payload") or [b""] * batch.count
    digests = [digest_of(payload) for payload in payloads]
    at = 0
    for run, count in enumerate(counts):
        producer = names[run].decode() if names is not None else ""
        epoch = int(columns.fixed("run_epoch")[run]) if columns.runs else 0
        first = int(columns.fixed("run_sequence")[run]) if columns.runs else 0
        for i in range(count):
            yield Message(
                batch.partition, batch.first + at, producer, epoch, first + i, digests[at],
                transaction,
            )  # fmt: skip
            at += 1
