"""A server that is killed at named points under traffic, and the books that it is held against.

`Traffic` drives a real server and writes down what it was promised: which enqueues, leases and
settlements were acknowledged, and which requests never got an answer. `check` opens what a crash
left and compares. The tests do this once for each point; `scripts/crash_soak.py` at random, round
after round on one folder.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.integration.harness import Node, body, delivered_tokens, ids_of

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.errors import PenstockError, Unavailable
from penstock.log.flush import LogOptions
from penstock.log.verify import verify_folder
from penstock.model.entries import DELIVERY
from penstock.model.ids import LeaseToken
from penstock.node.clock import ManualClock
from penstock.testing.process import ServerProcess
from penstock.wire.messages import Enqueued

TOPIC = "jobs"
PARTITIONS = 2
KEEP_FROM, KEEP_EVERY = 200, 17  # a message in so many stays alive: its segment is rewritten
LOG = {"segment_bytes": 64 << 10, "allocate_bytes": 32 << 10, "reserve_bytes": 8 << 10}
OPTIONS: dict[str, Any] = {
    **{f"log.{name}": value for name, value in LOG.items()},
    "log.floor_s": 0.05,  # writes with and without one
    "upkeep.snapshot_s": 0.001,
    "upkeep.retention_s": 0.001,
}
CONFIG = {
    "name": TOPIC, "partitions": PARTITIONS, "retention_ms": 0, "backoff_ms_base": 0,
    "visibility_ms": 3_600_000,
}  # fmt: skip
RUN_S = 120.0
BACKLOG_MAX = 150
Part = tuple[int, int, bytes]  # partition, entries, body


class Server(ServerProcess):
    """A server without a gateway that dies at a point of its own."""

    crash = ""
    logs: Path | None = None  # a folder for its log, where the data's own disk is to fail

    @property
    def log_path(self) -> Path:
        return super().log_path if self.logs is None else self.logs / "server.log"

    def _arguments(self, ready: Path) -> list[str]:
        arguments = super()._arguments(ready)
        for option in ("--grpc-port", "--http-port"):
            arguments[arguments.index(option) + 1] = "-1"
        return ["env", f"PENSTOCK_CRASH={self.crash}", *arguments]


def server_in(folder: Path, point: str) -> Server:
    server = Server(data=folder, options=OPTIONS)
    server.crash = point
    return server


@dataclass
class Request:
    """An enqueue that can be sent again, byte for byte."""

    parts: list[Part]
    payloads: list[bytes]
    atomic: bool

    async def send(self, connection: Connection) -> Enqueued:
        return await connection.enqueue(TOPIC, self.parts, atomic=self.atomic)


@dataclass
class Ledger:
    """What was sent, and what the server has acknowledged of it."""

    sent: set[bytes] = field(default_factory=set)
    enqueued: dict[bytes, str] = field(default_factory=dict)  # acknowledged, with the message id
    unanswered: list[Request] = field(default_factory=list)
    atomic: list[list[bytes]] = field(default_factory=list)
    leased: dict[bytes, LeaseToken] = field(default_factory=dict)  # delivered, not settled
    acking: dict[bytes, LeaseToken] = field(default_factory=dict)  # sent, not answered
    returning: set[bytes] = field(default_factory=set)  # the same, to be tried again or dead
    done: set[bytes] = field(default_factory=set)  # acknowledged for good
    kept: set[bytes] = field(default_factory=set)  # put away for long
    rejected: set[bytes] = field(default_factory=set)  # retention may drop them at any time
    complaints: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def backlog(self) -> int:
        return len(self.enqueued) - len(self.done) - len(self.kept)

    @property
    def gone(self) -> set[bytes]:
        """What need not be there any more."""
        return self.done | self.acking.keys() | self.rejected

    def note(self, ok: bool, complaint: str) -> None:
        if not ok:
            self.complaints.append(complaint)


class Traffic:
    """Producers, atomic batches and a consumer on one server, until it is gone."""

    def __init__(self, connection: Connection, ledger: Ledger, run: int) -> None:
        self._connection, self._ledger, self._run = connection, ledger, run
        self._sequences: Counter[str] = Counter()
        # What an earlier run's consumer took with it comes back to nobody for a long time.
        self._backlog_max = ledger.backlog + BACKLOG_MAX

    async def until_gone(self) -> None:
        await self._connection.call("topic_create", config=CONFIG, exists_ok=True)
        await asyncio.gather(
            *(self._repeat(self._put, str(i)) for i in range(2)),
            self._repeat(self._put_atomically, "a"),
            self._consume(),
        )

    async def _repeat(self, act: Callable[[str], Awaitable[None]], name: str) -> None:
        while await self._survived(act(name)):
            await asyncio.sleep(0.002)
            while self._connection.alive and self._ledger.backlog > self._backlog_max:
                await asyncio.sleep(0.002)

    async def _survived(self, act: Awaitable[Any]) -> bool:
        """Whether the server is still there; anything else that goes wrong is a complaint."""
        try:
            await act
        except Unavailable:
            return False
        except PenstockError as error:
            self._ledger.note(False, f"refused: {error!r}")
        return True

    def _part(
        self, name: str, partition: int, count: int
    ) -> tuple[tuple[int, int, bytes], list[bytes]]:
        payloads = [
            b"%s/%d/%d " % (name.encode(), partition, next(self._ledger.numbers)) + b"." * 900
            for _ in range(count)
        ]
        producer = f"{self._run}.{name}.{partition}"
        first = self._sequences[producer] + 1
        self._sequences[producer] += count
        rows = [{"payload": p, "priority": len(self._ledger.sent) % 5} for p in payloads]
        return (partition, count, body(rows, producer=(producer, 1, first))), payloads

    async def _put(self, name: str) -> None:
        part, payloads = self._part(name, int(name) % PARTITIONS, 6)
        await self._send(Request([part], payloads, False))

    async def _put_atomically(self, name: str) -> None:
        made = [self._part(name, p, 2) for p in range(PARTITIONS)]
        payloads = [payload for _, some in made for payload in some]
        self._ledger.atomic.append(payloads)
        await self._send(Request([part for part, _ in made], payloads, True))

    async def _send(self, request: Request) -> None:
        ledger = self._ledger
        ledger.sent.update(request.payloads)
        ledger.unanswered.append(request)
        answer = await request.send(self._connection)
        ledger.note(not answer.duplicates, "a first attempt was taken for a repetition")
        ledger.enqueued.update(zip(request.payloads, ids_of(answer), strict=True))
        ledger.unanswered.remove(request)

    async def _consume(self) -> None:
        try:
            stream = await self._connection.lease_stream(TOPIC, credits=40, batch_max=10)
            async for batch in stream:
                payloads = list(batch.columns.binary("payload") or ())
                tokens = delivered_tokens([batch])
                self._book(dict(zip(payloads, tokens, strict=True)))
                await self._settle(payloads)
        except Unavailable:
            return

    def _book(self, delivered: dict[bytes, LeaseToken]) -> None:
        ledger = self._ledger
        for payload in delivered:
            ledger.note(payload in ledger.sent, f"invented: {payload[:40]!r}")
            ledger.note(payload not in ledger.done, f"came back after its ack: {payload[:40]!r}")
            ledger.note(payload not in ledger.leased, f"leased twice: {payload[:40]!r}")
        ledger.leased.update(delivered)

    async def _settle(self, payloads: list[bytes]) -> None:
        """Acknowledge most, put a few away, reject one now and then."""
        ledger, connection = self._ledger, self._connection
        numbers = {p: int(p.split()[0].rpartition(b"/")[2]) for p in payloads}
        kept = [p for p, n in numbers.items() if n > KEEP_FROM and n % KEEP_EVERY == 0]
        acked = [p for p in payloads if p not in kept]
        tokens = {p: ledger.leased.pop(p) for p in payloads}
        ledger.returning.update(kept)
        ledger.acking.update({p: tokens[p] for p in acked})
        if acked:
            lost = await connection.settle(TOPIC, [tokens[p] for p in acked])
            ledger.note(not lost, "an acknowledgement came too late")
            ledger.done.update(acked)
            for payload in acked:
                del ledger.acking[payload]
        for payload in kept:
            reject = numbers[payload] % (3 * KEEP_EVERY) == 0
            delay_ms = None if reject else 30 * 24 * 3600 * 1000
            ledger.kept.add(payload)
            if reject:
                ledger.rejected.add(payload)
            await connection.give_back(TOPIC, [tokens[payload]], delay_ms=delay_ms, reject=reject)
            ledger.returning.discard(payload)


async def crash_once(folder: Path, point: str, ledger: Ledger, run: int = 1) -> int:
    """Run a server with traffic until it dies at `point`; returns how it ended."""
    server = server_in(folder, point)
    try:
        await server.start()
    except Unavailable:
        return await server.ended()  # it died while starting
    try:
        connection = await open_connection(server.url)
        async with asyncio.timeout(RUN_S):
            await Traffic(connection, ledger, run).until_gone()
            return await server.ended()
    except (Unavailable, TimeoutError):
        return 0
    finally:
        await server.kill()


# --- what is left ---


def node_on(folder: Path) -> Node:
    from penstock.config import Config, UpkeepOptions

    never = UpkeepOptions(snapshot_s=3600, retention_s=3600)
    node = Node(folder, Config(data=folder, log=LogOptions(**LOG), upkeep=never))
    node.clock = ManualClock(int(time.time() * 1000))
    return node


async def check(folder: Path, ledger: Ledger, *, drain: bool) -> None:
    """Open what a crash left and note everything that is not as it was promised."""
    report = verify_folder(folder)
    ledger.note(report.ok, f"verification: {report.first_bad}")
    node = await node_on(folder).start()
    try:
        if TOPIC in node.engine.topics:
            await _compare(node, ledger)
            if drain:
                await _drain(node, ledger)
        else:
            ledger.note(not ledger.enqueued, "the topic is gone")
    finally:
        await node.stop()


def present(node: Node) -> list[bytes]:
    """The payload of every living message, as the log has it."""
    found: list[bytes] = []
    for partition in node.engine.topics[TOPIC].local:
        partition.heap.validate()
        sequences = partition.heap.alive(1, partition.log.sequence_last).tolist()
        if sequences:
            rows = partition.reader.load(sequences)
            assert rows is not None
            columns = DELIVERY.decode(
                rows.encode(np.zeros(len(sequences), np.uint32)), len(sequences)
            )
            found += columns.binary("payload") or []
    return found


async def _compare(node: Node, ledger: Ledger) -> None:
    alive = present(node)
    ledger.note(len(alive) == len(set(alive)), "a message is there twice")
    here = set(alive)
    ledger.note(here <= ledger.sent, "a message was invented")
    ledger.note(not here & ledger.done, "an acknowledged message is back")
    lost = ledger.enqueued.keys() - here - ledger.gone
    ledger.note(not lost, f"{len(lost)} acknowledged messages are lost")
    gone = ledger.gone
    for payloads in ledger.atomic:
        there = sum(p in here or p in gone for p in payloads)
        ledger.note(there in (0, len(payloads)), f"{there} of an atomic batch of {len(payloads)}")
    _compare_leases(node, ledger)
    await _send_again(node, ledger)
    for payload, token in ledger.acking.items():
        if payload in here:
            ledger.leased[payload] = token
        else:
            ledger.done.add(payload)
    ledger.acking.clear()
    ledger.returning.clear()


def _compare_leases(node: Node, ledger: Ledger) -> None:
    """What was delivered and not settled is still whose it was."""
    for payload, token in ledger.leased.items():
        heap = node.engine.topics[TOPIC].local[token.partition].heap
        _, held = heap.resolve(np.array([token.sequence], np.uint64))
        ledger.note(bool(held[0]), f"a lease is lost: {payload[:40]!r}")


async def _send_again(node: Node, ledger: Ledger) -> None:
    """Every request without an answer gets one, and has been written once by then."""
    for request in ledger.unanswered:
        answers = [await request.send(node.connection) for _ in range(2)]
        ledger.note(ids_of(answers[0]) == ids_of(answers[1]), "two answers to one request")
        ledger.enqueued.update(zip(request.payloads, ids_of(answers[0]), strict=True))
    again = Counter(present(node))
    for request in ledger.unanswered:
        for payload in request.payloads:
            once = again[payload] == 1 or payload in ledger.gone
            ledger.note(once, f"{again[payload]} of a repeated message")
    ledger.unanswered.clear()


async def _drain(node: Node, ledger: Ledger) -> None:
    """Let all leases and delays end, then take everything out through the front door."""
    expected = ledger.enqueued.keys() - ledger.done
    for seconds in (3601, 31 * 24 * 3600):
        await node.advance(seconds)
        await node.advance(1)
    seen = Counter(m["payload"] for m in await node.dead(TOPIC, limit=1000))
    while messages := await node.pop(TOPIC, 1000):
        for m in messages:
            ledger.note(m["message_id"] == ledger.enqueued[m["payload"]], "another message id")
        seen.update(m["payload"] for m in messages)
        await node.ack(TOPIC, messages)
    ledger.note(max(seen.values(), default=1) == 1, "a message came twice")
    missing, extra = len(expected - seen.keys() - ledger.rejected), len(seen.keys() - expected)
    ledger.note(not missing and not extra, f"{missing} messages missing, {extra} too many")
