"""Servers in processes of their own, for tests, demo and benchmark to use and kill.

A `ServerProcess` is a real `penstock serve`. Its first start takes any free ports; a restart takes
the same ones, so that clients find it again. A `ProgramProcess` is somebody else's server.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from penstock.errors import Unavailable
from penstock.testing import leash

START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 20.0
POLL_S: Final = 0.01
PORTS: Final = range(20_000, 32_000)  # below the ephemeral ones, which any client may be given
PORT_TRIES: Final = 100
STDERR_LINES_SHOWN: Final = 12
LISTENERS: Final = ("native", "grpc", "http")


class ChildProcess:
    """A program in a process that does not outlive ours. It may be started again after it ended."""

    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs, or before its first start."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self.code is None

    def launch(self, command: list[str], **how: Any) -> None:
        """Start it; `how` is what `Popen` takes."""
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **how)
        leash.hold(self.pid)

    def pause(self) -> None:
        """Keep its connections, answer nothing: from when this returns."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            while self.running and not _is_stopped(self.pid):
                time.sleep(POLL_S)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def end(self, number: signal.Signals) -> int:
        """Send a signal that ends it, by force if it does not; its exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        self.resume()  # a paused one would never hear it
        try:
            return self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class ProgramProcess(ChildProcess, ABC):
    """One server with its data and its log in a folder."""

    what: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def answers(self) -> bool: ...

    def start(self, *, wait: bool = True) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.what}.log").open("ab") as log:
            self.launch(self.command(), stdout=log, stderr=log)
        if wait:
            self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        while not self.answers():
            if self.code is not None:
                log = self.folder / f"{self.what}.log"
                raise Unavailable(f"{self.what} ended with {self.code}, see {log}")
            if time.monotonic() > deadline:
                self.kill()
                raise Unavailable(f"{self.what} did not answer within {START_S_MAX:.0f} s")
            time.sleep(POLL_S)

    def stop(self) -> None:
        self.end(signal.SIGTERM)

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exited: object) -> None:
        self.kill()


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORTS, PORT_TRIES):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise Unavailable(f"no {count} free ports in {PORTS.start} to {PORTS.stop}")


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process have been stopped by a signal."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


@dataclass(kw_only=True)
class ServerProcess(ChildProcess):
    """One node's process; `start` again after `kill` or `stop`."""

    data: Path
    options: dict[str, Any] = field(default_factory=dict)  # config paths, as `--set` takes them
    ports: dict[str, int] = field(default_factory=dict)  # -1: that listener is off
    arguments: list[str] = field(default_factory=list)  # further ones of `serve`
    environment: dict[str, str] = field(default_factory=dict)  # besides ours, without PENSTOCK_*
    prefix: list[str] = field(default_factory=list)  # what runs the command, as `ip netns exec x`
    host: str = "127.0.0.1"  # an address that the prefix's network has

    @property
    def url(self) -> str:
        return f"penstock://{self.host}:{self.ports['native']}"

    @property
    def grpc(self) -> str:
        return f"{self.host}:{self.ports['grpc']}"

    @property
    def http(self) -> str:
        return f"http://{self.host}:{self.ports['http']}"

    @property
    def log_path(self) -> Path:
        return self.data.parent / f"{self.data.name}.log"

    async def start(self) -> float:
        """Start, wait until it says that it serves, and return how long that took in seconds."""
        with tempfile.TemporaryDirectory(prefix="penstock-ready-") as folder:
            ready = Path(folder) / "ready.json"
            began = time.perf_counter()
            with self.log_path.open("ab") as log:
                self.launch(
                    self._arguments(ready),
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env=clean_environment() | self.environment,
                )
            await self._serving(ready)
            return time.perf_counter() - began

    def _arguments(self, ready: Path) -> list[str]:
        port = {name: str(self.ports.get(name, 0)) for name in LISTENERS}
        arguments = [
            *self.prefix, sys.executable, "-m", "penstock.cli", "serve", "--data", str(self.data),
            "--host", self.host, "--port", port["native"], "--grpc-port", port["grpc"],
            "--http-port", port["http"], "--ready-file", str(ready), *self.arguments,
        ]  # fmt: skip
        for name, value in self.options.items():
            arguments += ["--set", f"{name}={value}"]
        return arguments

    async def _serving(self, ready: Path) -> None:
        deadline = time.monotonic() + START_S_MAX
        while True:
            if self.code is not None:
                raise Unavailable(f"the server ended with {self.code}:\n{self.last_words()}")
            ports = _read_ports(ready)
            if ports is not None:
                self.ports |= ports
                return
            if time.monotonic() > deadline:
                await self.kill()
                raise Unavailable(f"the server was not ready after {START_S_MAX:.0f} s")
            await asyncio.sleep(POLL_S)

    def last_words(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-STDERR_LINES_SHOWN:])

    async def kill(self) -> None:
        """`kill -9`: no chance to flush, close or say goodbye."""
        await asyncio.to_thread(self.end, signal.SIGKILL)

    async def stop(self) -> int:
        return await asyncio.to_thread(self.end, signal.SIGTERM)

    async def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        while True:
            code = self.code
            if code is not None:
                return code
            await asyncio.sleep(POLL_S)

    def cpu_seconds(self) -> float:
        return sum(_stat(self.pid)[11:13]) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(row for row in status.splitlines() if row.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024


def _stat(pid: int) -> list[int]:
    """The numbers behind the state in `/proc/<pid>/stat`; the first is the parent's pid."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [0, *map(int, fields[1:])]


def tree_cpu_seconds(root: int) -> float:
    """CPU time of a process and all below it, those that have ended included."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found[int(entry.name)] = _stat(int(entry.name))
            except OSError:
                continue  # it ended while we looked, and its parent has its time
    family = {root}
    while more := {pid for pid, stat in found.items() if stat[1] in family} - family:
        family |= more
    return sum(sum(found[pid][11:15]) for pid in family) / os.sysconf("SC_CLK_TCK")


def _read_ports(ready: Path) -> dict[str, int] | None:
    """The ports that a node has announced; None while it has not, or is writing them."""
    try:
        found = json.loads(ready.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return {name: found[name] for name in LISTENERS if name in found}


def clean_environment() -> dict[str, str]:
    """Ours without Penstock's own settings, which are meant for another server."""
    return {name: v for name, v in os.environ.items() if not name.startswith("PENSTOCK_")}


def penstock_program() -> str:
    """What to type to run `penstock` here: the environment need not be activated."""
    return "penstock" if shutil.which("penstock") else str(Path(sys.executable).parent / "penstock")


@asynccontextmanager
async def server_process(
    data: Path, *, options: dict[str, Any] | None = None
) -> AsyncIterator[ServerProcess]:
    server = ServerProcess(data=data, options=options or {})
    try:
        await server.start()
        yield server
    finally:
        await server.kill()
