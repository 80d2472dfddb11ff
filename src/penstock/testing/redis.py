"""A real Redis server in a process of its own, for tests, demonstrations and measurements.

The program is `redis-server` or `valkey-server` from the PATH, else the one that `make` has put
into the virtual environment.
"""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

from penstock.errors import FailedPrecondition
from penstock.testing.process import ProgramProcess, free_ports


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


class RedisProcess(ProgramProcess):
    """One server on loopback; `start` again after `kill` finds what was synced to its folder."""

    what = "redis"

    def __init__(self, folder: Path, *, durable: bool = True, cluster: bool = False) -> None:
        super().__init__(folder)
        self.durable, self.cluster = durable, cluster
        self.port, self.bus_port = free_ports(2)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        return [
            redis_program(), "--bind", "127.0.0.1", "--port", str(self.port),
            "--dir", str(self.folder), "--save", "", "--daemonize", "no",
            "--appendonly", "yes" if self.durable else "no", "--appendfsync", "always",
            "--cluster-enabled", "yes" if self.cluster else "no",
            "--cluster-port", str(self.bus_port),
        ]  # fmt: skip

    def answers(self) -> bool:
        """Whether it answers PING; one that is still loading its data says so instead."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False
