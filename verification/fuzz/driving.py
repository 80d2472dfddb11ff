"""Cases against nodes: each is one connection that greets, sends frames and hangs up.

A case is a function of the run's seed and its number. Whatever it sends, the node has to end the
connection once the case has said all it has to say, and to serve others as before; what it writes
about requests that failed for reasons of its own is a finding too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Final, Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.model.batch import Codec
from penstock.testing.process import ServerProcess
from verification.fuzz import corpus
from verification.fuzz.corpus import Valid
from verification.fuzz.mutation import frame_bytes, mutated

CASE_S_MAX: Final = 60.0  # until the node has hung up
HEALTHY_S_MAX: Final = 60.0
HEALTHY_EVERY: Final = 200  # cases
GROWTH_BYTES_MAX: Final = 96 << 20  # of memory, after the first cases
WARM_CASES: Final = 300
TOGETHER: Final = 8  # connections at once
SUSPECT: Final = (
    "request failed",
    "call failed",
    "stream failed",
    "task failed",
    "cannot go on",
    "Traceback",
)


class Findings(msgspec.Struct):
    """What a run has found; nothing of `problems` may be there."""

    seed: int
    cases: int = 0
    frames: int = 0
    answers: int = 0  # bytes that came back
    refused: int = 0  # connections that a node ended by itself
    memory_grown: int = 0
    seconds: float = 0.0
    problems: list[str] = []


class Target(Protocol):
    """What is fuzzed."""

    servers: Sequence[ServerProcess]  # cases take turns with them
    valid: Valid  # what mutations start from

    async def prepare(self) -> None: ...

    async def use(self) -> None:
        """Do what it is there for, as somebody who means well; raises if that fails."""
        ...

    async def close(self) -> None: ...


class Case:
    """What one connection sends."""

    def __init__(self, seed: int, number: int, valid: Valid = corpus.valid) -> None:
        dice = random.Random(f"{seed}/{number}")
        greeting, codec = corpus.hello(dice)
        if dice.random() < 0.05:
            self.pieces = [mutated(dice, greeting)]
        else:
            self.pieces = [frame_bytes(greeting)]
        if dice.random() < 0.02:
            codec = Codec.ZSTD  # that nobody agreed on
        for at in range(1, dice.choice((2, 4, 8))):
            sent = valid(dice, at, codec)
            self.pieces.append(mutated(dice, sent) if dice.random() < 0.6 else frame_bytes(sent))
        self.frames = len(self.pieces)
        if dice.random() < 0.3:  # as a slow network cuts it
            whole = b"".join(self.pieces)
            cuts = sorted(dice.randrange(len(whole) + 1) for _ in range(4))
            ends = [0, *cuts, len(whole)]
            self.pieces = [whole[a:b] for a, b in pairwise(ends)]
        self.lingers = dice.random() < 0.4  # reads for a while before it hangs up


class Driver:
    """Runs cases against the native ports of a target's servers."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self.findings = Findings(seed)
        self._floors: dict[int, int] = {}  # by process: its memory after the first cases

    async def run(self, cases: range, *, until: float | None = None) -> None:
        """Run these cases, or those that there is time for (`until`, of the monotonic clock)."""
        began = time.monotonic()
        numbers = iter(cases)
        while some := list(islice(numbers, HEALTHY_EVERY)):
            await self._round(some, until)
            await self.check()
            if self.findings.problems or _over(until):
                break
        self.findings.seconds += time.monotonic() - began

    async def _round(self, some: Sequence[int], until: float | None) -> None:
        numbers = iter(some)

        async def work() -> None:
            for number in numbers:
                if self.findings.problems or _over(until):
                    return
                await self.case(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(TOGETHER):
                group.create_task(work())

    async def case(self, number: int) -> None:
        findings, servers = self.findings, self._target.servers
        case, server = (
            Case(findings.seed, number, self._target.valid),
            servers[number % len(servers)],
        )
        try:
            async with asyncio.timeout(CASE_S_MAX):
                findings.answers += await _play(case, server.ports["native"])
        except TimeoutError:
            self._problem(f"case {number}: the node did not hang up in {CASE_S_MAX:.0f} s")
        except OSError:
            if not server.running:
                self._problem(f"case {number}: the node is gone: {server.last_words()}")
            else:
                findings.refused += 1  # it hung up on us while we wrote
        findings.cases += 1
        findings.frames += case.frames

    # --- whether all is well ---

    async def check(self) -> None:
        """The target serves, keeps to its memory, and has no complaint about itself."""
        for server in self._target.servers:
            self._check_log(server)
        try:
            async with asyncio.timeout(HEALTHY_S_MAX):
                await self._target.use()
        except (PenstockError, TimeoutError) as error:
            self._problem(f"it serves no more: {error!r}")
            return
        for server in self._target.servers:
            self._check_memory(server)

    def _check_memory(self, server: ServerProcess) -> None:
        used = server.rss_bytes()
        if self.findings.cases < WARM_CASES:
            self._floors[server.pid] = max(self._floors.get(server.pid, 0), used)
            return
        grown = max(0, used - self._floors.get(server.pid, used))
        self.findings.memory_grown = max(self.findings.memory_grown, grown)
        if grown > GROWTH_BYTES_MAX:
            self._problem(f"a node has grown by {grown >> 20} MiB")

    def _check_log(self, server: ServerProcess) -> None:
        for line in server.log_path.read_text(errors="replace").splitlines():
            if any(words in line for words in SUSPECT):
                self._problem(line[-3000:])
                return

    def _problem(self, text: str) -> None:
        if not self.findings.problems:  # what follows from the first is none of its own
            self.findings.problems.append(text)


def _over(until: float | None) -> bool:
    return until is not None and time.monotonic() > until


async def _play(case: Case, port: int) -> int:
    """Send a case; how many bytes came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
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
