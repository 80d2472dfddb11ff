"""The node under attack: a real `penstock serve`, what it stores, and what is seen from outside.

Three profiles are played. `open` is the default of the documentation: loopback, no keys, no TLS.
`closed` asks every caller for a key and for TLS, and has a cluster's secret, as a node that others
can reach. In `cluster` it is one of three that replicate, where a node that stands still for some
seconds loses what it coordinates.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import trustme

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.config import Config
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.delta import Delta, Op, encode, hybrid_time
from penstock.server.embedded import open_embedded
from penstock.testing.cluster import ClusterProcesses
from penstock.testing.process import LISTENERS, ServerProcess

HOST: Final = "127.0.0.1"
JOBS: Final = "jobs"  # the healthy client's
LARGE: Final = "large"  # messages that make large answers
LARGE_COUNT: Final = 200
LARGE_BYTES: Final = 250_000
VECTORS: Final = "vectors"  # deltas that make long streams of events
VECTORS_COUNT: Final = 2000
DIMENSIONS: Final = 1000
TOPICS: Final[tuple[dict[str, Any], ...]] = (
    {"name": JOBS, "partitions": 3},
    {"name": LARGE},
    {"name": VECTORS, "kind": "delta", "dimensions": DIMENSIONS},
)
FOLLOWED_BYTES: Final = 8 << 20
CALL_S_MAX: Final = 30.0
FIRST: Final = ["setsid", "nice", "-n", "-10"]  # what runs the node and its healthy client
ESTABLISHED: Final = "01"  # states of the kernel
CLOSE_WAIT: Final = "08"  # the other side is gone, ours is not closed
_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Profile:
    name: str
    tls: bool = False
    keyed: bool = False
    nodes: int = 1


OPEN: Final = Profile(name="open")
CLOSED: Final = Profile(name="closed", tls=True, keyed=True)
CLUSTER: Final = Profile(name="cluster", nodes=3)
PROFILES: Final = {profile.name: profile for profile in (OPEN, CLOSED, CLUSTER)}


@dataclass(kw_only=True)
class Site:
    """One running node; `keys` is empty where none is asked for."""

    profile: Profile
    folder: Path
    server: ServerProcess
    keys: dict[str, str] = field(default_factory=dict)  # of healthy, of mallory and of another one
    cluster_key: str = ""
    ca: Path | None = None

    @property
    def ports(self) -> dict[str, int]:
        return self.server.ports

    @property
    def url(self) -> str:
        scheme = "penstocks" if self.profile.tls else "penstock"
        return f"{scheme}://{HOST}:{self.ports['native']}"

    @property
    def authority(self) -> str:
        return f"{HOST}:{self.ports['http']}"

    @property
    def mallory(self) -> str | None:
        """The key of an attacker that is let in."""
        return self.keys.get("mallory")

    def tls(self, *protocols: str) -> ssl.SSLContext | None:
        """What a client needs to be let in; None: nothing."""
        if self.ca is None:
            return None
        context = ssl.create_default_context(cafile=str(self.ca))
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context

    async def connect(self, key: str | None) -> Connection:
        async with asyncio.timeout(CALL_S_MAX):
            return await open_connection(self.url, api_key=key, tls=self.ca)

    async def call(self, method: str, /, *, who: str = "healthy", **arguments: Any) -> Any:
        """One call over a connection of its own."""
        connection = await self.connect(self.keys.get(who))
        try:
            async with asyncio.timeout(CALL_S_MAX):
                return await connection.call(method, **arguments)
        finally:
            await connection.close()

    async def epochs(self) -> dict[str, int]:
        """Of every partition."""
        found = await self.call("stats")
        return {
            f"{topic['name']}/{part['partition']}": part["epoch"]
            for topic in found["topics"]
            for part in topic["partitions"]
        }

    async def held_bytes(self) -> int | None:
        """What the node says that it holds for its callers; None: it does not say."""
        key = self.keys.get("healthy")
        head = f"X-API-Key: {key}\r\n" if key else ""
        asked = f"GET /metrics HTTP/1.0\r\nHost: {self.authority}\r\n{head}\r\n"
        tls = self.tls()
        async with asyncio.timeout(CALL_S_MAX):
            reader, writer = await asyncio.open_connection(
                HOST, self.ports["http"], ssl=tls, server_hostname=HOST if tls else None
            )
            writer.write(asked.encode())
            text = (await reader.read()).decode()
            writer.transport.abort()
        rows = [row for row in text.splitlines() if row.startswith("penstock_held_bytes{")]
        return round(sum(float(row.rpartition(" ")[2]) for row in rows)) if rows else None

    # --- seen from outside ---

    def rss_mb(self) -> float:
        return self.server.rss_bytes() / _MIB

    def forget_peak(self) -> None:
        """Have the kernel note the greatest size anew."""
        Path(f"/proc/{self.server.pid}/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        line = next(row for row in status.splitlines() if row.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024

    def held(self, addresses: Iterable[str], local_ports: Set[int]) -> int:
        """Connections of attackers that the node still has. Those from the healthy client's
        address are known by the ports that attackers had."""
        far = [address for address in addresses if address != HOST]
        return kernel_count(set(self.ports.values()), far=far, near_ports=local_ports)


def kernel_count(
    ports: Set[int],
    *,
    far: Iterable[str] = (),
    near_ports: Set[int] = frozenset(),
    near: str = HOST,
) -> int:
    """Open connections to these ports, from `far` addresses or from ports of a near one, by the
    kernel's own table."""
    mine = {f"{port:04X}" for port in ports}
    others = {_hex(address) for address in far}
    count = 0
    for name in ("tcp", "tcp6"):  # gRPC listens by IPv6 for both
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, remote, state = row.split()[:4]
            if local.rpartition(":")[2] in mine and state in (ESTABLISHED, CLOSE_WAIT):
                address, _, port = remote.rpartition(":")
                by_port = address[-8:] == _hex(near) and int(port, 16) in near_ports
                count += by_port or address[-8:] in others
    return count


def go_first(pid: int) -> None:
    """Let a process that `FIRST` runs go before the attackers, who would have machines of their
    own, and before whatever else runs here. Without the right to do so nothing is changed. The
    kernel shares its time between sessions first, therefore it has one of its own. It does not go
    far before them: the kernel's own threads, which sync the log, must not wait for it."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-5")


def _hex(address: str) -> str:
    """As the kernel writes it."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


# --- starting ---


@asynccontextmanager
async def site(folder: Path, profile: Profile) -> AsyncIterator[Site]:
    """A node with its topics filled; it does not outlive the block."""
    folder.mkdir(parents=True, exist_ok=True)
    if profile.nodes > 1:
        cluster = ClusterProcesses(folder, nodes=profile.nodes, gateway=True)
        for node in cluster.nodes.values():
            node.prefix = FIRST
        made = Site(profile=profile, folder=folder, server=cluster.nodes["n1"])
        try:
            await cluster.start_all()
            for node in cluster.nodes.values():
                go_first(node.pid)
            await _furnish(made)
            yield made
        finally:
            await cluster.close()
        return
    server = ServerProcess(data=folder / "data", ports=dict.fromkeys(LISTENERS, 0), prefix=FIRST)
    made = Site(profile=profile, folder=folder, server=server)
    if profile.tls:
        made.ca = _write_certificates(folder, made.server.options)
    if profile.keyed:
        made.cluster_key = secrets.token_hex(32)
        made.server.options |= {"require_key": "true", "cluster.key": made.cluster_key}
        made.keys["healthy"] = await _first_key(made.server.data)
    try:
        await made.server.start()
        go_first(made.server.pid)
        await _furnish(made)
        yield made
    finally:
        await made.server.kill()


def _write_certificates(folder: Path, options: dict[str, Any]) -> Path:
    authority = trustme.CA()
    issued = authority.issue_cert(HOST, "localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for i, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(folder / "cert.pem", append=bool(i))
    options |= {"tls.cert": folder / "cert.pem", "tls.key": folder / "key.pem"}
    return folder / "ca.pem"


async def _first_key(data: Path) -> str:
    """Made in the folder, before any node runs that would ask for one."""
    embedded = await open_embedded(data, config=Config(data=data))
    try:
        connection = await embedded.connect()
        return str((await connection.call("key_create", name="healthy"))["key"])
    finally:
        await embedded.close()


async def _furnish(made: Site) -> None:
    """Topics and keys; what a node keeps of their messages is then no growth."""
    connection = await made.connect(made.keys.get("healthy"))
    try:
        if made.profile.keyed:
            for name in ("mallory", "other"):
                made.keys[name] = (await connection.call("key_create", name=name))["key"]
        for config in TOPICS:
            copies = {"replication_factor": made.profile.nodes}
            await connection.call("topic_create", config={**config, **copies})
        payload = bytes(LARGE_BYTES)
        for _ in range(LARGE_COUNT // 20):
            await _put(connection, LARGE, [payload] * 20)
        for first in range(0, VECTORS_COUNT, 200):
            await _put(connection, VECTORS, [_delta(first + i) for i in range(200)])
        await connection.call("peek", topic=LARGE, limit=12)
    finally:
        await connection.close()
    await _follow(made)


async def _follow(made: Site) -> None:
    """Read some events, so that the deltas are folded: their vectors are no growth either."""
    key = f"X-API-Key: {made.keys['healthy']}\r\n" if made.keys else ""
    asked = (
        f"GET /v1/deltas/{VECTORS}/events?from_sequence=1 HTTP/1.1\r\n"
        f"Host: {made.authority}\r\n{key}\r\n"
    )
    tls = made.tls()
    async with asyncio.timeout(CALL_S_MAX):
        reader, writer = await asyncio.open_connection(
            HOST, made.ports["http"], ssl=tls, server_hostname=HOST if tls else None
        )
        writer.write(asked.encode())
        await reader.readexactly(FOLLOWED_BYTES)
        writer.transport.abort()


async def _put(connection: Connection, topic: str, payloads: list[bytes]) -> None:
    body = SCHEMAS[Kind.ENQ].encode(len(payloads), {"payload": payloads})
    await connection.enqueue(topic, [(0, len(payloads), body)])


def _delta(number: int) -> bytes:
    values = np.linspace(0.1, 0.9, DIMENSIONS, dtype=np.float32)
    return encode(
        Delta(
            delta_id=uuid.uuid4().bytes, namespace="crowd", vector_id=f"v{number}", op=Op.CREATE,
            origin="crowd", time=hybrid_time(time.time_ns() // 1_000_000),
            clock={"crowd": 1}, values=values,
        ),
        dimensions=DIMENSIONS,
    )  # fmt: skip
