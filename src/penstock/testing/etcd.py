"""Real etcd servers in processes of their own, for tests, demonstrations and local clusters.

The program is `etcd` from the PATH. `etcd_process` starts one server, `etcd_group` several that
form a cluster; both listen on loopback only and do not outlive their block.
"""

from __future__ import annotations

import http.client
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable
from penstock.testing import leash

START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 10.0
POLL_S: Final = 0.02
PORTS: Final = range(20_000, 32_000)  # below the ephemeral ones, which any client may be given
PORT_TRIES: Final = 100


def etcd_program() -> str:
    """The server's program, or an error that says how to get one."""
    found = shutil.which("etcd")
    if found is None:
        raise Unavailable(
            "no etcd on the PATH: install it (Debian: apt-get install etcd-server;"
            " others: https://github.com/etcd-io/etcd/releases), version 3.4.23 or from 3.5.6 on"
        )
    return found


class EtcdProcess:
    """One server. `start` again after `stop` or `kill` finds the same data on the same port."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "etcd0",
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix` is what runs the command, as `ip netns exec x`; `host` an address there."""
        self.folder, self.name, self.host = folder, name, host
        self._prefix = list(prefix)
        self.port, self.peer_port = free_ports(2)
        self.members = {name: self.peer_url}  # all of the cluster, for its first start
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.host}:{self.peer_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start, and wait until it answers; a member of several answers once a majority is up."""
        self.folder.mkdir(parents=True, exist_ok=True)
        client_url = f"http://{self.endpoint}"
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._prefix, etcd_program(), "--name", self.name,
                    "--data-dir", str(self.folder / "data"),
                    "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
                    "--listen-peer-urls", self.peer_url,
                    "--initial-advertise-peer-urls", self.peer_url,
                    "--initial-cluster", ",".join(f"{n}={u}" for n, u in self.members.items()),
                    "--logger", "zap", "--log-level", "warn",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        leash.hold(self.pid)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it is healthy: it has a leader and can commit."""
        deadline = time.monotonic() + START_S_MAX
        while not _healthy(self.host, self.port):
            code = self._process.poll() if self._process else None
            if code is not None:
                raise Unavailable(f"etcd ended with {code}, see {self.folder / 'etcd.log'}")
            if time.monotonic() > deadline:
                self.kill()
                raise Unavailable(f"etcd did not answer within {START_S_MAX:.0f} s")
            time.sleep(POLL_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Keep its connections, answer nothing: from when this returns."""
        self._signal(signal.SIGSTOP)
        process = self._process
        while process is not None and process.poll() is None and not _is_stopped(process.pid):
            time.sleep(POLL_S)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

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
def etcd_process(folder: Path) -> Iterator[EtcdProcess]:
    """A started server."""
    with etcd_group(folder, count=1) as (server,):
        yield server


@contextmanager
def etcd_group(folder: Path, *, count: int = 3) -> Iterator[list[EtcdProcess]]:
    """Started servers that form one cluster."""
    names = [f"etcd{number}" for number in range(count)]
    servers = [EtcdProcess(folder / name, name=name) for name in names]
    members = {server.name: server.peer_url for server in servers}
    try:
        for server in servers:
            server.members = members
            server.start(wait=False)
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
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


def _healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return b'"health":"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process have been stopped by a signal."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
