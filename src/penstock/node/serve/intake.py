"""From an Enqueue frame to the parts that wait in partitions.

Bodies are checked as they came. Those of a delta topic hold valid deltas, each in the partition of
its vector.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, InvalidArgument, PenstockError
from penstock.model.batch import Codec, decompress
from penstock.model.columns import Binary, Buffer, Columns, Value
from penstock.model.delta_batch import DeltaBatch, explain
from penstock.model.delta_checks import validate
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    ENQ,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    PRODUCER_NUMBER_MAX,
    RETRIES_MAX,
)
from penstock.model.partitioning import partitions_of, partitions_of_deltas, partitions_of_digests
from penstock.model.plain import fault_in
from penstock.model.topic import TopicConfig, TopicKind
from penstock.node.route.ports import PartitionPort
from penstock.node.route.router import forwarded
from penstock.node.serve.topic import ServedTopic, check_id
from penstock.node.write.enqueuer import EnqueuePart, EnqueueRequest, producer_entries, subset
from penstock.node.write.journal import Reply
from penstock.wire.messages import Enqueue, Enqueued, Part, PutDelta

_BYTES_MAX: Final = (
    ("key", KEY_BYTES_MAX),
    ("headers", HEADERS_BYTES_MAX),
    ("run_producer", PRODUCER_ID_BYTES_MAX),
)
_RANGES: Final = (("delay_ms", 0, DELAY_MS_MAX), ("max_retries", -1, RETRIES_MAX))
FEW: Final = 20  # deltas that are looked at one by one
_MEANINGLESS: Final = ("delay_ms", "max_retries")  # where nothing is ever leased
PARTS_MIN: Final = 64  # that an enqueue may have, however few partitions its topic has
Checked = tuple[Columns, Buffer, int]  # columns, the body as received, its first entry's place


def enqueue(
    topic: ServedTopic, control: Enqueue, data: memoryview, reply: Reply, *, raw_bytes_max: int
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
    request.started = time.perf_counter()  # The live path counts from where all is checked.
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


def _enqueue_forwarded(
    topic: ServedTopic, control: Enqueue, bodies: list[Checked], reply: Reply
) -> None:
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


def _bodies(
    topic: ServedTopic, control: Enqueue, data: memoryview, raw_bytes_max: int
) -> list[Checked]:
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
    topic: ServedTopic, control: Enqueue, bodies: list[Checked], request: EnqueueRequest
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


def _timed(topic: ServedTopic, control: Enqueue, reply: Reply) -> Reply:
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


# --- bodies ---


def check_body(body: Buffer, count: int, config: TopicConfig) -> Columns:
    """Decode an untrusted ENQ body and hold it against the topic's limits."""
    if not 1 <= count <= BATCH_ENTRIES_MAX:
        raise InvalidArgument(
            f"a batch has {count} entries, must be from 1 to {BATCH_ENTRIES_MAX}",
            field="entries",
            limit=BATCH_ENTRIES_MAX,
        )
    try:
        columns = ENQ.decode(body, count)
        columns.validate()
    except Corruption as error:
        raise InvalidArgument(f"malformed batch: {error.message}", field="body") from error
    if "sequence" in columns.views:
        raise InvalidArgument("a batch must not name its sequences", field="sequence")
    for name, limit in (("payload", config.payload_bytes_max), *_BYTES_MAX):
        if len(body) > limit:  # else none of its values can be
            _check_sizes(columns, name, limit)
    if "headers" in columns.views:
        _check_headers(columns)
    for name, low, high in _RANGES:
        if name in columns.views:
            _check_range(columns, name, low, high)
    if columns.runs:
        _check_runs(columns)
    return columns


def _check_runs(columns: Columns) -> None:
    counts = columns.views.get("run_count")
    if counts is None or sum(counts) != columns.count:
        raise InvalidArgument("producer runs do not cover the batch", field="run_count")
    if "run_producer" not in columns.views:
        raise InvalidArgument("producer runs name no producer", field="run_producer")
    epochs, firsts = columns.views.get("run_epoch"), columns.views.get("run_sequence")
    if epochs is not None and max(epochs) > PRODUCER_NUMBER_MAX:
        raise _too_large("run_epoch")
    if firsts is not None and any(
        first + count > PRODUCER_NUMBER_MAX for first, count in zip(firsts, counts, strict=True)
    ):
        raise _too_large("run_sequence")


def _too_large(field: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is over {PRODUCER_NUMBER_MAX}", field=field, limit=PRODUCER_NUMBER_MAX
    )


def _check_sizes(columns: Columns, name: str, limit: int) -> None:
    if name not in columns.blobs or len(columns.blobs[name]) <= limit:
        return
    ends = np.asarray(columns.views[name])
    sizes = np.diff(ends)
    if int(sizes.max()) > limit:
        index = int(sizes.argmax())
        raise InvalidArgument(
            f"{name} of entry {index} has {int(sizes[index])} bytes, at most {limit}",
            field=name,
            limit=limit,
            index=index,
        )


def _check_headers(columns: Columns) -> None:
    """Refuse headers that somebody who gets the message could not read."""
    column = columns.binary("headers")
    assert column is not None
    found = fault_in(column)
    if found is not None:
        index, fault = found
        raise InvalidArgument(
            f"headers of entry {index} are not a msgpack map of plain values: {fault.text}",
            field="headers",
            limit=fault.limit,
            index=index,
        )


def _check_range(columns: Columns, name: str, low: int, high: int) -> None:
    values = columns.fixed(name)
    if int(values.min()) < low or int(values.max()) > high:
        raise InvalidArgument(f"{name} must be from {low} to {high}", field=name, limit=high)


def homes_of_entries(columns: Columns, partitions: int, *, fallback: int) -> NDArray[np.int64]:
    """Where each entry goes: by key, else by producer sequence, else to `fallback`."""
    if partitions == 1:
        return np.zeros(columns.count, np.int64)
    keys = columns.binary("key")
    names = [b""] * columns.count if keys is None else list(keys)
    keyless = [i for i, key in enumerate(names) if not key]
    if keyless and columns.runs:
        producer, sequence, run = producer_entries(columns)
        for i in keyless:
            if producer[run[i]]:
                names[i] = b"%s:%d" % (producer[run[i]], sequence[i])
    where = partitions_of(names, partitions)
    where[[i for i in keyless if not names[i]]] = fallback
    return where


def homes_of_deltas(columns: Columns, config: TopicConfig, *, now_ms: int) -> NDArray[np.int64]:
    """Where each delta of a checked ENQ body belongs: all deltas of a vector lie in one log.

    Raises `InvalidArgument` for the first entry that is no valid delta.
    """
    payloads = columns.binary("payload")
    if payloads is None:
        raise InvalidArgument("a delta has no payload", field="payload")
    for name in _MEANINGLESS:
        if name in columns.views and (columns.fixed(name) > 0).any():
            raise InvalidArgument(f"{name} has no meaning in a delta topic", field=name, limit=0)
    if len(payloads) <= FEW:
        return _homes_of_few(payloads, config, now_ms)
    deltas = DeltaBatch.of(payloads)
    validate(deltas, dimensions=config.dimensions, now_ms=now_ms)
    return partitions_of_digests(np.ascontiguousarray(deltas.vector[:, 0]), config.partitions)


def _homes_of_few(payloads: Binary, config: TopicConfig, now_ms: int) -> NDArray[np.int64]:
    """The same without columns, which take longer to set up than a few deltas to check."""
    rows = payloads.tolist()
    for row, payload in enumerate(rows):
        explain(payload, row, dimensions=config.dimensions, now_ms=now_ms)
    if config.partitions == 1:
        return np.zeros(len(rows), np.int64)
    return partitions_of_deltas(rows, config.partitions)


def check_partition(homes: NDArray[np.int64], partition: int, partitions: int) -> None:
    """Refuse a part whose producer has another idea of where its vectors belong."""
    if partitions == 1:
        return
    wrong = homes != partition
    if wrong.any():
        raise InvalidArgument(
            f"delta {int(np.argmax(wrong))}: its vector does not belong in partition {partition}",
            field="partition",
            limit=partitions - 1,
        )
