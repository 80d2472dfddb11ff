"""A node of three dies at named points under atomic batches: as driver, home and participant, as a
follower, and as it takes a partition over. No batch is torn, nothing is lost or written twice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from pathlib import Path
from typing import Final

import pytest
from tests.integration.cluster.asking import SOON_S, WITHIN_S, Asking, until
from tests.integration.harness import body, ids_of

from penstock.errors import PenstockError, Unavailable
from penstock.model.batch import Batch, Decision, Kind
from penstock.model.ids import MessageId
from penstock.testing.cluster import ClusterProcesses
from verification.checkers import Checker
from verification.events import Atomic, Committed, Enqueued, Enqueuing, digest_of

pytestmark = pytest.mark.timeout(900)
TOPIC = "jobs"
PARTITIONS = 3
WRITERS = 2  # at each node
VICTIM = "n1"
OPTIONS = {"cluster.lease_s": 2, "log.reserve_bytes": 1 << 20}
# On which pass to die: late enough that batches of others are under way.
POINTS: Final = {
    "node.atomic.staged": 20,  # the driver, before it knows that anything was prepared,
    "node.atomic.prepared": 20,  # before it decides,
    "node.atomic.decided": 20,  # before it tells anybody
    "node.atomic.preparing": 40,  # a participant with its share, or the home
    "node.atomic.deciding": 20,  # the home with its decision
    "node.atomic.applying": 20,  # a participant with its copy
    "node.barrier.staged": 1,  # the next coordinator of all that is prepared
    "node.follower.staging": 200,
    "node.commit.unanswered": 100,  # whoever has committed, and told nobody
}
ENDS = 20  # batches that each writer finishes after the last death


class Writer:
    """Atomic batches through one node, or another while that is away; each until it is in."""

    def __init__(self, name: str, node: str, cluster: Asking, checker: Checker) -> None:
        self._name, self._node, self._cluster, self._checker = name, node, cluster, checker
        self._dice = random.Random(name)
        self._sequences = [itertools.count(0) for _ in range(PARTITIONS)]
        self.finished = 0

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            partitions = self._dice.sample(range(PARTITIONS), self._dice.randint(2, PARTITIONS))
            await self._write([(p, next(self._sequences[p])) for p in partitions])
            self.finished += 1

    async def _write(self, keys: list[tuple[int, int]]) -> None:
        for partition, sequence in keys:
            producer = self._producer(partition)
            digests = [digest_of(self._payload(partition, sequence))]
            self._checker.add(Enqueuing(0, producer, 1, sequence, 1, partition, digests))
        self._checker.add(Atomic([(self._producer(p), 1, sequence, 1, p) for p, sequence in keys]))
        for found, (partition, sequence) in zip(await self._insist(keys), keys, strict=True):
            place = MessageId.parse(found)
            assert place.partition == partition
            self._checker.add(
                Enqueued(0, self._producer(partition), 1, sequence, 1, partition, place.sequence)
            )

    async def _insist(self, keys: list[tuple[int, int]]) -> list[str]:
        parts = [
            (p, 1, body([{"payload": self._payload(p, n)}], producer=(self._producer(p), 1, n)))
            for p, n in keys
        ]
        for attempt in itertools.count():
            try:
                connection = await self._cluster.connection(self._at(attempt))
                async with asyncio.timeout(SOON_S):
                    return ids_of(await connection.enqueue(TOPIC, parts, atomic=True))
            except (PenstockError, OSError, TimeoutError):
                await asyncio.sleep(0.02)
        raise AssertionError("unreachable")

    def _at(self, attempt: int) -> str:
        """The writer's own node, and after it the others, as long as they run."""
        running = self._cluster.processes.running
        own = [self._node] if self._node in running and attempt % 3 == 0 else running
        return own[attempt % len(own)]

    def _payload(self, partition: int, sequence: int) -> bytes:
        return f"{self._producer(partition)}/{sequence}".encode()

    def _producer(self, partition: int) -> str:
        return f"{self._name}.{partition}"


async def dies(processes: ClusterProcesses) -> int:
    """The exit code of the victim, which ends by itself."""
    async with asyncio.timeout(WITHIN_S):
        return await processes.nodes[VICTIM].ended()


async def restart(processes: ClusterProcesses, point: str) -> None:
    """Start the victim with a point armed. It may reach it before it says that it serves."""
    processes.nodes[VICTIM].environment["PENSTOCK_CRASH"] = point
    with contextlib.suppress(Unavailable):
        await processes.start(VICTIM)


async def settled(cluster: Asking) -> dict[int, int]:
    """How far each partition is committed, once nothing in it is undecided."""

    async def done() -> dict[int, int]:
        found = (await cluster.call("log_status", topic=TOPIC))["partitions"]
        if any(p["sequence_stable"] != p["sequence_last"] for p in found):
            return {}
        return {p["partition"]: p["sequence_committed"] for p in found}

    ends: dict[int, int] = await until(done)
    return ends


async def read(cluster: Asking, node: str, partition: int, through: int) -> list[Batch]:
    """A partition's log as one node has it."""
    connection = await cluster.connection(node)
    stream = await connection.log_stream(TOPIC, partition=partition, through=through)
    return [batch async for batches in stream for batch in batches]


async def test_no_death_tears_an_atomic_batch(tmp_path: Path) -> None:
    processes = ClusterProcesses(tmp_path, nodes=3, options=OPTIONS)
    armed = [f"{point}:{nth}" for point, nth in POINTS.items()]
    processes.nodes[VICTIM].environment["PENSTOCK_CRASH"] = armed[0]
    cluster, checker, stop = Asking(processes), Checker(), asyncio.Event()
    writers = [
        Writer(f"{node}-{i}", node, cluster, checker)
        for node in processes.nodes for i in range(WRITERS)
    ]  # fmt: skip
    try:
        await processes.start_all()
        await cluster.create(TOPIC, partitions=PARTITIONS)
        async with asyncio.TaskGroup() as group:
            for writer in writers:
                group.create_task(writer.run(stop))
            for point, following in zip(armed, [*armed[1:], ""], strict=True):
                assert await dies(processes) == -signal.SIGKILL, point
                await restart(processes, following)
            await _each_goes_on(writers)
            stop.set()
        await _judge(cluster, checker)
    finally:
        await cluster.close()
        await processes.close()


async def _each_goes_on(writers: list[Writer]) -> None:
    enough = [writer.finished + ENDS for writer in writers]

    async def done() -> bool:
        return all(w.finished >= n for w, n in zip(writers, enough, strict=True))

    await until(done)


async def _judge(cluster: Asking, checker: Checker) -> None:
    await cluster.processes.wait_ready()
    confirmed = 0
    for partition, through in (await settled(cluster)).items():
        for node in cluster.processes.nodes:
            log = await read(cluster, node, partition, through)
            for batch in log:
                checker.add(Committed(partition, node, 1, batch.last, batch.chain))
            if node == VICTIM:
                checker.add_log(log)
                confirmed += sum(batch.entries for batch in log if _confirms(batch))
    verdict = checker.verdict()
    assert verdict.ok, verdict
    assert verdict.acknowledged > 1000
    assert confirmed > 0  # homes have heard that all participants have their copies


def _confirms(batch: Batch) -> bool:
    return batch.kind is Kind.DECIDE and batch.columns().fixed("commit")[0] == Decision.CONFIRMED
