"""The cluster under test: etcd and nodes as real processes, each with a network and a disk.

A node that ends although nobody ended it is written down and started again. The fourth node is a
spare: it runs only while replicas are moved to it and back.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.chaos.disks import Disk, disks
from tests.chaos.network import Network, network

from penstock.client.network.endpoints import open_connection
from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.keys import KEYS, KeyRecord
from penstock.errors import PenstockError, Unavailable
from penstock.testing.cluster import CALL_S_MAX, ClusterProcesses
from penstock.testing.etcd import EtcdProcess
from penstock.testing.process import ServerProcess

NODES: Final = ("n1", "n2", "n3")
SPARE: Final = "n4"
ETCD: Final = "etcd"
PORT: Final = 7440
CLUSTER_KEY: Final = "chaos-0123456789abcdef0123456789abcdef"  # that the nodes show each other
SECRET: Final = "of all that call the nodes"
KEY: Final = f"pk_chaos_{SECRET}"  # that clients show
LOOK_S: Final = 0.5
START_TRIES: Final = 5
# Small segments and frequent snapshots, so that minutes see what usually takes days.
OPTIONS: Final[dict[str, Any]] = {
    "insecure": "true",
    "cluster.key": CLUSTER_KEY,
    "cluster.lease_s": 3,
    "log.segment_bytes": 1 << 20,
    "log.allocate_bytes": 128 << 10,
    "log.reserve_bytes": 64 << 10,
    "upkeep.snapshot_s": 5,
    "upkeep.retention_s": 5,
}


@dataclass(kw_only=True)
class NodeProcess(ServerProcess):
    """A node whose log is not on the disk that is broken."""

    logs: Path
    wanted: bool = False  # it should be running
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one fault of a process at a time

    @property
    def log_path(self) -> Path:
        return self.logs

    async def ended_within(self, within_s: float) -> int | None:
        """Its exit code, if it ends by itself in time."""
        try:
            async with asyncio.timeout(within_s):
                return await self.ended()
        except TimeoutError:
            return None

    def words(self) -> str:
        return self.last_words()


class Arena(ClusterProcesses):
    """Everything that faults work on."""

    nodes: dict[str, NodeProcess]  # type: ignore[assignment]

    def __init__(self, folder: Path, *, net: Network, disks: Mapping[str, Disk]) -> None:
        super().__init__(folder, nodes=0, options=OPTIONS)
        self.net, self.disks = net, dict(disks)
        self.etcd = EtcdProcess(folder / ETCD, host=net.address(ETCD), prefix=net.prefix(ETCD))
        self.etcd_lock = asyncio.Lock()
        self.exits: list[dict[str, Any]] = []  # of nodes that ended although nobody ended them
        for _ in disks:
            self.add()

    def add(self, zone: str | None = None) -> str:
        node = f"n{len(self.nodes) + 1}"
        self.nodes[node] = NodeProcess(
            data=self.disks[node].data,
            logs=self.folder / f"{node}.log",
            options={"cluster.name": self.name, **self._options},
            ports={"native": PORT, "grpc": -1, "http": -1},
            arguments=["--cluster", f"etcd://{self.etcd.endpoint}", "--node-id", node],
            prefix=self.net.prefix(node),
            host=self.net.address(node),
        )
        return node

    def endpoints(self) -> list[str]:
        return [f"{node.host}:{PORT}" for name, node in self.nodes.items() if name != SPARE]

    # --- starting and ending ---

    async def open(self) -> None:
        await asyncio.to_thread(self.etcd.start)
        await self._make_key()
        async with asyncio.TaskGroup() as tasks:
            for node in NODES:
                tasks.create_task(self.start(node))
        await self.wait_ready()

    async def _make_key(self) -> None:
        """The clients' key, before there is a node that could be asked for one."""
        digest = hashlib.sha256(SECRET.encode()).digest()
        record = KeyRecord(id="chaos", name="chaos", digest=digest, created_ms=0)
        store = EtcdStore([self.etcd.endpoint], prefix=cluster_prefix(self.name))
        try:
            await store.put(KEYS + record.id, msgspec.json.encode(record))
        finally:
            await store.close()

    async def start(self, node: str) -> float:
        """Start it if it does not run, more than once if need be: what it needs may be away."""
        process = self.nodes[node]
        if process.running:
            return 0.0
        for tries in range(1, START_TRIES + 1):
            try:
                took = await process.start()
            except Unavailable as error:
                self.exits.append({"node": node, "starting": True, "error": str(error)})
                if tries == START_TRIES:
                    raise
            else:
                process.wanted = True
                return took
        raise AssertionError("unreachable")

    async def kill(self, node: str) -> None:
        self.nodes[node].wanted = False
        await super().kill(node)

    async def stop(self, node: str) -> int:
        self.nodes[node].wanted = False
        return await super().stop(node)

    async def look_after(self) -> None:
        """Start what has ended by itself, outside of a fault; until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for name, process in self.nodes.items():
                if process.wanted and not process.running and not process.lock.locked():
                    async with process.lock:
                        self.exits.append(
                            {"node": name, "code": process.code, "error": process.words()}
                        )
                        await self.start(name)

    async def heal(self) -> None:
        """No cut, no full disk, nobody stopped; all three nodes and etcd run."""
        await asyncio.to_thread(self.net.mend_all)
        for disk in self.disks.values():
            await asyncio.to_thread(disk.free)
        self.etcd.resume()
        for node in NODES:
            self.resume(node)
            if not self.nodes[node].running:
                await self.start(node)

    # --- asking ---

    async def call(self, node: str, method: str, /, **arguments: Any) -> dict[str, Any]:
        async with asyncio.timeout(CALL_S_MAX):
            connection = await open_connection(self.url_of(node), api_key=KEY)
            try:
                return await connection.call(method, **arguments)
            finally:
                await connection.close()

    async def coordinator(self, dice_index: int) -> str:
        """A node that coordinates something now; any node if nobody knows."""
        try:
            found = {p["coordinator"] for p in (await self.status())["partitions"]}
        except (PenstockError, TimeoutError):
            found = set()
        names = [name for name in NODES if name in found] or list(NODES)
        return names[dice_index % len(names)]

    async def in_step(self, within_s: float) -> bool:
        """Whether every voter has all of its partitions, soon enough."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while loop.time() < deadline:
            if await self._in_step():
                return True
            await asyncio.sleep(0.3)
        return False

    async def _in_step(self) -> bool:
        try:
            partitions = (await self.status())["partitions"]
        except (PenstockError, TimeoutError):
            return False
        return all(
            part["state"] == "serving"
            and not (part["learners"] or part["joint"] or part["target"])
            and all(f["connected"] and f["lag"] < 100 for f in part["followers"])
            for part in partitions
        )


class Strace:
    """System calls of a process that fail, or take long."""

    def __init__(self, pid: int, *inject: str) -> None:
        self._pid, self._inject = pid, inject
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> None:
        calls = [rule.partition(":")[0] for rule in self._inject]
        self._process = await asyncio.create_subprocess_exec(
            "strace", "-f", "-qq", "-p", str(self._pid), "-e", f"trace={','.join(calls)}",
            *(part for rule in self._inject for part in ("-e", f"inject={rule}")),
            "-o", "/dev/null",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextmanager
def _places(folder: Path, nodes: Sequence[str]) -> Iterator[tuple[Network, dict[str, Disk]]]:
    with network([*nodes, ETCD]) as net, disks(folder, nodes) as mounted:
        yield net, mounted


@asynccontextmanager
async def arena(folder: Path, *, spare: bool = True) -> AsyncIterator[Arena]:
    """A running cluster; processes, networks and mounts do not outlive the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with _places(folder, (*NODES, SPARE) if spare else NODES) as (net, mounted):
        made = Arena(folder, net=net, disks=mounted)
        try:
            await made.open()
            yield made
        finally:
            await made.close()
