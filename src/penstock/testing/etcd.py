"""Real etcd servers in processes of their own, for tests, demonstrations and local clusters.

The program is `etcd` from the PATH. `etcd_process` starts one server, `etcd_group` several that
form a cluster; both listen on loopback only and do not outlive their block.
"""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import Unavailable
from penstock.testing.process import ProgramProcess, free_ports


def etcd_program() -> str:
    """The server's program, or an error that says how to get one."""
    found = shutil.which("etcd")
    if found is None:
        raise Unavailable(
            "no etcd on the PATH: install it (Debian: apt-get install etcd-server;"
            " others: https://github.com/etcd-io/etcd/releases), version 3.4.23 or from 3.5.6 on"
        )
    return found


class EtcdProcess(ProgramProcess):
    """One server. `start` again after `stop` or `kill` finds the same data on the same port."""

    what = "etcd"

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "etcd0",
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix` is what runs the command, as `ip netns exec x`; `host` an address there."""
        super().__init__(folder)
        self.name, self.host = name, host
        self._prefix = list(prefix)
        self.port, self.peer_port = free_ports(2)
        self.members = {name: self.peer_url}  # all of the cluster, for its first start

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.host}:{self.peer_port}"

    def command(self) -> list[str]:
        client_url = f"http://{self.endpoint}"
        return [
            *self._prefix, etcd_program(), "--name", self.name,
            "--data-dir", str(self.folder / "data"),
            "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
            "--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url,
            "--initial-cluster", ",".join(f"{n}={u}" for n, u in self.members.items()),
            "--logger", "zap", "--log-level", "warn",
        ]  # fmt: skip

    def answers(self) -> bool:
        """Whether it has a leader and can commit; a member of several can once a majority is up."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return b'"health":"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def etcd_process(folder: Path) -> Iterator[EtcdProcess]:
    with etcd_group(folder, count=1) as (server,):
        yield server


@contextmanager
def etcd_group(folder: Path, *, count: int = 3) -> Iterator[list[EtcdProcess]]:
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
