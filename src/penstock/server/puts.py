"""The two enqueues, once for both listeners."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.errors import CallerError, InvalidArgument
from penstock.model.topic import TopicConfig
from penstock.server.coalesce import Entry
from penstock.server.entries import Entries
from penstock.server.ids import Written, written_ids
from penstock.server.pool import Link
from penstock.wire.messages import Enqueued


class BatchWritten(NamedTuple):
    """A batch's message ids in its order, and the positions of duplicates."""

    message_ids: list[str]
    duplicates: list[int]
    sequence_last: int | None


_DEFAULTS: Final = (b"", b"", 0, -1)  # key, headers, delay, retries: nothing to check


async def put(link: Link, topic: str, entry: Entry) -> Written:
    """Enqueue one message, together with what else is on its way to the topic."""
    config = await link.config(topic)
    _check(entry, config, link.body_bytes_max)
    try:
        return await link.desk.put(topic, entry)
    except CallerError:
        link.forget(topic)
        raise


async def put_batch(
    link: Link, topic: str, entries: Entries, *, atomic: bool, expected_sequence: int | None = None
) -> BatchWritten:
    """Enqueue a batch."""
    config = await link.config(topic)
    entries.check(config)
    if entries.size > link.body_bytes_max:
        raise InvalidArgument(
            f"the messages are over {link.body_bytes_max} bytes together",
            field="messages",
            limit=link.body_bytes_max,
        )
    count = len(entries.payloads)
    partition = 0 if expected_sequence is None else entries.partition(config)
    try:
        enqueued = await link.connection.enqueue(
            topic,
            [(partition, count, entries.body())],
            atomic=atomic,
            expected_sequence=expected_sequence,
            partitioned=expected_sequence is not None,
        )
    except CallerError:
        link.forget(topic)
        raise
    return BatchWritten(*written_ids(enqueued, count), _sequence_last(enqueued))


def _sequence_last(enqueued: Enqueued) -> int | None:
    """What the next call of a writer that is alone in its partition expects."""
    placed = enqueued.placed
    if len({run.partition for run in placed}) != 1:
        return None
    return max(run.sequence + run.count - 1 for run in placed)


def _check(entry: Entry, config: TopicConfig, body_bytes_max: int) -> None:
    payload_bytes_max = min(config.payload_bytes_max, body_bytes_max)
    if len(entry.payload) > payload_bytes_max:
        raise InvalidArgument(
            f"payload has {len(entry.payload)} bytes, at most {payload_bytes_max}",
            field="payload",
            limit=payload_bytes_max,
        )
    if entry[2:6] != _DEFAULTS:
        _columns(entry).check(config, names="{1}")


def _columns(entry: Entry) -> Entries:
    return Entries(
        (entry.payload,),
        (entry.priority,),
        (entry.key,),
        (entry.headers,),
        (entry.delay_ms,),
        (entry.max_retries,),
    )
