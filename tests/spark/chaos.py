"""A pipeline under load whose driver, node or Redis is killed again and again, then audited.

Each of them is a process of its own, and dies by `kill -9` at a random moment while deltas are
being put (a seeded corpus with duplicates, late parents and concurrent writers). Afterwards the
pipeline runs to the end of the log, and `penstock pipeline audit` compares lake, index and cache
with it. `test_chaos.py` does this a few times; `scripts/pipeline_chaos.py` as often as one likes.

On a Spark cluster the machines share nothing but an S3 store, executors die too, and a driver falls
asleep and wakes up when another has long taken over: a zombie. The index has shards, and a user's
transform before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.s3 import make_bucket, s3_server
from tests.spark.clusters import executors, standalone

from penstock.demo.corpus import Corpus, CorpusOptions, generate
from penstock.errors import PenstockError
from penstock.spark.fold.state import ChangeLog
from penstock.spark.store import StoreAddress
from penstock.testing.process import ServerProcess, clean_environment
from penstock.testing.redis import RedisProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TOPIC = "vectors"
PARTITIONS = 3
CHUNK = 500
TARGETS = ("driver", "node", "redis")
ON_CLUSTER = (*TARGETS, "executor", "zombie")
ROOT = Path(__file__).parents[2]
START_S_MAX = 300.0
FINISH_S_MAX = 600.0
POLL_S = 0.1
CONFIG = """\
name = "chaos"
url = "{url}"
topics = ["{topic}"]
state = "{place}/state"
storage = {storage}
{where}
trigger_interval_s = 0.2
rows_per_trigger = {{ min = 500, max = 20000, initial = 5000 }}
snapshot_deltas = 5000
drain_s = 300.0

[delivery]
backoff_s_cap = 1.0
breaker_open_s = 1.0

[spark]
{spark}

[[sink]]
kind = "lake"
path = "{place}/lake"
storage_options = {storage}

[[sink]]
kind = "index"
path = "{place}/index"
storage_options = {storage}
{index}

[[sink]]
kind = "cache"
url = "{redis}"
"""


JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def doubled(states: DataFrame) -> DataFrame:
    """A transform whose outcome is exact in floats."""
    return states.selectExpr(
        *(name for name in states.columns if name != "vector"),
        "transform(vector, x -> cast(x * 2 as float)) as vector",
    )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where a pipeline runs, and where it keeps everything."""

    place: str
    storage: dict[str, str] = field(default_factory=dict)
    cluster: Path | None = None  # the folder of a Spark cluster's processes
    master: str = ""

    def config(self, **more: str) -> str:
        storage = "{" + ", ".join(f'{name} = "{text}"' for name, text in self.storage.items()) + "}"
        spark, where, index = {"spark.driver.extraJavaOptions": JAVA}, "cores = 2", ""
        if self.cluster is not None:
            where = f'master = "{self.master}"'
            index = 'shards = 2\ntransform = "tests.spark.chaos:doubled"'
            spark |= {
                "spark.executor.extraJavaOptions": JAVA,
                "spark.executor.memory": "512m",
                "spark.cores.max": "8",  # a second driver gets as many
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.pyspark.python": sys.executable,
            }
        lines = "\n".join(f'"{name}" = "{value}"' for name, value in spark.items())
        told = {"place": self.place, "storage": storage, "spark": lines}
        return CONFIG.format(**told, where=where, index=index, **more)


@dataclass
class Driver:
    """`penstock pipeline run` in a process group of its own: Python, the JVM and its workers."""

    folder: Path
    store: StoreAddress
    process: asyncio.subprocess.Process | None = None

    @property
    def config(self) -> Path:
        return self.folder / "pipeline.toml"

    async def start(self) -> None:
        self.process = await self._spawn("run", "--config", str(self.config))

    async def run_to_end(self) -> None:
        """What is in the log now, into every sink."""
        process = await self._spawn("run", "--config", str(self.config), "--available-now")
        async with asyncio.timeout(FINISH_S_MAX):
            code = await process.wait()
        assert code == 0, f"the pipeline ended with {code}:\n{self.last_words()}"

    async def audit(self) -> dict[str, Any]:
        process = await self._spawn(
            "audit", "--config", str(self.config), "--json", stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(FINISH_S_MAX):
            out, _ = await process.communicate()
        assert out, f"the audit said nothing:\n{self.last_words()}"
        document: dict[str, Any] = json.loads(out)
        return document

    async def _spawn(self, *arguments: str, stdout: int | None = None) -> Any:
        with (self.folder / "driver.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock.cli", "pipeline", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=stdout or log, stderr=log,
                env=clean_environment() | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
            )  # fmt: skip

    async def kill(self, *, alone: bool = False) -> None:
        """`kill -9` of the Python process `alone`, or of it and its JVM and workers at once."""
        process, self.process = self.process, None
        if process is None:
            return
        send: Callable[[int, int], None] = os.kill if alone else os.killpg
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, signal.SIGKILL)
        await process.wait()

    async def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(FINISH_S_MAX):
                await process.wait()

    def triggers(self) -> int:
        """Triggers that are committed."""
        last = ChangeLog(self.store.open()).last
        return 0 if last is None else last + 1

    async def past(self, trigger: int) -> None:
        async with asyncio.timeout(START_S_MAX):
            while self.triggers() <= trigger:
                process = self.process
                assert process is not None and process.returncode is None, self.last_words()
                await asyncio.sleep(0.1)

    async def reading(self) -> None:
        """Wait for its first trigger: it does not start while the node is away."""
        async with asyncio.timeout(START_S_MAX):
            while not self.triggers():
                assert self.process is not None and self.process.returncode is None, (
                    self.last_words()
                )
                await asyncio.sleep(0.05)

    def last_words(self) -> str:
        lines = (self.folder / "driver.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-30:])


@dataclass
class Scene:
    """Everything that can be killed, and the load that goes on meanwhile."""

    folder: Path
    stage: Stage
    corpus: Corpus
    dice: random.Random
    say: Callable[[str], None]
    server: ServerProcess = field(init=False)
    redis: RedisProcess = field(init=False)
    driver: Driver = field(init=False)
    put: int = 0  # rows that the node has acknowledged

    def __post_init__(self) -> None:
        self.server = ServerProcess(data=self.folder / "data")
        self.redis = RedisProcess(self.folder / "redis")
        store = StoreAddress(url=f"{self.stage.place}/state", options=self.stage.storage)
        self.driver = Driver(self.folder, store)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.server.start()
        await asyncio.to_thread(self.redis.start)
        config = self.stage.config(url=self.server.url, topic=TOPIC, redis=self.redis.url)
        self.driver.config.write_text(config)
        try:
            yield
        finally:
            await self.driver.kill()
            await asyncio.to_thread(self.redis.kill)
            await self.server.kill()

    async def load(self, *, seconds: float) -> None:
        """The whole corpus, evenly over `seconds`; what was not answered is sent again."""
        from penstock.spark.source.access import NodeAccess, NodeTopicWriter
        from verification.determinism import items_of

        access = NodeAccess(self.server.url)
        writer = NodeTopicWriter(lambda: access)
        pause = seconds / max(1, len(self.corpus) // CHUNK)
        try:
            for chunk in self.corpus.chunks(CHUNK):
                items = items_of(chunk, first=self.put + 1)
                while True:
                    try:
                        await asyncio.to_thread(
                            writer.append, TOPIC, producer="corpus", epoch=1, items=items,
                            partition=0,
                        )  # fmt: skip
                        break
                    except PenstockError as error:
                        if not error.retryable:
                            raise
                        await asyncio.sleep(0.2)
                self.put += len(chunk)
                await self.driver.reading()
                await asyncio.sleep(pause)
        finally:
            await asyncio.to_thread(access.close)

    async def kill(self, target: str) -> None:
        """Kill it at a random moment, and start it again."""
        if target == "driver":
            await self._kill_driver()
        elif target == "zombie":
            await self._put_to_sleep()
        elif target == "executor":
            await asyncio.sleep(self.dice.uniform(0.5, 4.0))
            await self._kill_executor()
        elif target == "node":
            await asyncio.sleep(self.dice.uniform(0.5, 4.0))
            await self.server.kill()
            await asyncio.sleep(self.dice.uniform(0.0, 1.0))
            await self.server.start()
        else:
            await asyncio.sleep(self.dice.uniform(0.5, 4.0))
            await asyncio.to_thread(self.redis.kill)
            await asyncio.sleep(self.dice.uniform(0.0, 2.0))
            await asyncio.to_thread(self.redis.start)
        self.say(f"{target} killed and started: {self.put} rows put, {self.driver.triggers()} done")

    async def _kill_executor(self) -> None:
        """Kill one of them; a driver that was just started may have been granted none yet."""
        assert self.stage.cluster is not None, "executors are processes of a cluster"
        async with asyncio.timeout(FINISH_S_MAX):
            while not (running := executors(self.stage.cluster)):
                await asyncio.sleep(POLL_S)
        os.kill(self.dice.choice(running), signal.SIGKILL)

    async def _put_to_sleep(self) -> None:
        """Another driver takes over while this one sleeps; it ends by itself once it wakes up."""
        zombie = self.driver.process
        assert zombie is not None, "a driver runs"
        os.killpg(zombie.pid, signal.SIGSTOP)
        await self.driver.start()
        await self.driver.past(self.driver.triggers() + 1)
        os.killpg(zombie.pid, signal.SIGCONT)
        async with asyncio.timeout(FINISH_S_MAX):
            assert await zombie.wait() != 0, self.driver.last_words()

    async def _kill_driver(self) -> None:
        """Half of the time after a trigger or two, so that there is progress; else whenever."""
        wanted = self.driver.triggers() + self.dice.choice((0, 1, 2))
        async with asyncio.timeout(START_S_MAX):
            while self.driver.triggers() < wanted and self.put < len(self.corpus):
                process = self.driver.process
                assert process is not None and process.returncode is None, self.driver.last_words()
                await asyncio.sleep(0.05)
        await asyncio.sleep(self.dice.uniform(0.0, 3.0))
        await self.driver.kill(alone=self.dice.random() < 0.5)
        await self.driver.start()


async def play(
    folder: Path,
    *,
    kills: list[str],
    rows: int,
    seconds: float,
    seed: int,
    stage: Stage | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Kill what `kills` names, one after the other, under load; the audit's document."""
    corpus = generate(
        CorpusOptions(
            deltas=rows, vectors=max(10, rows // 20), dimensions=16, components=4, duplicates=0.05,
            disorder=0.2, concurrent=0.1, window=200, seed=seed,
        )
    )  # fmt: skip
    scene = Scene(folder, stage or Stage(place=str(folder)), corpus, random.Random(seed), say)
    async with scene.running():
        await _create_topic(scene.server.url, corpus.options.dimensions)
        await scene.driver.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.load(seconds=seconds))
            await scene.driver.reading()
            for target in kills:
                await scene.kill(target)
        await scene.driver.stop()
        await scene.driver.run_to_end()
        document = await scene.driver.audit()
    document["put"] = scene.put
    document["triggers"] = scene.driver.triggers()
    return document


@contextlib.contextmanager
def on_cluster(folder: Path) -> Iterator[Stage]:
    """A standalone cluster whose two workers share an S3 server with the driver, and no folder."""
    cluster = folder / "cluster"
    with s3_server() as options, standalone(cluster, cores=8, memory="1200m") as master:
        place = f"s3://{make_bucket(options)}/chaos"
        yield Stage(place=place, storage=options, cluster=cluster, master=master)


async def _create_topic(url: str, dimensions: int) -> None:
    import penstock

    async with penstock.connect(url) as client:
        await client.deltas(
            TOPIC, dimensions=dimensions, create=True, partitions=PARTITIONS
        ).opened()
