"""The vectors and changes that the pipeline's stages work on.

Every vector is created once; then come sparse changes of ten components at random vectors, by one
writer, in order: the shape that most deltas of an embedding store have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.testing.process import ServerProcess, server_process

if TYPE_CHECKING:
    from penstock.client.deltas import Deltas

TOPIC: Final = "bench-vectors"
DIMENSIONS: Final = 128
COMPONENTS: Final = 10
PARTITIONS: Final = 4
CHUNK: Final = 10_000  # deltas in one request of the filling
PROBE: Final = "probe"  # vectors that only the freshness stage touches begin so
TICK_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Load:
    """A node whose topic holds `vectors` creations and `deltas` changes behind them."""

    server: ServerProcess
    vectors: int
    deltas: int

    @property
    def url(self) -> str:
        return self.server.url


@asynccontextmanager
async def loaded_server(folder: Path, *, vectors: int, deltas: int) -> AsyncIterator[Load]:
    async with server_process(folder / "data") as server:
        await _fill(server.url, vectors=vectors, deltas=deltas)
        yield Load(server=server, vectors=vectors, deltas=deltas)


async def _fill(url: str, *, vectors: int, deltas: int) -> None:
    import penstock

    rng = np.random.default_rng(11)
    async with penstock.connect(url) as client:
        topic = client.deltas(TOPIC, dimensions=DIMENSIONS, create=True, partitions=PARTITIONS)
        ids = vector_ids(vectors)
        for first in range(0, vectors, CHUNK):
            chunk = ids[first : first + CHUNK]
            values = rng.standard_normal((len(chunk), DIMENSIONS), dtype=np.float32)
            await topic.put_columns(chunk, values)
        for first in range(0, deltas, CHUNK):
            await _change(topic, ids, min(CHUNK, deltas - first), rng)


async def _change(topic: Deltas, ids: list[str], count: int, rng: np.random.Generator) -> None:
    chosen = rng.integers(0, len(ids), count)
    values = rng.standard_normal((count, COMPONENTS), dtype=np.float32)
    await topic.put_columns([ids[i] for i in chosen], values, indices=components(rng, count))


def components(rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
    """Ten different components per row, ascending: one out of each of ten equal stretches."""
    stretch = DIMENSIONS // COMPONENTS
    inside = rng.integers(0, stretch, (count, COMPONENTS))
    return (inside + np.arange(COMPONENTS) * stretch).astype(np.uint16)


def vector_ids(count: int) -> list[str]:
    return [f"v{number:07d}" for number in range(count)]


async def steady_changes(load: Load, *, per_s: int, stop: asyncio.Event) -> int:
    """Changes at a fixed rate, on schedule whatever the node does; how many were put."""
    import penstock

    rng, ids, put = np.random.default_rng(12), vector_ids(load.vectors), 0
    async with penstock.connect(load.url) as client:
        topic = client.deltas(TOPIC)
        start = time.perf_counter()
        while not stop.is_set():
            await _change(topic, ids, round(per_s * TICK_S), rng)
            put += round(per_s * TICK_S)
            await asyncio.sleep(max(0.0, start + put / per_s - time.perf_counter()))
    return put


def pipeline_settings(load: Load, folder: Path, *, sinks: list[dict[str, Any]], **more: Any) -> Any:
    """Settings of a pipeline over the load, with everything it keeps under `folder`."""
    from penstock.spark.settings import PipelineSettings

    return PipelineSettings.of(
        {
            "name": "bench",
            "url": load.url,
            "topics": [TOPIC],
            "state": str(folder / "state"),
            "sink": sinks,
            **more,
        }
    )
