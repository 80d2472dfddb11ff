"""A node that keeps a cache of its own: a change is in Redis without a pipeline, and nothing is
lost while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client.delta.deltas import Deltas
from penstock.config import Config
from penstock.node.engine import Engine
from penstock.propagation.options import LiveOptions
from penstock.server.embedded import open_embedded
from penstock.server.serve import listen, port_of
from penstock.sinks.cache import CacheSink
from penstock.testing.redis import RedisProcess

PATIENCE = {
    "backoff_s_base": 0.001, "backoff_s_cap": 0.01, "breaker_failures": 3, "breaker_open_s": 0.05,
}  # fmt: skip
Values = tuple[float, ...] | None


class Site:
    def __init__(self, engine: Engine, deltas: Deltas, cache: CacheSink) -> None:
        self._engine, self.deltas, self._cache = engine, deltas, cache

    def cached(self, *names: str) -> list[Values]:
        found = self._cache.get_many(names)
        return [None if one is None else tuple(one.values.tolist()) for one in found]

    @property
    def _sinks(self) -> list[dict[str, Any]]:
        live = self._engine.topics["vectors"].live
        assert live is not None
        return [row for _, kind, row in live.rows(range(1024), "") if kind == "sinks"]

    @property
    def breaker(self) -> str:
        return str(self._sinks[0]["breaker"]["state"])

    @property
    def lag(self) -> int:
        """Entries that are committed and not known to be in Redis."""
        return sum(sink["position"] - sink["acknowledged"] for sink in self._sinks)

    async def caught_up(self, **wanted: Values) -> None:
        """Until Redis has these."""
        await until(lambda: self.cached(*wanted) == list(wanted.values()))

    def open_cache(self) -> None:
        """Connect anew, after Redis was away."""
        self._cache.open()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def site(tmp_path: Path, redis: RedisProcess) -> AsyncIterator[Site]:
    table = {"topic": "vectors", "kind": "cache", "url": redis.url, "batch_ms": 0, **PATIENCE}
    folder = tmp_path / "data"
    config = Config(data=folder, native_port=-1, drain_s=1.0, live=LiveOptions(sink=(table,)))
    node = await open_embedded(folder, config=config)
    server = await listen(node.engine, host="127.0.0.1", port=0, tls=None)
    cache = CacheSink("reader", url=redis.url)
    cache.open()
    with closing(cache):
        async with penstock.connect(f"penstock://127.0.0.1:{port_of(server)}") as client:
            deltas = client.deltas("vectors", dimensions=2, create=True, partitions=2)
            yield Site(node.engine, deltas, cache)
        server.close()
        await node.close()


async def test_a_change_is_in_redis(site: Site) -> None:
    await site.deltas.create("a", [1, 2])
    await site.caught_up(a=(1.0, 2.0))
    await site.deltas.set("a", {1: 5.0})
    await site.deltas.create("b", [3, 4])
    await site.caught_up(a=(1.0, 5.0), b=(3.0, 4.0))
    await site.deltas.delete("b")
    await site.caught_up(a=(1.0, 5.0), b=None)


async def test_it_catches_up_with_a_redis_that_was_away(site: Site, redis: RedisProcess) -> None:
    names = [f"v{number}" for number in range(60)]
    for name in names[:20]:
        await site.deltas.create(name, [1, 1])
    await site.caught_up(**dict.fromkeys(names[:20], (1.0, 1.0)))
    await asyncio.to_thread(redis.kill)
    for name in names[20:]:
        await site.deltas.create(name, [1, 1])
    for name in names[:40]:
        await site.deltas.set(name, {0: 2.0})
    await until(lambda: site.breaker == "open" and site.lag > 0)
    await site.deltas.set("v59", {1: 9.0})  # writers do not wait for a sink
    await asyncio.to_thread(redis.start)
    site.open_cache()
    wanted: dict[str, Values] = dict.fromkeys(names[:40], (2.0, 1.0))
    wanted |= dict.fromkeys(names[40:59], (1.0, 1.0))
    await site.caught_up(**wanted, v59=(1.0, 9.0))
    await until(lambda: site.breaker == "closed" and site.lag == 0)
