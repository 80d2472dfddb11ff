"""What an answer to an enqueue says about its entries."""

from __future__ import annotations

from penstock.model.ids import MessageId, message_ids
from penstock.wire.messages import Enqueued


def ids_of(answer: Enqueued, count: int) -> list[str]:
    """The message id of each of `count` entries; empty where the answer names none."""
    ids = [""] * count
    for run in answer.placed:
        sequences = range(run.sequence, run.sequence + run.count)
        ids[run.index : run.index + run.count] = message_ids(
            run.time_ms, answer.topic, run.partition, sequences
        )
    for known in answer.duplicates:
        place = MessageId(known.time_ms, answer.topic, known.partition, known.sequence)
        ids[known.index] = str(place)
    return ids
