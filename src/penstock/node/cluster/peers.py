"""Connections to the other nodes: one to each, opened again whenever it is lost.

Each node is the client on its own connections, so between two nodes there are two. What replicas
say to each other gathers until the end of the loop's turn and goes out in one frame per node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from penstock.cluster.membership import NodeInfo
from penstock.errors import PenstockError
from penstock.model.batch import Batch
from penstock.node.observe.logs import get_logger
from penstock.node.route.ports import PeerPort
from penstock.replication.messages import Append, Follow, Followed
from penstock.wire.messages import Told

PAUSE_S: Final = 0.05  # after the first failure to connect; doubles
PAUSE_S_MAX: Final = 1.0
TOLD_MAX: Final = 10_000  # messages that gather for one node in a turn; more get lost
log = get_logger(__name__)


class FollowReader(Protocol):
    """Who reads a follow stream."""

    def on_followed(self, reply: Followed) -> None: ...

    def on_slice(self, append: Append, batches: list[Batch]) -> None: ...

    def on_lost(self, error: PenstockError | None) -> None: ...


class FollowHandle(Protocol):
    """An open follow stream."""

    def close(self) -> None: ...


class PeerLink(PeerPort, Protocol):
    """What the node needs of a connection to another one."""

    @property
    def node(self) -> str:
        """Who the other one says it is."""

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]: ...

    def tell(self, told: list[Told]) -> None: ...

    def follow(
        self, topic: int, partition: int, *, follow: Follow, follower: FollowReader
    ) -> FollowHandle: ...

    async def wait_closed(self) -> None: ...

    def abort(self) -> None: ...


Connect = Callable[[NodeInfo], Awaitable[PeerLink]]
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Peers:
    """Connections by node. A node that is no longer a member is given up once it is lost.
    `on_refused` hears of nodes at whose address nobody listens: they have ended."""

    def __init__(
        self,
        node: str,
        *,
        connect: Connect,
        spawn: Callable[..., object],
        on_connected: Callable[[str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._node, self._connect, self._spawn = node, connect, spawn
        self._on_connected, self._on_refused = on_connected, on_refused
        self._members: Mapping[str, NodeInfo] = {}
        self._links: dict[str, _Link] = {}
        self._closed = False

    def live(self, node: str) -> PeerLink | None:
        link = self._links.get(node)
        if link is None or link.connection is None or not link.connection.alive:
            return None
        return link.connection

    def knows(self, node: str) -> bool:
        return node in self._links

    def tell(self, node: str, told: Told) -> None:
        """Say something at the end of this turn; it is lost if there is no connection."""
        link = self._links.get(node)
        if link is None or len(link.told) >= TOLD_MAX:
            return
        if not link.told:
            asyncio.get_running_loop().call_soon(self._flush, node)
        link.told.append(told)

    def on_members(self, members: Mapping[str, NodeInfo]) -> None:
        """Connect to those who came; a member at another address is another run of it."""
        self._members = members
        for node, info in members.items():
            if node == self._node or self._closed:
                continue
            link = self._links.get(node)
            if link is None:
                self._links[node] = link = _Link(info)
                self._spawn(self._keep(node, link), name=f"peer-{node}")
            elif _address(link.info) != _address(info):
                link.info = info
                link.retry.set()
                if link.connection is not None:
                    link.connection.abort()
            else:
                link.retry.set()

    def close(self) -> None:
        self._closed = True
        for link in self._links.values():
            link.retry.set()
            if link.connection is not None:
                link.connection.abort()

    def _flush(self, node: str) -> None:
        link = self._links.get(node)
        if link is None:
            return
        told, link.told = link.told, []
        connection = self.live(node)
        if connection is not None:
            connection.tell(told)

    async def _keep(self, node: str, link: _Link) -> None:
        """Stay connected until the node is neither a member nor reachable."""
        pause_s = 0.0
        try:
            while not self._closed:
                link.retry.clear()
                if await self._connected(node, link):
                    pause_s = 0.0
                    continue
                if node not in self._members:
                    return
                pause_s = min(max(2 * pause_s, PAUSE_S), PAUSE_S_MAX)
                await _sleep(pause_s, unless=link.retry)
        finally:
            self._links.pop(node, None)

    async def _connected(self, node: str, link: _Link) -> bool:
        """One connection from its opening to its end; False if there was none."""
        try:
            connection = await self._connect(link.info)
        except PenstockError as error:
            log.debug("peer not reached", peer=node, error=error.message)
            if error.details.get("refused"):
                self._on_refused(node)
            return False
        if connection.node != node:  # the address has been given to somebody else
            connection.abort()
            self._on_refused(node)
            return False
        link.connection = connection
        log.info("peer connected", peer=node)
        try:
            self._on_connected(node)
            await connection.wait_closed()
        finally:
            link.connection = None
            connection.abort()
        log.info("peer lost", peer=node)
        return True


class _Link:
    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.connection: PeerLink | None = None
        self.told: list[Told] = []  # in this turn
        self.retry = asyncio.Event()  # something changed: do not wait any longer


def _address(info: NodeInfo) -> tuple[str, int, str]:
    return info.host, info.native_port, info.uuid


async def _sleep(seconds: float, *, unless: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await unless.wait()
    except TimeoutError:
        return
