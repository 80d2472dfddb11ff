"""From an Enqueue frame to the parts that wait in partitions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, InvalidArgument, PenstockError
from penstock.model.batch import Codec, decompress
from penstock.model.columns import Buffer, Columns, Value
from penstock.model.topic import BATCH_ENTRIES_MAX, TopicKind
from penstock.node.atomic import enqueue_atomically
from penstock.node.bodies import ENQ, check_body, spread, subset
from penstock.node.deltas import check_partition, homes_of_deltas, spread_deltas
from penstock.node.engine import Engine
from penstock.node.partition import Partition
from penstock.node.preparing import stage_here
from penstock.node.requests import EnqueuePart, EnqueueRequest, Reply
from penstock.node.routing.outcomes import Outcomes
from penstock.node.routing.ports import PartitionPort
from penstock.node.topic import Topic
from penstock.wire.messages import Enqueue, Enqueued, Part, PutDelta

_NUMBER_MAX: Final = (1 << 63) - 1
Checked = tuple[Columns, Buffer, int]  # columns, the body as received, its first entry's place


def enqueue(engine: Engine, control: Enqueue, data: memoryview, reply: Reply) -> None:
    """Check everything, then hand the parts to their partitions. Raises before any change."""
    topic = engine.topic(control.topic)
    bodies = _bodies(engine, topic, control, data)
    if control.forwarded:
        _enqueue_forwarded(engine, topic, control, bodies, reply)
        return
    if topic.config.kind is TopicKind.DELTA:
        placed = _place_deltas(engine, topic, control, bodies)
    else:
        placed = _place(topic, control, bodies)
    if control.expected_sequence is not None and len(placed) != 1:
        raise InvalidArgument(
            "expected_sequence needs entries of one partition", field="expected_sequence"
        )
    request = EnqueueRequest(
        topic.config.id, len(placed), _timed(topic, sum(c.count for c, _, _ in bodies), reply)
    )
    parts = [(partition, make(request)) for partition, make in placed]
    if control.atomic and len(parts) > 1:
        engine.spawn(enqueue_atomically(topic, parts), name="atomic-enqueue")
        return
    if topic.ingesting is not None:
        topic.ingesting.enqueue(parts)
        return
    for partition, part in parts:
        partition.enqueueing.enqueue(part)


def enqueue_of_delta(control: PutDelta, delta: memoryview) -> tuple[Enqueue, bytes]:
    """The enqueue that a delta by itself stands for."""
    values: dict[str, Value] = {"payload": [delta]}
    if control.headers:
        values["headers"] = [control.headers]
    for field, number in (("epoch", control.epoch), ("sequence", control.sequence)):
        if not 0 <= number <= _NUMBER_MAX:
            raise InvalidArgument(f"{field} must be from 0 to {_NUMBER_MAX}", field=field)
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


def _enqueue_forwarded(
    engine: Engine, topic: Topic, control: Enqueue, bodies: list[Checked], reply: Reply
) -> None:
    """Parts that another node has sent on: each is one request, with an outcome of its own."""
    if control.transaction:
        topic.partition(control.home)  # which there must be
    outcomes = Outcomes(len(bodies), reply)
    for i, (part, (columns, body, _)) in enumerate(zip(control.parts, bodies, strict=True)):
        if topic.config.kind is TopicKind.DELTA:
            homes = homes_of_deltas(columns, topic.config, now_ms=engine.clock.now_ms())
            check_partition(homes, part.partition, len(topic.partitions))
        partition = topic.partition(part.partition)
        if isinstance(partition, Partition):
            request = EnqueueRequest(topic.config.id, 1, outcomes.part(i))
            share = _maker(control, columns, body, range(columns.count))(request)
            if control.transaction:
                engine.spawn(_prepare(topic, partition, control, share), name="atomic-prepare")
            elif topic.ingesting is not None:
                topic.ingesting.enqueue([(partition, share)])
            else:
                partition.enqueueing.enqueue(share)
        else:
            outcomes.part(i)(topic.not_here(part.partition))


async def _prepare(topic: Topic, partition: Partition, control: Enqueue, part: EnqueuePart) -> None:
    """A part of an atomic batch that another node drives."""
    try:
        staged = await stage_here(
            topic, partition, part, transaction=control.transaction, home=control.home
        )
        topic.wake()
        done = await staged.prepared
    except PenstockError as error:
        part.request.part_failed(error)
    else:
        part.request.part_placed(done.placed, done.duplicates)


def _bodies(engine: Engine, topic: Topic, control: Enqueue, data: memoryview) -> list[Checked]:
    """Each part's checked columns, its body as received, and its first entry's place."""
    if not control.parts:
        raise InvalidArgument("an enqueue has no parts", field="parts")
    if sum(p.length for p in control.parts) != len(data):
        raise InvalidArgument("parts do not add up to the frame", field="parts")
    if sum(p.count for p in control.parts) > BATCH_ENTRIES_MAX:
        raise InvalidArgument(
            f"an enqueue has more than {BATCH_ENTRIES_MAX} entries",
            field="entries",
            limit=BATCH_ENTRIES_MAX,
        )
    if control.codec:
        _check_raw_lengths(control, engine.config.limits.raw_bytes_max)
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


Make = Callable[[EnqueueRequest], EnqueuePart]


def _place(
    topic: Topic, control: Enqueue, bodies: list[Checked]
) -> list[tuple[PartitionPort, Make]]:
    """Which partition gets which part."""
    placed: list[tuple[PartitionPort, Make]] = []
    for part, (columns, body, index) in zip(control.parts, bodies, strict=True):
        if control.partitioned:
            indices = range(index, index + part.count)
            placed.append(
                (topic.partition(part.partition), _maker(control, columns, body, indices))
            )
        else:
            topic.rotation = (topic.rotation + 1) % len(topic.partitions)
            shares = list(spread(columns, len(topic.partitions), fallback=topic.rotation))
            placed += _spread(topic, control, (columns, body, index), shares)
    return placed


def _place_deltas(
    engine: Engine, topic: Topic, control: Enqueue, bodies: list[Checked]
) -> list[tuple[PartitionPort, Make]]:
    """The same for deltas, which are checked here: only where their vectors belong."""
    placed: list[tuple[PartitionPort, Make]] = []
    partitions, now_ms = len(topic.partitions), engine.clock.now_ms()
    for part, (columns, body, index) in zip(control.parts, bodies, strict=True):
        homes = homes_of_deltas(columns, topic.config, now_ms=now_ms)
        if control.partitioned:
            target = topic.partition(part.partition)
            check_partition(homes, target.index, partitions)
            indices = range(index, index + part.count)
            placed.append((target, _maker(control, columns, body, indices)))
        else:
            shares = list(spread_deltas(homes))
            placed += _spread(topic, control, (columns, body, index), shares)
    if control.atomic and len(placed) > 1:
        raise InvalidArgument(
            "an atomic batch of deltas must have vectors of one partition", field="atomic"
        )
    return placed


def _spread(
    topic: Topic,
    control: Enqueue,
    whole: Checked,
    shares: list[tuple[int, NDArray[np.int64]]],
) -> list[tuple[PartitionPort, Make]]:
    columns, body, index = whole
    if len(shares) == 1:
        indices = range(index, index + columns.count)
        return [(topic.partitions[shares[0][0]], _maker(control, columns, body, indices))]
    placed: list[tuple[PartitionPort, Make]] = []
    for partition, chosen in shares:
        share = subset(columns, chosen)
        decoded = ENQ.decode(share, len(chosen))
        placed.append(
            (topic.partitions[partition], _maker(control, decoded, share, chosen + index, codec=0))
        )
    return placed


def _maker(
    control: Enqueue,
    columns: Columns,
    body: Buffer,
    indices: range | NDArray[np.int64],
    codec: int | None = None,
) -> Make:
    return lambda request: EnqueuePart(
        request,
        columns,
        indices=indices,
        body=body,
        codec=control.codec if codec is None else codec,
        expected_sequence=control.expected_sequence,
    )


def _timed(topic: Topic, count: int, reply: Reply) -> Reply:
    started = time.perf_counter()

    def answer(result: object) -> None:
        if isinstance(result, Enqueued):
            topic.metrics.enqueued(topic.config.name, count, time.perf_counter() - started)
            if result.duplicates:
                topic.metrics.duplicates(topic.config.name, len(result.duplicates))
        elif isinstance(result, PenstockError) and result.status == "RESOURCE_EXHAUSTED":
            topic.metrics.backpressure(result.code)
        reply(result)

    return answer
