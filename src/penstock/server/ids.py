"""Message ids of whole batches.

A message id is a ULID whose low 48 bits are the sequence (`penstock.model.ids`). The last nine of
its 26 characters hold 45 of them, so the ids of a run differ only there and come out of a table
of three characters each; one at a time they would cost more than the rest of a batch's answer.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from penstock.model.ids import MessageId
from penstock.wire.messages import Enqueued

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_HEAD: Final = 17  # characters that a run shares
_TAIL_BITS: Final = 45


class Written(NamedTuple):
    """Where one entry of a request went."""

    message_id: str
    duplicate: bool


@cache
def _triples() -> list[str]:
    return [a + b + c for a in _ALPHABET for b in _ALPHABET for c in _ALPHABET]


def message_ids(topic: int, *, partition: int, sequences: range, time_ms: int) -> list[str]:
    """The ids of the messages of one partition that were enqueued at `time_ms`."""
    if not sequences:
        return []
    first, last = sequences[0], sequences[-1]
    if first >> _TAIL_BITS != last >> _TAIL_BITS:
        return [str(MessageId(time_ms, topic, partition, s)) for s in sequences]
    head = str(MessageId(time_ms, topic, partition, first))[:_HEAD]
    table = _triples()
    return [
        f"{head}{table[s >> 30 & 0x7FFF]}{table[s >> 15 & 0x7FFF]}{table[s & 0x7FFF]}"
        for s in sequences
    ]


def written_ids(enqueued: Enqueued, count: int) -> tuple[list[str], list[int]]:
    """The id of every entry of a request, and the positions of duplicates."""
    topic = enqueued.topic
    ids = [""] * count
    for run in enqueued.placed:
        sequences = range(run.sequence, run.sequence + run.count)
        ids[run.index : run.index + run.count] = message_ids(
            topic, partition=run.partition, sequences=sequences, time_ms=run.time_ms
        )
    duplicates = []
    for known in enqueued.duplicates:
        ids[known.index] = str(MessageId(known.time_ms, topic, known.partition, known.sequence))
        duplicates.append(known.index)
    return ids, duplicates
