"""What the stages of the live path share: a node with a delta topic, sinks in it, and changes.

The changes are those of the pipeline's benchmark.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.bench.live.ticks import ticks
from penstock.bench.vectors import DIMENSIONS, change, create, vector_ids
from penstock.errors import Unavailable
from penstock.testing.process import ServerProcess

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.client.delta.deltas import Deltas

TOPIC: Final = "bench-live"
VECTORS: Final = 10_000
WAIT_S: Final = 120.0


class Offered(NamedTuple):
    """Changes that were put on schedule, and how many per second the node took: from the moment
    when the first was due until the last was acknowledged."""

    changes: int
    per_s: float


@dataclass(frozen=True, kw_only=True)
class LiveBench:
    """A node that serves, a client of it, and its delta topic."""

    server: ServerProcess
    client: Client
    deltas: Deltas
    ids: list[str]
    rng: np.random.Generator

    async def change(self, count: int) -> None:
        """Changes of random vectors, by one writer."""
        await change(self.deltas, self.ids, count, self.rng)

    async def status(self) -> dict[str, Any]:
        """The topic's part of `live_status`."""
        found = await self.client.call("live_status", topic=TOPIC)
        status: dict[str, Any] = found["topics"][0]
        return status

    async def subscribed(self) -> bool:
        return bool((await self.status())["subscriptions"])

    async def steady(self, *, per_s: int, tick_s: float, seconds: float) -> Offered:
        """Changes on schedule whatever the node does, some at each tick."""
        handful, count = max(1, round(per_s * tick_s)), round(seconds / tick_s)

        async def put(number: int, due: float) -> None:
            await self.change(handful)

        per_s_ticks = await on_schedule(put, tick_s=tick_s, count=count)
        return Offered(handful * count, handful * per_s_ticks)


async def on_schedule(
    put: Callable[[int, float], Coroutine[Any, Any, None]], *, tick_s: float, count: int
) -> float:
    """Have `put` done at each tick, whether or not those before it are answered: it is told the
    tick's number and when it was due. How many per second were begun and answered."""
    number, began = 0, 0.0
    async with asyncio.TaskGroup() as group:
        async for due in ticks(tick_s, count):
            began = began or due
            group.create_task(put(number, due))
            number += 1
    return count / (time.perf_counter() - began)


@asynccontextmanager
async def live_bench(
    folder: Path,
    *,
    sinks: tuple[dict[str, Any], ...] = (),
    options: dict[str, Any] | None = None,
) -> AsyncIterator[LiveBench]:
    """A node with one partition of vectors that all exist, and with these sinks and options."""
    import penstock

    config = _written(folder, sinks)
    server = ServerProcess(
        data=folder / "data", arguments=["--config", str(config)], options=options or {}
    )
    try:
        await server.start()
        async with penstock.connect(server.url) as client:
            deltas = client.deltas(TOPIC, dimensions=DIMENSIONS, create=True, partitions=1)
            ids, rng = vector_ids(VECTORS), np.random.default_rng(13)
            await create(deltas, ids, rng)
            yield LiveBench(server=server, client=client, deltas=deltas, ids=ids, rng=rng)
    finally:
        await server.kill()


def _written(folder: Path, sinks: tuple[dict[str, Any], ...]) -> Path:
    """The node's configuration, in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "penstock.toml"
    config.write_text("\n".join(_table({"topic": TOPIC, **sink}) for sink in sinks))
    return config


def _table(sink: dict[str, Any]) -> str:
    """A sink as the configuration has it; texts and numbers look alike in JSON and TOML."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in sink.items()]
    return "\n".join(["[[live.sink]]", *lines, ""])


async def until(condition: Any, what: str) -> Any:
    """The first true answer of `condition`, which is asked again and again."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if found := await condition():
            return found
        await asyncio.sleep(0.02)
    raise Unavailable(f"{what} did not happen within {WAIT_S:.0f} s")
