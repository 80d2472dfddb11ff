"""A real cluster on this machine: etcd and several `penstock serve`, each in its own process.

    async with cluster_processes(tmp_path, nodes=3) as cluster:
        async with penstock.connect(cluster.url) as client:
            await client.topic("jobs", of=str, partitions=6).put("hello")
            await cluster.kill("n1")
            ...
            await cluster.start("n1")

Nodes are called n1, n2, …; a node keeps its folder and its ports over restarts. Everything listens
on loopback, on ports that no client is given by chance, and nothing outlives the block. What the
processes log is in `<folder>/<node>.log` and `<folder>/etcd/etcd.log`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.client.network.connection import all_pages
from penstock.client.network.endpoints import open_connection
from penstock.errors import PenstockError, Unavailable
from penstock.testing.etcd import EtcdProcess
from penstock.testing.process import ServerProcess, free_ports

READY_S_MAX: Final = 120.0
POLL_S: Final = 0.05
CALL_S_MAX: Final = 5.0


class ClusterProcesses:
    """etcd and the nodes. A node may be changed (`options`, `environment`) before it is started."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        zones: Sequence[str] = (),
        name: str = "penstock",
        gateway: bool = False,
        key: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`zones` are dealt out in turn; `gateway`: gRPC and HTTP too; `key`: what the nodes show
        each other, without it everybody counts as one; `options` as `--set`."""
        self.folder, self.name = folder, name
        self.etcd = EtcdProcess(folder / "etcd")
        self.nodes: dict[str, ServerProcess] = {}
        self._zones = list(zones)
        self._gateway, self._key, self._options = gateway, key, dict(options or {})
        for _ in range(nodes):
            self.add()

    def add(self, zone: str | None = None) -> str:
        """One more node, not started yet; its name."""
        number = len(self.nodes)
        node = f"n{number + 1}"
        if zone is None and self._zones:
            zone = self._zones[number % len(self._zones)]
        arguments = ["--cluster", f"etcd://{self.etcd.endpoint}", "--node-id", node]
        if zone:
            arguments += ["--zone", zone]
        environment = self._bytecode()
        if self._key:  # arguments are seen in the list of processes
            environment["PENSTOCK_CLUSTER_KEY"] = self._key
        self.nodes[node] = ServerProcess(
            data=self.folder / node,
            options={"cluster.name": self.name, **self._options},
            ports={"grpc": -1, "http": -1} | self._ports(),
            arguments=arguments,
            environment=environment,
        )
        return node

    def _ports(self) -> dict[str, int]:
        """Of a node's listeners: ports that no other process of the cluster has."""
        listeners = ("native", "grpc", "http") if self._gateway else ("native",)
        taken = {port for other in self.nodes.values() for port in other.ports.values()}
        taken |= {self.etcd.port, self.etcd.peer_port}
        free = [port for port in free_ports(len(taken) + len(listeners)) if port not in taken]
        return dict(zip(listeners, free, strict=False))

    def _bytecode(self) -> dict[str, str]:
        """Where Python may not keep bytecode beside the source, keep it with the cluster: a node
        that is restarted often would compile everything each time."""
        if not sys.dont_write_bytecode:
            return {}
        return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode")}

    # --- where they are ---

    @property
    def url(self) -> str:
        """All nodes in one url, as a client takes it."""
        return "penstock://" + ",".join(self.endpoints())

    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{node.ports['native']}" for node in self.nodes.values()]

    def url_of(self, node: str) -> str:
        return self.nodes[node].url

    @property
    def running(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.running]

    # --- starting and ending ---

    async def start_all(self) -> None:
        """etcd, then every node at once; returns when they all see each other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self.etcd.start)
        async with asyncio.TaskGroup() as group:
            for name in self.nodes:
                group.create_task(self.start(name))
        await self.wait_ready()

    async def start(self, node: str) -> float:
        """Start one node and wait until it listens; how long that took in seconds."""
        return await self.nodes[node].start()

    async def stop(self, node: str) -> int:
        """SIGTERM: it hands its partitions over first. Its exit code."""
        return await self.nodes[node].stop()

    async def kill(self, node: str) -> None:
        await self.nodes[node].kill()

    async def restart(self, node: str) -> float:
        await self.stop(node)
        return await self.start(node)

    def pause(self, node: str) -> None:
        self.nodes[node].pause()

    def resume(self, node: str) -> None:
        self.nodes[node].resume()

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.kill()
        await asyncio.to_thread(self.etcd.kill)

    async def stop_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self.running:
                group.create_task(self.stop(name))
        await asyncio.to_thread(self.etcd.stop)

    # --- asking ---

    async def call(self, node: str, method: str, /, **arguments: Any) -> dict[str, Any]:
        async with asyncio.timeout(CALL_S_MAX):
            connection = await open_connection(self.url_of(node))
            try:
                return await connection.call(method, **arguments)
            finally:
                await connection.close()

    async def status_at(self, node: str) -> dict[str, Any]:
        return await all_pages(partial(self.call, node), "cluster_status", "partitions")

    async def status(self) -> dict[str, Any]:
        """`cluster_status` of the first node that answers."""
        failed: Exception = Unavailable("no node runs")
        for name in self.running:
            try:
                return await self.status_at(name)
            except (PenstockError, TimeoutError) as error:
                failed = error
        raise Unavailable(f"no node tells how the cluster is: {failed}") from failed

    async def wait_ready(self, within_s: float = READY_S_MAX) -> None:
        """Until every running node sees all of them alive, and every partition is served."""
        deadline = time.monotonic() + within_s
        while (missing := await self._missing()) is not None:
            if time.monotonic() > deadline:
                raise Unavailable(f"the cluster was not ready after {within_s:.0f} s: {missing}")
            await asyncio.sleep(POLL_S)

    async def _missing(self) -> str | None:
        running = set(self.running)
        for name in sorted(running):
            try:
                status = await self.status_at(name)
            except (PenstockError, TimeoutError) as error:
                return f"{name}: {error}"
            alive = {node["id"] for node in status["nodes"] if node["alive"] and node["reachable"]}
            if not running <= alive:
                return f"{name} does not see {', '.join(sorted(running - alive))}"
            idle = [p for p in status["partitions"] if p["state"] != "serving"]
            if idle:
                return f"{idle[0]['topic']}/{idle[0]['partition']} is {idle[0]['state']}"
        return None

    async def coordinators(self, topic: str) -> list[str]:
        found = (await self.status())["partitions"]
        return [part["coordinator"] for part in found if part["topic"] == topic]


@asynccontextmanager
async def cluster_processes(
    folder: Path, *, nodes: int = 3, **how: Any
) -> AsyncIterator[ClusterProcesses]:
    """A started cluster; whatever happens, no process of it outlives the block."""
    cluster = ClusterProcesses(folder, nodes=nodes, **how)
    try:
        await cluster.start_all()
        yield cluster
    finally:
        await cluster.close()
