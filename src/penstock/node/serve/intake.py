"""Requests on their way in: from an Enqueue frame, or lease tokens, to the parts that wait in
partitions, and one answer for all of them.

Bodies are checked as they came. Those of a delta topic hold valid deltas, each in the partition of
its vector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, InvalidArgument, PenstockError
from penstock.model.batch import Codec, decompress
from penstock.model.columns import Buffer, Columns, Value
from penstock.model.entries import BATCH_ENTRIES_MAX, ENQ, PRODUCER_NUMBER_MAX
from penstock.model.topic import TopicKind
from penstock.node.route import PartitionPort, forwarded
from penstock.node.serve.topic import ServedTopic, check_id, has_id
from penstock.node.write import (
    EnqueuePart,
    EnqueueRequest,
    Gathered,
    Reply,
    TokenRequest,
    as_one,
    check_body,
    check_partition,
    homes_of_deltas,
    homes_of_entries,
    subset,
)
from penstock.wire.messages import (
    Enqueue,
    Enqueued,
    Extend,
    Part,
    PutDelta,
    Return,
    Settle,
    Settled,
    TokenPart,
    bounded,
)

PARTS_MIN: Final = 64  # that an enqueue may have, however few partitions its topic has
Checked = tuple[Columns, Buffer, int]  # columns, the body as received, its first entry's place
TOKENS_MAX: Final = 100_000
# Makes one partition's request of its tokens, and of who is told which of them were lost.
Make = Callable[[NDArray[np.uint64], Reply], TokenRequest]


def enqueue(
    topic: ServedTopic, control: Enqueue, data: memoryview, reply: Reply, *, raw_bytes_max: int
) -> None:
    """Check all, then hand the parts over; raises before any change. `raw_bytes_max` is for
    compressed bodies together, when they are decompressed."""
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
    values: dict[str, Value] = {"payload": [delta]}
    if control.headers:
        values["headers"] = [control.headers]
    for field, number in (("epoch", control.epoch), ("sequence", control.sequence)):
        bounded(number, 0, PRODUCER_NUMBER_MAX - 1, field)
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
    """Which partition gets which part. Deltas may go only where their vectors belong."""
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
        found: list[int] = [0] if len(ports) == 1 else np.unique(homes).tolist()
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


class Tokens:
    """Checked. Those of an earlier topic of the same name are lost: nothing is done about them."""

    def __init__(
        self, topic: ServedTopic, control: Settle | Return | Extend, data: memoryview
    ) -> None:
        self._topic, self._parts, self._forwarded = topic, control.parts, control.forwarded
        total = sum(part.count for part in self._parts)
        if not 1 <= total <= TOKENS_MAX or len(data) != 8 * total:
            raise InvalidArgument(
                f"tokens must be 1 to {TOKENS_MAX} and match the parts",
                field="tokens",
                limit=TOKENS_MAX,
            )
        if any(part.count < 0 for part in self._parts):
            raise InvalidArgument("a part's count is negative", field="parts")
        self._partitions = [self._partition(part) for part in self._parts]
        self._tokens = np.frombuffer(data, "<u8")

    def _partition(self, part: TokenPart) -> PartitionPort | None:
        """Where the tokens of a part belong; None: they are of a topic that is no more."""
        if part.topic <= 0:
            raise InvalidArgument("a part of lease tokens names no topic", field="parts")
        if has_id(self._topic, part.topic):
            return self._topic.partition(part.partition)
        return None

    def hand_out(self, make: Make, answer: Reply) -> None:
        if self._forwarded:
            self._hand_out_forwarded(make, forwarded(len(self._parts), answer))
            return

        def whole(result: object) -> None:
            if isinstance(result, Settled) and result.lost:
                topic = self._topic
                topic.metrics.leases_lost.add((topic.config.name,), len(result.lost))
            answer(result)

        if len(self._parts) == 1:

            def only(lost: object) -> None:
                whole(Settled(lost) if isinstance(lost, list) else lost)

            _settle(self._partitions[0], make(self._tokens, only))
            return
        shares = self._by_partition()
        positions = [some for _, some in shares]
        gathered = Gathered(len(shares), partial(_lost_of, positions), whole)
        for i, (partition, some) in enumerate(shares):
            _settle(partition, make(self._tokens[some], gathered.part(i)))

    def _by_partition(self) -> list[tuple[PartitionPort | None, NDArray[np.intp]]]:
        """Each partition once, with the positions of its tokens: a partition acts on many as fast
        as on one, and a request may have thousands of parts."""
        pairs = list(zip(self._parts, self._partitions, strict=True))
        numbers = [-1 if port is None else part.partition for part, port in pairs]
        numbered = np.repeat(np.array(numbers), [part.count for part in self._parts])
        order = np.argsort(numbered, kind="stable")
        found, firsts = np.unique(numbered[order], return_index=True)
        ports = dict(zip(numbers, self._partitions, strict=True))
        groups = np.split(order, firsts[1:])
        return [(ports[int(n)], group) for n, group in zip(found, groups, strict=True)]

    def _hand_out_forwarded(self, make: Make, outcomes: Gathered) -> None:
        """Another node has sent them on: each part has an outcome of its own."""
        at = 0
        for i, part in enumerate(self._parts):
            partition = self._partitions[i]
            if partition is None or self._topic.served(partition.index) is not None:
                tokens = self._tokens[at : at + part.count]
                _settle(partition, make(tokens, outcomes.part(i)))
            else:
                outcomes.part(i)(self._topic.not_here(part.partition))
            at += part.count


def _settle(partition: PartitionPort | None, request: TokenRequest) -> None:
    if partition is None:
        request.reply(list(range(len(request.tokens))))
    else:
        partition.settle(request)


def _lost_of(positions: Sequence[NDArray[np.intp]], results: Sequence[object]) -> object:
    """What several partitions lost, by its positions in the request; or why it is not known."""
    errors = [result for result in results if isinstance(result, PenstockError)]
    if errors:
        return as_one(errors, len(results))
    lost: list[int] = []
    for mine, result in zip(positions, results, strict=True):
        if isinstance(result, list) and result:
            lost += mine[result].tolist()
    return Settled(sorted(lost))
