"""What the tests with Spark share: one session, and real nodes on TCP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyspark
import pytest
from pyspark.sql import SparkSession

from penstock import sync
from penstock.config import Config
from penstock.node.lifecycle import running_engine
from penstock.node.session.session import listen, port_of
from penstock.spark.session import java_home, spark_session
from penstock.spark.source.access import NodeAccess

# For a JVM that does not live long: less compiling halves what its start costs.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SPARK_HOME = Path(pyspark.__file__).parent
RUN_S = 240


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one session of a test run; starting it takes some ten seconds."""
    folder = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    }
    session = spark_session("penstock-tests", cores=2, conf=conf)
    yield session
    session.stop()


class RunningNode:
    """A node with a native listener, on a loop in a thread of its own."""

    def __init__(self, folder: Path, *, config: Config | None = None) -> None:
        config = config or Config(data=folder, drain_s=5.0)
        self._config = msgspec.structs.replace(config, data=folder)
        self._started: threading.Event
        self._thread: threading.Thread | None = None
        self._port = 0
        self.start()
        self.client = sync.connect(self.url).__enter__()

    @property
    def url(self) -> str:
        return f"penstock://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Serve; after a `stop` on the same port and folder again."""
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="node")
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with running_engine(self._config) as engine:
                server = await listen(engine, host="127.0.0.1", port=self._port, tls=None)
                self._port = port_of(server)
                self._started.set()
                await self._stop.wait()
                server.close()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._started.set()

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.client.__exit__(None, None, None)
        self.stop()

    def access(self) -> NodeAccess:
        return NodeAccess.shared(self.url)

    def topic(self, name: str, payloads: list[bytes], **config: Any) -> Any:
        """A topic with these messages, in this order if it has one partition."""
        topic = self.client.topic(name, **config)
        topic.put_many(payloads)
        return topic


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    """A node of the test's own."""
    running = RunningNode(tmp_path / "node")
    yield running
    NodeAccess.close_shared()
    running.close()


def run_spark(*command: str, node: RunningNode, folder: Path | None = None) -> str:
    """What a program with a Spark of its own prints, which has to end well."""
    environment = os.environ | {
        "JAVA_HOME": str(java_home(os.environ)),
        "PENSTOCK_URL": node.url,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(SPARK_HOME),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
