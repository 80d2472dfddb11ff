"""A cluster whose nodes garble each other's words, at work.

Every node is reached by the others through a `Garbler`; requests of all kinds come in at each of
them directly. What is asked may fail, and replicas may lose each other. But no node may end, no
request may stay without an answer, and once words arrive as they were said, a new topic works.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.errors import PenstockError
from penstock.model.batch import SCHEMAS, Kind
from penstock.testing.cluster import ClusterProcesses
from penstock.testing.process import ServerProcess, free_ports
from verification.fuzz import corpus
from verification.fuzz.driving import HEALTHY_S_MAX, Findings
from verification.fuzz.garbling import Garbler
from verification.fuzz.targets import ClusterTarget

SHARE: Final = 0.05  # of the frames between nodes
ANSWER_S_MAX: Final = 60.0
PAUSE_S: Final = 0.01
Ask = Callable[[Connection, random.Random], Awaitable[object]]


async def garble(folder: Path, *, seed: int, seconds: float) -> Findings:
    """Three nodes of a cluster of its own in `folder`, for so long."""
    cluster = ClusterProcesses(folder, nodes=3)
    garblers = _between(cluster, seed)
    target, findings = ClusterTarget(cluster), Findings(seed)
    try:
        for garbler in garblers:
            await garbler.start()
        await cluster.start_all()
        await target.prepare()
        await _work(target, garblers, findings, seconds=seconds)
        await _check(target, findings)
    finally:
        await cluster.close()
        for garbler in garblers:
            await garbler.close()
    findings.frames = sum(garbler.garbled for garbler in garblers)
    return findings


def _between(cluster: ClusterProcesses, seed: int) -> list[Garbler]:
    """A proxy for each node, at the address that the others are told."""
    taken = {port for node in cluster.nodes.values() for port in node.ports.values()}
    taken |= {cluster.etcd.port, cluster.etcd.peer_port}
    free = [port for port in free_ports(len(taken) + len(cluster.nodes)) if port not in taken]
    garblers = []
    for (name, node), port in zip(cluster.nodes.items(), free, strict=False):
        node.arguments += ["--advertise", f"127.0.0.1:{port}"]
        garblers.append(Garbler(port, node.ports["native"], seed=f"{seed}/{name}"))
    return garblers


async def _work(
    target: ClusterTarget, garblers: list[Garbler], findings: Findings, *, seconds: float
) -> None:
    until = time.monotonic() + seconds
    for garbler in garblers:
        garbler.share = SHARE
    async with asyncio.TaskGroup() as group:
        for server in target.servers:
            group.create_task(_requests(server, findings, until=until))
    for garbler in garblers:
        garbler.share = 0.0
    findings.seconds = seconds


async def _requests(server: ServerProcess, findings: Findings, *, until: float) -> None:
    """One after the other at a node, until it is time."""
    dice, connection = random.Random(f"{findings.seed}/{server.url}"), None
    while time.monotonic() < until and not findings.problems:
        ask = dice.choice(ASKED)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                if connection is None or not connection.alive:
                    connection = await open_connection(server.url)
                await ask(connection, dice)
        except TimeoutError:
            findings.problems.append(f"{ask.__name__} was not answered")
        except PenstockError:
            findings.refused += 1
            if not server.running:
                findings.problems.append(f"a node is gone: {server.last_words()}")
        findings.cases += 1
        await asyncio.sleep(PAUSE_S)
    if connection is not None:
        await connection.close()


async def _check(target: ClusterTarget, findings: Findings) -> None:
    """A new topic works, soon after the last word that was changed on its way."""
    deadline = time.monotonic() + HEALTHY_S_MAX
    while not findings.problems:
        try:
            async with asyncio.timeout(HEALTHY_S_MAX):
                await target.use()
            return
        except (PenstockError, TimeoutError) as error:
            if time.monotonic() > deadline:
                findings.problems.append(f"it serves no more: {error!r}")
            await asyncio.sleep(0.5)


# --- what is asked ---


async def _put(connection: Connection, dice: random.Random) -> object:
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [dice.randbytes(9)]})
    return await connection.enqueue(corpus.QUEUE, [(dice.randrange(2), 1, body)])


async def _atomic(connection: Connection, dice: random.Random) -> object:
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [dice.randbytes(9)]})
    return await connection.enqueue(corpus.QUEUE, [(0, 1, body), (1, 1, body)], atomic=True)


async def _delta(connection: Connection, dice: random.Random) -> object:
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [corpus.delta(dice)]})
    return await connection.enqueue(corpus.DELTAS, [(0, 1, body)], partitioned=False)


async def _pop(connection: Connection, dice: random.Random) -> object:
    return await connection.call("pop", topic=corpus.QUEUE, limit=dice.randrange(1, 9))


async def _look(connection: Connection, dice: random.Random) -> object:
    method = dice.choice(("peek", "stats", "dlq_list", "log_status", "live_status", "topic_get"))
    topic = corpus.DELTAS if method == "live_status" else corpus.QUEUE
    return await connection.call(method, topic=topic)


ASKED: Final[tuple[Ask, ...]] = (_put, _atomic, _delta, _pop, _look)
