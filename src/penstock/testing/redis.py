"""A real Redis server in a process of its own, for tests, demonstrations and measurements.

The program is `redis-server` or `valkey-server` from the PATH, else the one that `make` has put
into the virtual environment.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.errors import FailedPrecondition, Unavailable
from penstock.testing import leash

START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 10.0
POLL_S: Final = 0.02


def redis_program() -> str:
    """The server's program, or an error that says how to get one."""
    fetched = str(Path(sys.prefix) / "redis")
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name) or shutil.which(name, path=fetched)
        if found is not None:
            return found
    raise FailedPrecondition(
        "no redis-server on the PATH; install it, on Debian by: apt-get install redis-server"
    )


class RedisProcess:
    """One server on loopback; `start` again after `kill` finds what was synced to its folder."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start on a free port, or on the port of last time, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or _free_port()
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    redis_program(), "--bind", "127.0.0.1", "--port", str(self.port),
                    "--dir", str(self.folder), "--save", "", "--daemonize", "no",
                    "--appendonly", "yes" if self.durable else "no", "--appendfsync", "always",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        leash.hold(self.pid)
        deadline = time.monotonic() + START_S_MAX
        while not _answers(self.port):
            code = self._process.poll()
            if code is not None:
                raise Unavailable(f"the Redis server ended with {code}, see {self.folder}")
            if time.monotonic() > deadline:
                self.kill()
                raise Unavailable(f"the Redis server did not answer within {START_S_MAX:.0f} s")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def redis_process(folder: Path, *, durable: bool = True) -> Iterator[RedisProcess]:
    """A started server; whatever happens, it does not outlive the block."""
    server = RedisProcess(folder, durable=durable)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    """Whether a server there answers PING; one that is still loading its data says so instead."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
