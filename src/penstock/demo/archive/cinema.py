"""Everything that runs in the second act, under one folder, and the eyes that watch it."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.demo.archive import films
from penstock.demo.archive.pipeline import EDITS, STILLS, PipelineProcess, Scale
from penstock.demo.archive.watch import Prober, Vector, WriteTimes, look
from penstock.demo.chapters import Screen
from penstock.demo.picture.samples import Event, Recording, Sample
from penstock.testing.process import ServerProcess, penstock_program

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.sinks.cache import CacheSink
    from penstock.testing.redis import RedisProcess

LOOK_EVERY_S: Final = 0.5


@dataclass(kw_only=True)
class Cinema:
    """A node, a Redis server, a pipeline and a client, with what was seen of them."""

    server: ServerProcess
    redis: RedisProcess
    pipeline: PipelineProcess
    client: Client
    screen: Screen
    cache: CacheSink
    recording: Recording = field(default_factory=Recording)
    doing: str = "Spark is starting"
    began: float = field(default_factory=time.monotonic)
    writes: dict[str, WriteTimes] = field(
        default_factory=lambda: {EDITS: WriteTimes(), STILLS: WriteTimes()}
    )

    def __post_init__(self) -> None:
        self.prober = Prober(self._revisions, clock=self.now)
        self.recording.probes = self.prober.seen

    def now(self) -> float:
        return time.monotonic() - self.began

    @property
    def index_path(self) -> Path:
        return self.pipeline.folder / "index"

    @property
    def status(self) -> dict[str, Any]:
        return self.pipeline.status() or {"sinks": [], "partitions": []}

    @property
    def newest(self) -> Sample:
        return self.recording.samples[-1]

    def wrote(self, topic: str, count: int) -> None:
        """The log has acknowledged some deltas."""
        self.writes[topic].add(count, at=self.now())

    @property
    def written(self) -> int:
        return sum(times.written for times in self.writes.values())

    def mark(self, text: str) -> None:
        """An event of the picture."""
        self.recording.events.append(Event(self.now(), text))
        self.screen.say(f"{self.now():.0f} s: {text}")

    async def until(self, holds: Callable[[], bool], *, within_s: float, what: str) -> bool:
        """Wait until something is so; False if it is not so within the time."""
        self.doing = what
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_EVERY_S / 5)
        return True

    def in_step(self) -> bool:
        """Whether every sink shows everything that was written. A look that was taken before the
        last write knows nothing of it."""
        newest = self.newest
        known = bool(newest.sinks) and newest.written == self.written
        return known and all(sink.lag_s == 0.0 for sink in newest.sinks)

    async def watch(self) -> None:
        """Look at the pipeline twice a second, for as long as it runs."""
        while True:
            self.pipeline.check()
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Something else is on the screen inside the block; it is watched all the same."""
        doing, self.doing = self.doing, ""
        yield
        self.doing = doing

    def look(self) -> None:
        sample = look(self.pipeline.status(), self.writes, at=self.now())
        self.recording.samples.append(sample)
        if not self.doing:
            return
        lags = "  ".join(f"{sink.name} {sink.lag_s:.1f} s" for sink in sample.sinks)
        counts = f"{sample.released:,} of {sample.written:,} in order".replace(",", "\u202f")
        self.screen.progress(f"{self.now():.0f} s: {self.doing} · {counts} · {lags}")

    def _revisions(self, vectors: Sequence[Vector]) -> list[int]:
        found: dict[Vector, int] = {}
        for namespace in {namespace for namespace, _ in vectors}:
            names = [name for space, name in vectors if space == namespace]
            for name, held in zip(
                names, self.cache.get_many(names, namespace=namespace), strict=True
            ):
                found[namespace, name] = 0 if held is None else held.revision
        return [found[vector] for vector in vectors]

    def commands(self) -> list[str]:
        """What somebody who stays may want to type."""
        config, url = self.pipeline.config, self.server.url
        program = penstock_program()
        like = f"--namespace {films.FILMS} --like {shlex.quote(films.MISFILED)}"
        return [
            f"{program} pipeline status --config {config}",
            f"{program} pipeline audit --config {config}",
            f"{program} pipeline search --config {config} {like}",
            f"{program} --url {url} deltas tail {EDITS}",
            f"touch {self.pipeline.outage}    # the shop fails until you remove it",
        ]


@asynccontextmanager
async def cinema(
    folder: Path, server: ServerProcess, screen: Screen, scale: Scale
) -> AsyncIterator[Cinema]:
    """Start the stage; whatever happens, nothing of it outlives the block."""
    import penstock
    from penstock.sinks.cache import CacheSink
    from penstock.testing.redis import RedisProcess

    async with AsyncExitStack() as stack:
        redis = RedisProcess(folder / "redis")
        await asyncio.to_thread(redis.start)
        stack.callback(redis.kill)
        client = await stack.enter_async_context(penstock.connect(server.url))
        pipeline = PipelineProcess(folder=folder)
        pipeline.configure(
            url=server.url, redis=redis.url, rows_per_trigger=scale.rows_per_trigger,
            slow_rows_per_s=scale.slow_rows_per_s,
        )  # fmt: skip
        stack.push_async_callback(pipeline.kill)
        cache = CacheSink("eyes", url=redis.url)
        await asyncio.to_thread(cache.open)
        stack.callback(cache.close)
        yield Cinema(
            server=server, redis=redis, pipeline=pipeline, client=client, screen=screen, cache=cache
        )


@asynccontextmanager
async def watched(house: Cinema) -> AsyncIterator[None]:
    """Samples and probes are taken inside the block; a pipeline that ends there is an error."""
    try:
        async with asyncio.TaskGroup() as group:
            eyes = [group.create_task(house.watch()), group.create_task(house.prober.run())]
            yield
            for eye in eyes:
                eye.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
