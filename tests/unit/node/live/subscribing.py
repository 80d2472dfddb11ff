"""Subscribers of a real node in this process, and what they should get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tests.integration.harness import START_MS, Node

from penstock.demo.corpus import ALL_OPS, Corpus, CorpusOptions, generate
from penstock.errors import PenstockError
from penstock.model.columns import Buffer
from penstock.model.delta_batch import deltas_of
from penstock.model.entries import CHANGES, most_urgent
from penstock.model.ids import partitions_of_digests
from penstock.node.live.cursors import CursorPlace, LiveCursor
from penstock.node.live.partition import LivePartition
from penstock.node.live.subscription import Subscription
from penstock.node.upkeep import retain
from penstock.propagation.flow.route import DeltaRoute, routed
from penstock.propagation.fold.propagator import Propagator
from penstock.wire.messages import Changes, OpenSubscription

DIMENSIONS = 8
TOPIC = "vectors"


class Row(NamedTuple):
    position: int
    ordinal: int
    sequence: int
    payload: bytes


class Reader:
    """One subscription. It returns credit at once unless it is `stalled`."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.headers: list[bytes] = []
        self.frames: list[Changes] = []
        self.failed: PenstockError | None = None
        self.stalled = False
        self.owed = (0, 0)
        self.subscription: Subscription | None = None

    def send(self, changes: Changes, body: Buffer, urgency: int | None) -> None:
        self.frames.append(changes)
        assert urgency == most_urgent(body, changes.count)
        if changes.count:
            columns = CHANGES.decode(body, changes.count)
            numbers = [columns.fixed(n).tolist() for n in ("position", "ordinal", "sequence")]
            self.rows += map(Row, *numbers, columns.binary("payload") or [])
            self.headers += columns.binary("headers") or [b""] * changes.count
        self.owed = (self.owed[0] + changes.count, self.owed[1] + len(body))
        if not self.stalled:
            asyncio.get_running_loop().call_soon(self.grant)

    def grant(self) -> None:
        entries, size = self.owed
        self.owed = (0, 0)
        if self.subscription is not None and entries and self.failed is None:
            self.subscription.acknowledge(self.frames[-1].position)
            self.subscription.grant(entries, size)

    def resume(self) -> None:
        self.stalled = False
        self.grant()

    def fail(self, error: PenstockError) -> None:
        self.failed = error

    @property
    def opened(self) -> Subscription:
        assert self.subscription is not None
        return self.subscription

    def status(self) -> dict[str, Any]:
        return self.opened.status(START_MS)


class LateStore:
    """The cursors of a node whose store answers when it is told to."""

    def __init__(self, node: Node) -> None:
        self.asked, self._gate = asyncio.Event(), asyncio.Event()
        self.late = True  # for whoever asks now
        self._get = node.engine.cursors.get
        node.engine.cursors.get = self._late  # type: ignore[method-assign]

    async def _late(self, place: CursorPlace) -> LiveCursor | None:
        self.asked.set()
        if self.late:
            await self._gate.wait()
        return await self._get(place)

    async def opening(self, at: Node, topic: str) -> asyncio.Task[Any]:
        """A subscription of `topic` at a node, which waits for its cursor."""
        request = OpenSubscription(topic, 0, start="cursor", cursor="me")
        opening = asyncio.create_task(at.connection.subscribe(request, lambda *_: None))
        await self.asked.wait()
        return opening

    def answer(self) -> None:
        self._gate.set()


async def subscribe(
    node: Node, partition: int = 0, *, stalled: bool = False, **request: Any
) -> Reader:
    reader = Reader()
    reader.stalled = stalled
    asked = OpenSubscription(TOPIC, partition, **request)
    topic = node.engine.topics[TOPIC]
    reader.subscription = await node.engine.hub(topic).subscribe(
        partition, asked, send=reader.send, fail=reader.fail
    )
    return reader


def small_outbox(node: Node, entries: int = 50, **options: object) -> None:
    """Let subscribers from now on have a small outbox."""
    live = msgspec.structs.replace(node.engine.config.live, outbox_entries=entries, **options)
    node.engine.config = msgspec.structs.replace(node.engine.config, live=live)


async def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait for a condition, letting the loop and its threads work."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def corpus(deltas: int = 600, **options: Any) -> Corpus:
    """Concurrent changes with duplicates, some of which come before their parents."""
    wild: dict[str, Any] = {
        "vectors": max(5, deltas // 20), "dimensions": DIMENSIONS, "components": 3,
        "duplicates": 0.05, "disorder": 0.2, "concurrent": 0.1, "window": 40, "ops": ALL_OPS,
        "namespaces": ("a", "b"), "start_ms": START_MS - 60_000,
    }  # fmt: skip
    return generate(CorpusOptions(deltas=deltas, **(wild | options)))


async def delta_topic(node: Node, **config: Any) -> None:
    await node.topic(TOPIC, **({"kind": "delta", "dimensions": DIMENSIONS} | config))


async def put(node: Node, payloads: list[bytes], *, size: int = 50, **row: Any) -> None:
    for at in range(0, len(payloads), size):
        await node.enqueue(TOPIC, [{"payload": p, **row} for p in payloads[at : at + size]])


def payloads_of(some: Corpus, first: int = 0, end: int | None = None) -> list[bytes]:
    return some.chunk(first, len(some) if end is None else end).payloads.tolist()


def expected(node: Node, partition: int = 0, *, first: int = 1, routes: str = "") -> list[Row]:
    """What the pipeline's fold makes of the whole log."""
    log = node.engine.topics[TOPIC].here(partition).log
    deltas = deltas_of(list(log.reader.scan(1)))
    fold = Propagator(DIMENSIONS)
    outcome = fold.feed(deltas, through=log.sequence_last)
    assert not fold.missing()
    released = outcome.released
    mask = routed(released, [DeltaRoute.parse(text) for text in routes.split()])
    numbers = [outcome.positions, outcome.ordinals, released.sequences]
    rows = map(Row, *(column.tolist() for column in numbers), released.payloads)
    wanted = zip(rows, mask.tolist(), strict=True)
    return [row for row, taken in wanted if taken and row.position >= first]


async def cut(node: Node) -> int:
    """Let retention drop the beginning of the log; where it begins now."""
    await node.advance(10)
    for _ in range(2):
        await node.call("snapshot", topic=TOPIC)
    topic = node.engine.topics[TOPIC]
    await retain(node.engine.hosts[topic.key(0)], node.clock.now_ms())
    first = topic.here(0).log.sequence_first
    assert first > 5
    return first


def home_of(payload: bytes, partitions: int) -> int:
    from penstock.model.delta_batch import DeltaBatch

    digest = np.ascontiguousarray(DeltaBatch.of([payload]).vector[:, 0])
    return int(partitions_of_digests(digest, partitions)[0])


def feed_of(node: Node) -> LivePartition:
    live = node.engine.topics[TOPIC].live
    assert live is not None
    return live.partitions[0]


@asynccontextmanager
async def unwritten(node: Node, payloads: list[bytes], *, size: int) -> AsyncIterator[None]:
    """Requests that are staged while nothing reaches the disk; afterwards it all does."""
    topic = node.engine.topics[TOPIC]
    partition, log = topic.here(0), topic.here(0).log
    flush, partition.flush = partition.flush, lambda: None
    end = log.sequence_last + len(payloads)
    async with asyncio.TaskGroup() as group:
        for at in range(0, len(payloads), size):
            before = log.sequence_last
            group.create_task(put(node, payloads[at : at + size], size=size))
            await until(lambda before=before: log.sequence_last > before)  # type: ignore[misc]
        await until(lambda: log.sequence_last >= end)
        await asyncio.sleep(0.01)
        yield
        partition.flush = flush
        topic.wake()
