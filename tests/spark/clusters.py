"""A Spark cluster of the standalone kind: a master and two workers on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
from tests.spark.conftest import JAVA_OPTIONS

from penstock.spark.session import java_home

START_S = 300.0
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def executors(cluster: Path) -> list[int]:
    """Process ids of the executors that run in the workers' folders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
                here = str(entry.joinpath("cwd").readlink()).startswith(str(cluster))
                if here and b"CoarseGrainedExecutorBackend" in command:
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked
    return found


@contextmanager
def standalone(
    folder: Path, *, workers: int = 2, cores: int = 1, memory: str = "600m", web: int | None = None
) -> Iterator[str]:
    """The url of a running cluster; each worker has so many cores to give away. The master's page
    is at the port `web`."""
    port, web = free_port(), web or free_port()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        named = ["--host", "127.0.0.1"]
        master = [MASTER, *named, "--port", str(port), "--webui-port", str(web)]
        stack.enter_context(_process(folder / "master", master))
        for number in range(workers):
            home = folder / f"worker-{number}"
            size = ["--cores", str(cores), "--memory", memory, "--webui-port", "0", "-d", str(home)]
            stack.enter_context(_process(home, [WORKER, *named, *size, url]))
        _wait(f"http://127.0.0.1:{web}/json/", workers)
        yield url


@contextmanager
def _process(folder: Path, command: list[str]) -> Iterator[None]:
    folder.mkdir(parents=True)
    home = Path(pyspark.__file__).parent
    environ = os.environ | {
        "JAVA_HOME": str(java_home(os.environ)),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
        "SPARK_LOCAL_DIRS": str(folder / "local"),
    }
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            [home / "bin" / "spark-class", *command], env=environ, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _wait(address: str, workers: int) -> None:
    """Until the master knows its workers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                if json.load(answer)["aliveworkers"] == workers:
                    return
        except (OSError, json.JSONDecodeError):
            pass  # the master is not up yet, or shows its page wherever one asks
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {workers} workers at {address}")
        time.sleep(0.2)
