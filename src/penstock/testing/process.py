"""A real `penstock serve` in a process of its own, for tests, demo and benchmark to use and kill.

The first start takes any free ports; a restart takes the same ones, so that clients find it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.errors import Unavailable
from penstock.testing import leash

START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 20.0
POLL_S: Final = 0.01
STDERR_LINES_SHOWN: Final = 12
LISTENERS: Final = ("native", "grpc", "http")


@dataclass(kw_only=True)
class ServerProcess:
    """One node's process; `start` again after `kill` or `stop`."""

    data: Path
    options: dict[str, Any] = field(default_factory=dict)  # config paths, as `--set` takes them
    ports: dict[str, int] = field(default_factory=dict)  # -1: that listener is off
    arguments: list[str] = field(default_factory=list)  # further ones of `serve`
    environment: dict[str, str] = field(default_factory=dict)  # besides ours, without PENSTOCK_*
    prefix: list[str] = field(default_factory=list)  # what runs the command, as `ip netns exec x`
    host: str = "127.0.0.1"  # an address that the prefix's network has
    _process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

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
                self._process = await asyncio.create_subprocess_exec(
                    *self._arguments(ready),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=log,
                    env=clean_environment() | self.environment,
                )
            leash.hold(self.pid)
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
        assert self._process is not None
        deadline = time.monotonic() + START_S_MAX
        while True:
            if self._process.returncode is not None:
                code = self._process.returncode
                raise Unavailable(f"the server ended with {code}:\n{self.last_words()}")
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
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """SIGTERM; the process's exit code."""
        return await self._end(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        assert self._process is not None
        return await self._process.wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _end(self, number: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # a paused one would never hear it
            try:
                async with asyncio.timeout(STOP_S_MAX):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode

    def cpu_seconds(self) -> float:
        text = Path(f"/proc/{self.pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(row for row in status.splitlines() if row.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024


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
    """A started server; whatever happens, it does not outlive the block."""
    server = ServerProcess(data=data, options=options or {})
    try:
        await server.start()
        yield server
    finally:
        await server.kill()
