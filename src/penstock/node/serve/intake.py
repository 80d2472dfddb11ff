"""From an Enqueue frame to the parts that wait in partitions."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from penstock.errors import Corruption, InvalidArgument, PenstockError
from penstock.model.batch import Codec, decompress
from penstock.model.columns import Buffer, Columns, Value
from penstock.model.entries import BATCH_ENTRIES_MAX, ENQ, PRODUCER_NUMBER_MAX
from penstock.model.topic import TopicKind
from penstock.node.route.ports import PartitionPort
from penstock.node.route.router import forwarded
from penstock.node.serve.topic import Topic, check_id
from penstock.node.write.bodies import (
    check_body,
    check_partition,
    homes_of_deltas,
    homes_of_entries,
    subset,
)
from penstock.node.write.requests import EnqueuePart, EnqueueRequest, Reply
from penstock.wire.messages import Enqueue, Enqueued, Part, PutDelta

PARTS_MIN: Final = 64  # that an enqueue may have, however few partitions its topic has
Checked = tuple[Columns, Buffer, int]  # columns, the body as received, its first entry's place


def enqueue(
    topic: Topic, control: Enqueue, data: memoryview, reply: Reply, *, raw_bytes_max: int
) -> None:
    """Check everything, then hand the parts to their partitions. Raises before any change.

    `raw_bytes_max`: what compressed bodies may have together when they are decompressed."""
    if control.topic_id != topic.config.id:
        check_id(topic, control.topic_id)
    bodies = _bodies(topic, control, data, raw_bytes_max)
    if control.forwarded:
        _enqueue_forwarded(topic, control, bodies, reply)
        return
    request = EnqueueRequest(topic.config.id, _timed(topic, control, reply))
    parts = _parts(topic, control, bodies, request)
    if len(parts) > 1:
        if control.expected_sequence is not None:
            raise InvalidArgument(
                "expected_sequence needs entries of one partition", field="expected_sequence"
            )
        if control.atomic and topic.config.kind is TopicKind.DELTA:
            raise InvalidArgument(
                "an atomic batch of deltas must have vectors of one partition", field="atomic"
            )
        if control.atomic:
            topic.atomic.enqueue(parts)
            return
    if topic.ingest is not None:
        topic.ingest.enqueue(parts)
    else:
        for partition, part in parts:
            partition.enqueue(part)


def enqueue_of_delta(control: PutDelta, delta: memoryview) -> tuple[Enqueue, bytes]:
    """The enqueue that a delta by itself stands for."""
    values: dict[str, Value] = {"payload": [delta]}
    if control.headers:
        values["headers"] = [control.headers]
    for field, number in (("epoch", control.epoch), ("sequence", control.sequence)):
        if not 0 <= number < PRODUCER_NUMBER_MAX:
            raise InvalidArgument(
                f"{field} must be from 0 to {PRODUCER_NUMBER_MAX - 1}", field=field
            )
    if control.producer:
        values |= {
            "run_count": [1],
            "run_epoch": [control.epoch],
            "run_sequence": [control.sequence],
            "run_producer": [control.producer.encode()],
        }
    body = ENQ.encode(1, values, runs=1 if control.producer else 0)
    part = Part(0, 1, len(body))
    return Enqueue(control.topic, [part], partitioned=False), body


def _enqueue_forwarded(topic: Topic, control: Enqueue, bodies: list[Checked], reply: Reply) -> None:
    """Parts that another node has sent on: each is one request, with an outcome of its own."""
    if control.transaction:
        topic.partition(control.home)  # which there must be
    outcomes = forwarded(len(bodies), reply)
    for i, (part, (columns, body, _)) in enumerate(zip(control.parts, bodies, strict=True)):
        if topic.config.kind is TopicKind.DELTA:
            homes = homes_of_deltas(columns, topic.config, now_ms=topic.clock.now_ms())
            check_partition(homes, part.partition, len(topic.partitions))
        partition = topic.served(topic.partition(part.partition).index)
        if partition is None:
            outcomes.part(i)(topic.not_here(part.partition))
            continue
        request = EnqueueRequest(topic.config.id, outcomes.part(i))
        share = _whole(request, control, (columns, body, 0))
        if control.transaction:
            topic.atomic.prepare(
                partition, share, transaction=control.transaction, home=control.home
            )
        elif topic.ingest is not None:
            topic.ingest.enqueue([(partition, share)])
        else:
            partition.enqueue(share)


def _bodies(topic: Topic, control: Enqueue, data: memoryview, raw_bytes_max: int) -> list[Checked]:
    """Each part's checked columns, its body as received, and its first entry's place."""
    if not control.parts:
        raise InvalidArgument("an enqueue has no parts", field="parts")
    parts_max = max(PARTS_MIN, len(topic.partitions))
    if len(control.parts) > parts_max and not control.forwarded:
        raise InvalidArgument(
            f"an enqueue has over {parts_max} parts: one for each partition is enough",
            field="parts",
            limit=parts_max,
        )
    if sum(p.length for p in control.parts) != len(data):
        raise InvalidArgument("parts do not add up to the frame", field="parts")
    if sum(p.count for p in control.parts) > BATCH_ENTRIES_MAX:
        raise InvalidArgument(
            f"an enqueue has more than {BATCH_ENTRIES_MAX} entries",
            field="entries",
            limit=BATCH_ENTRIES_MAX,
        )
    if control.codec:
        _check_raw_lengths(control, raw_bytes_max)
    found: list[Checked] = []
    at = index = 0
    for i, part in enumerate(control.parts):
        if part.length < 0:
            raise InvalidArgument("a part's length is negative", field="parts")
        body = bytes(data[at : at + part.length])
        raw = body if not control.codec else _decompressed(control, i, body)
        found.append((check_body(raw, part.count, topic.config), body, index))
        at += part.length
        index += part.count
    return found


def _check_raw_lengths(control: Enqueue, limit: int) -> None:
    """Of all parts together, and before any is decompressed: small frames may claim a lot."""
    if control.codec not in (Codec.ZSTD, Codec.LZ4):
        raise InvalidArgument(f"codec {control.codec} is unknown", field="codec")
    lengths = control.raw_lengths or []
    if (
        len(lengths) != len(control.parts)
        or any(length < 1 for length in lengths)
        or sum(lengths) > limit
    ):
        raise InvalidArgument(
            f"raw_lengths must give each part's length, together at most {limit}",
            field="raw_lengths",
            limit=limit,
        )


def _decompressed(control: Enqueue, index: int, body: bytes) -> bytes:
    assert control.raw_lengths is not None, "checked with all of them"
    length = control.raw_lengths[index]
    try:
        raw = decompress(Codec(control.codec), body, length + 1)
    except Corruption as error:
        raise InvalidArgument(error.message, field="body") from error
    if len(raw) != length:
        raise InvalidArgument("a body is not of its stated length", field="raw_lengths")
    return raw


def _parts(
    topic: Topic, control: Enqueue, bodies: list[Checked], request: EnqueueRequest
) -> list[tuple[PartitionPort, EnqueuePart]]:
    """Which partition gets which part. Deltas are checked here: they go only where their vectors
    belong."""
    placed: list[tuple[PartitionPort, EnqueuePart]] = []
    ports = topic.partitions
    for part, checked in zip(control.parts, bodies, strict=True):
        columns, _, index = checked
        homes = None
        if topic.config.kind is TopicKind.DELTA:
            homes = homes_of_deltas(columns, topic.config, now_ms=topic.clock.now_ms())
        if control.partitioned:
            target = topic.partition(part.partition)
            if homes is not None:
                check_partition(homes, target.index, len(ports))
            placed.append((target, _whole(request, control, checked)))
            continue
        if homes is None:
            topic.rotation = (topic.rotation + 1) % len(ports)
            homes = homes_of_entries(columns, len(ports), fallback=topic.rotation)
        found: list[int] = np.unique(homes).tolist()
        if len(found) == 1:
            placed.append((ports[found[0]], _whole(request, control, checked)))
            continue
        for partition in found:
            chosen = np.flatnonzero(homes == partition)
            body = subset(columns, chosen)
            share = ENQ.decode(body, len(chosen))
            own = EnqueuePart(request, share, indices=chosen + index, body=body)
            placed.append((ports[partition], own))
    return placed


def _whole(request: EnqueueRequest, control: Enqueue, checked: Checked) -> EnqueuePart:
    columns, body, index = checked
    return EnqueuePart(
        request,
        columns,
        indices=range(index, index + columns.count),
        body=body,
        codec=control.codec,
        expected_sequence=control.expected_sequence,
    )


def _timed(topic: Topic, control: Enqueue, reply: Reply) -> Reply:
    started = time.perf_counter()
    count = sum([part.count for part in control.parts])

    def answer(result: object) -> None:
        if isinstance(result, Enqueued):
            seconds = time.perf_counter() - started
            topic.metrics.enqueue_seconds.observe((topic.config.name,), seconds, count)
            if result.duplicates:
                topic.metrics.duplicates.add((topic.config.name,), len(result.duplicates))
        elif isinstance(result, PenstockError) and result.status == "RESOURCE_EXHAUSTED":
            topic.metrics.backpressure.add((result.code,))
        reply(result)

    return answer
