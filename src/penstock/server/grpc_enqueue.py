"""The enqueues over gRPC, where the time goes: columns straight out of the repeated messages."""

from __future__ import annotations

from penstock.errors import InvalidArgument
from penstock.model.topic import NAME
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.coalesce import Entry
from penstock.server.entries import Entries, packed_headers, producer_run
from penstock.server.pool import Link
from penstock.server.puts import put, put_batch


async def enqueue(link: Link, request: pb.EnqueueRequest) -> pb.EnqueueResponse:
    run = producer_run(
        request.producer_id,
        epoch=request.epoch,
        seq=request.seq if request.HasField("seq") else None,
        count=1,
    )
    entry = Entry(
        request.payload,
        request.priority,
        request.key,
        packed_headers(request.headers),
        request.delay_ms,
        request.max_retries if request.HasField("max_retries") else -1,
        run,
    )
    written = await put(link, topic_of(request.topic), entry)
    return pb.EnqueueResponse(message_id=written.message_id, duplicate=written.duplicate)


async def enqueue_batch(link: Link, request: pb.EnqueueBatchRequest) -> pb.EnqueueBatchResponse:
    topic = topic_of(request.topic)
    written = await put_batch(
        link,
        topic,
        entries_of(request),
        atomic=request.atomic if request.HasField("atomic") else True,
        expected_sequence=expected_of(request),
    )
    return pb.EnqueueBatchResponse(**written._asdict())


def entries_of(request: pb.EnqueueBatchRequest) -> Entries:
    messages = list(request.messages)  # holds the wrappers, which each pass would make again
    if not messages:
        raise InvalidArgument("a batch needs a message", field="messages")
    run = producer_run(
        request.producer_id,
        epoch=request.epoch,
        seq=request.seq if request.HasField("seq") else None,
        count=len(messages),
    )
    keys = [m.key for m in messages]
    headers = [m.headers for m in messages]
    delays_ms = [m.delay_ms for m in messages]
    max_retries = [m.max_retries if m.HasField("max_retries") else -1 for m in messages]
    return Entries(
        [m.payload for m in messages],
        [m.priority for m in messages],
        keys if any(keys) else None,
        [packed_headers(h) for h in headers] if any(headers) else None,
        delays_ms if any(delays_ms) else None,
        max_retries if max(max_retries) >= 0 else None,
        () if run is None else (run,),
    )


def expected_of(request: pb.EnqueueBatchRequest) -> int | None:
    if not request.HasField("expected_sequence"):
        return None
    expected: int = request.expected_sequence
    if expected >> 63:
        raise InvalidArgument("expected_sequence is too large", field="expected_sequence")
    return expected


def topic_of(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InvalidArgument(f"topic must match {NAME.pattern}", field="topic", limit=NAME.pattern)
    return name
