"""The nodes of a cluster as a client sees them: who coordinates what, and a connection to each.

All of it is a hint. A node that does not coordinate a partition forwards to the one that does, so a
stale route costs a hop and nothing else; what makes a repeated request harmless is its producer
key. Routes are asked for when a topic is first used, when something failed, and every few seconds
while they are in use; never more than once at a time for a topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import Remote
from penstock.errors import PenstockError

ROUTES_S: Final = 3.0  # how old routes may become while they are in use
ROUTES_S_MIN: Final = 0.05  # between two questions about one topic
ROUTES_TIMEOUT_S: Final = 2.0
DIAL_AGAIN_S: Final = 0.5  # after a node could not be reached
log = logging.getLogger("penstock.client")

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class RoutedNode(msgspec.Struct, frozen=True):
    id: str
    host: str
    port: int


class NodeRoutes(msgspec.Struct, frozen=True):
    """What the call `routes` answers."""

    nodes: list[RoutedNode]
    coordinators: list[str] = []  # the node of each partition; empty: nobody serves it right now


class Fleet:
    """Connections beside the link's own, each to a node that coordinates something."""

    def __init__(
        self,
        remote: Remote,
        *,
        home: Callable[[], Connection | None],
        spawn: Spawn,
        answer_s: float | None,
    ) -> None:
        self._remote, self._home, self._spawn = remote, home, spawn
        self._answer_s = answer_s
        self._loop = asyncio.get_running_loop()
        self._places: dict[str, RoutedNode] = {}
        self._coordinators: dict[str, list[str]] = {}  # of each topic's partitions
        self._asked: dict[str, float] = {}  # when the routes of a topic were last asked for
        self._asking: set[str] = set()
        self._connections: dict[str, Connection] = {}
        self._dialled: dict[str, float] = {}  # when a node was last tried
        self._dialling: set[str] = set()
        self._closed = False

    @property
    def size(self) -> int:
        """Nodes that can take requests."""
        return max(1, len(self._places))

    # --- where to ---

    def partitions(self, topic: str) -> int:
        """How many a topic has, as last heard; 0: not known yet."""
        return len(self._coordinators.get(topic, ()))

    def coordinator(self, topic: str, partition: int) -> str | None:
        """Its node's id as last heard; empty: nobody; None: not known yet."""
        found = self._coordinators.get(topic)
        if self._loop.time() - self._asked.get(topic, 0.0) > ROUTES_S or found is None:
            self.ask(topic)
        if found is None or partition >= len(found):
            return None
        return found[partition]

    def toward(self, topic: str, partition: int) -> Connection | None:
        """A living connection to the partition's coordinator, if there is one right now."""
        node = self.coordinator(topic, partition)
        if not node:
            return None
        home = self._home()
        if home is not None and home.welcome.node == node:
            return home
        found = self._connections.get(node)
        if found is not None and found.alive:
            return found
        self._dial(node)
        return None

    # --- asking ---

    def refresh(self) -> None:
        """The link's own connection is a new one: learn what has changed meanwhile."""
        for topic in ("", *self._coordinators):
            self.ask(topic)

    def ask(self, topic: str) -> None:
        """Learn the routes of a topic (empty: the nodes alone), in the background."""
        if self._closed or topic in self._asking:
            return
        self._asking.add(topic)
        self._spawn(self._ask(topic))

    async def _ask(self, topic: str) -> None:
        try:
            await asyncio.sleep(self._asked.get(topic, 0.0) + ROUTES_S_MIN - self._loop.time())
            for connection in self._living():
                try:
                    async with asyncio.timeout(ROUTES_TIMEOUT_S):
                        arguments = {"topic": topic} if topic else {}
                        answer = await connection.call("routes", **arguments)
                except (PenstockError, TimeoutError) as error:
                    log.debug("no routes of %s: %s", topic, error)
                else:
                    self._heard(topic, msgspec.convert(answer, NodeRoutes))
                    return
        finally:
            self._asked[topic] = self._loop.time()
            self._asking.discard(topic)

    def _living(self) -> list[Connection]:
        """Whom to ask, the link's own first; those last that may know less than others."""
        home = self._home()
        known = [] if home is None else [home]
        known += [c for c in self._connections.values() if c.alive and c is not home]
        return sorted(known, key=lambda connection: connection.elsewhere)

    def _heard(self, topic: str, routes: NodeRoutes) -> None:
        self._places = {place.id: place for place in routes.nodes}
        self._remote.learn((place.host, place.port) for place in routes.nodes)
        if topic:
            self._coordinators[topic] = routes.coordinators

    # --- connecting ---

    def _dial(self, node: str) -> None:
        tried = self._dialled.get(node)
        recent = tried is not None and self._loop.time() - tried < DIAL_AGAIN_S
        if recent or node in self._dialling or node not in self._places or self._closed:
            return
        self._dialling.add(node)
        self._spawn(self._reach(node, self._places[node]))

    async def _reach(self, node: str, place: RoutedNode) -> None:
        try:
            connection = await self._remote.connect_to(place.host, place.port)
        except PenstockError as error:
            log.debug("node %s cannot be reached, others forward: %s", node, error)
        else:
            if self._closed:
                await connection.close()
            connection.answer_s = self._answer_s
            self._connections[node] = connection
        finally:
            self._dialled[node] = self._loop.time()
            self._dialling.discard(node)

    def stop(self) -> None:
        """Ask and dial no more; the connections still carry what is under way."""
        self._closed = True

    async def close(self) -> None:
        self.stop()
        for connection in self._connections.values():
            await connection.close()
