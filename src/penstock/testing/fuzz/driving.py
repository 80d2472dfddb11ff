"""Cases against a node: each is one connection that greets, sends frames and hangs up.

A case is a function of the run's seed and its number. Whatever it sends, the node has to end the
connection once the case has said all it has to say, and to serve others as before; what it writes
about requests that failed for reasons of its own is a finding too.
"""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise
from typing import Final

import msgspec

from penstock.client.connection import Connection, open_connection
from penstock.errors import PenstockError
from penstock.model.batch import SCHEMAS, Codec, Kind
from penstock.testing.fuzz import corpus
from penstock.testing.fuzz.mutation import frame_bytes, mutated
from penstock.testing.process import ServerProcess

CASE_S_MAX: Final = 60.0  # until the node has hung up
HEALTHY_S_MAX: Final = 60.0
HEALTHY_EVERY: Final = 200  # cases
GROWTH_BYTES_MAX: Final = 96 << 20  # of memory, after the first cases
WARM_CASES: Final = 300
TOGETHER: Final = 8  # connections at once
SUSPECT: Final = ("request failed", "task failed", "Traceback")  # what a node must not write


class Findings(msgspec.Struct):
    """What a run has found; nothing of `problems` may be there."""

    seed: int
    cases: int = 0
    frames: int = 0
    answers: int = 0  # bytes that came back
    refused: int = 0  # connections that the node ended by itself
    memory_grown: int = 0
    seconds: float = 0.0
    problems: list[str] = []


class Case:
    """What one connection sends."""

    def __init__(self, seed: int, number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        greeting, codec = corpus.hello(dice)
        if dice.random() < 0.05:
            self.pieces = [mutated(dice, greeting)]
        else:
            self.pieces = [frame_bytes(greeting)]
        if dice.random() < 0.02:
            codec = Codec.ZSTD  # that nobody agreed on
        for at in range(1, dice.choice((2, 4, 8))):
            sent = corpus.valid(dice, at, codec)
            self.pieces.append(mutated(dice, sent) if dice.random() < 0.6 else frame_bytes(sent))
        self.frames = len(self.pieces)
        if dice.random() < 0.3:  # as a slow network cuts it
            whole = b"".join(self.pieces)
            cuts = sorted(dice.randrange(len(whole) + 1) for _ in range(4))
            ends = [0, *cuts, len(whole)]
            self.pieces = [whole[a:b] for a, b in pairwise(ends)]
        self.lingers = dice.random() < 0.4  # reads for a while before it hangs up


class Driver:
    """Runs cases against a server's native port."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self.findings = Findings(seed)
        self._healthy: Connection | None = None
        self._floor = 0

    async def prepare(self) -> None:
        connection = await self._connection()
        for config in (
            {"name": corpus.QUEUE, "partitions": 2},
            {"name": corpus.DELTAS, "kind": "delta", "dimensions": corpus.DIMENSIONS},
        ):
            await connection.call("topic_create", config=config)

    async def run(self, cases: range, *, until: float | None = None) -> None:
        """Run these cases, or those that there is time for (`until`, of the monotonic clock)."""
        began = time.monotonic()
        numbers = iter(cases)

        async def work() -> None:
            for number in numbers:
                if self.findings.problems or (until is not None and time.monotonic() > until):
                    return
                await self.case(number)
                if number % HEALTHY_EVERY == HEALTHY_EVERY - 1:
                    await self.check()

        async with asyncio.TaskGroup() as group:
            for _ in range(TOGETHER):
                group.create_task(work())
        await self.check()
        self.findings.seconds += time.monotonic() - began

    async def case(self, number: int) -> None:
        case, findings = Case(self.findings.seed, number), self.findings
        try:
            async with asyncio.timeout(CASE_S_MAX):
                findings.answers += await self._play(case)
        except TimeoutError:
            self._problem(f"case {number}: the node did not hang up in {CASE_S_MAX:.0f} s")
        except OSError:
            if not self._server.running:
                self._problem(f"case {number}: the node is gone: {self._server.last_words()}")
            else:
                findings.refused += 1  # it hung up on us while we wrote
        findings.cases += 1
        findings.frames += case.frames

    async def _play(self, case: Case) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.ports["native"])
        try:
            for piece in case.pieces:
                writer.write(piece)
                await writer.drain()
            received = 0
            if case.lingers:
                try:
                    async with asyncio.timeout(0.05):
                        while data := await reader.read(1 << 16):
                            received += len(data)
                except TimeoutError:
                    pass  # it has nothing more to say
            writer.write_eof()
            while data := await reader.read(1 << 16):
                received += len(data)
            return received
        finally:
            writer.close()

    # --- whether the node is well ---

    async def check(self) -> None:
        """The node answers, keeps to its memory, and has no complaint about itself."""
        try:
            async with asyncio.timeout(HEALTHY_S_MAX):
                connection = await self._connection()
                body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"healthy"]})
                await connection.enqueue(corpus.QUEUE, [(0, 1, body)])
        except (PenstockError, TimeoutError) as error:
            self._problem(f"the node serves no more: {error!r}")
            return
        self._check_memory()
        self._check_log()

    def _check_memory(self) -> None:
        used = self._server.rss_bytes()
        if self.findings.cases < WARM_CASES:
            self._floor = max(self._floor, used)
            return
        grown = self.findings.memory_grown = max(0, used - self._floor)
        if grown > GROWTH_BYTES_MAX:
            self._problem(f"the node has grown by {grown >> 20} MiB")

    def _check_log(self) -> None:
        for line in self._server.log_path.read_text(errors="replace").splitlines():
            if any(words in line for words in SUSPECT):
                self._problem(line[-3000:])
                return

    async def _connection(self) -> Connection:
        if self._healthy is None or not self._healthy.alive:
            self._healthy = await open_connection(self._server.url)
        return self._healthy

    async def close(self) -> None:
        if self._healthy is not None:
            await self._healthy.close()

    def _problem(self, text: str) -> None:
        if not self.findings.problems:  # what follows from the first is none of its own
            self.findings.problems.append(text)
