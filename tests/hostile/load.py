"""The healthy client as the runner sees it: a process that tells how each of its requests went."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.hostile.site import FIRST, HOST, JOBS, Site, go_first

from penstock.testing import leash

ROOT: Final = Path(__file__).parents[2]
TOLD_S_MAX: Final = 40.0  # that the last request of a time may take to be told of
ERRORS_SHOWN: Final = 5


class Sample(NamedTuple):
    due: float
    kind: str
    ms: float
    outcome: str


class Health(NamedTuple):
    """How the healthy client fared for a while."""

    requests: int
    ms_p50: float
    ms_p99: float
    refused: int
    errors: dict[str, int]
    slowest: dict[str, float]  # the greatest time of each kind, in ms

    @staticmethod
    def of(samples: Sequence[Sample]) -> Health:
        times = sorted(sample.ms for sample in samples)
        failed = Counter(f"{s.kind}: {s.outcome}" for s in samples if s.outcome != "ok")
        return Health(
            len(samples), _percentile(times, 50), _percentile(times, 99), failed.total(),
            dict(failed.most_common(ERRORS_SHOWN)), _slowest(samples),
        )  # fmt: skip


def _slowest(samples: Sequence[Sample]) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in samples:
        found[sample.kind] = max(sample.ms, found.get(sample.kind, 0.0))
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _percentile(times: Sequence[float], percent: int) -> float:
    if not times:
        return 0.0
    return round(times[min(len(times) - 1, len(times) * percent // 100)], 1)


class Load:
    """The process; `samples` grows as it tells."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.samples: list[Sample] = []
        self._told = asyncio.Condition()
        self._mark = 0.0

    async def hear(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            words = line.decode().rstrip("\n").split(" ", 3)
            if words[0] == "mark":
                async with self._told:
                    self._mark = float(words[1])
                    self._told.notify_all()
            else:
                self.samples.append(Sample(float(words[0]), words[1], float(words[2]), words[3]))

    async def between(self, start: float, end: float) -> Health:
        """Of all requests that were due then, once they are told of."""
        async with asyncio.timeout(TOLD_S_MAX), self._told:
            await self._told.wait_for(lambda: self._mark >= end)
        return Health.of([s for s in self.samples if start <= s.due < end])

    async def over(self, seconds: float) -> Health:
        """Of the next seconds."""
        start = time.monotonic()
        await asyncio.sleep(seconds)
        return await self.between(start, time.monotonic())


@asynccontextmanager
async def load(site: Site) -> AsyncIterator[Load]:
    """A healthy client that uses the node until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *FIRST, sys.executable, "-m", "tests.hostile.healthy", cwd=ROOT, limit=1 << 20,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=(site.folder / "healthy.log").open("ab"),
    )  # fmt: skip
    leash.hold(process.pid)
    go_first(process.pid)
    assert process.stdin is not None
    process.stdin.write(json.dumps(_told(site)).encode() + b"\n")
    made = Load(process)
    hearing = asyncio.create_task(made.hear())
    try:
        yield made
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(TOLD_S_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
        hearing.cancel()


def _told(site: Site) -> dict[str, Any]:
    secure = "s" if site.profile.tls else ""
    return {
        "topic": JOBS, "key": site.keys.get("healthy"), "ca": str(site.ca) if site.ca else None,
        "native": site.url, "http": f"http{secure}://{site.authority}",
        "grpc": f"{HOST}:{site.ports['grpc']}",
    }  # fmt: skip
