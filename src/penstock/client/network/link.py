"""A client's connection: opened when it is needed, opened again after a loss, retried in bounds.

At a cluster there is one connection for everything (calls, lease streams), to any of its nodes, and
others to the nodes that coordinate partitions: a request that names its partition goes there, if
the way is known, and else to the first, which forwards it.

A retry happens only on errors that say so (`retryable`), waits as long as the error asks, and gives
up after `Options.retry_s`. Whoever passes an action here makes sure that repeating it is harmless:
an enqueue carries its producer key, a settlement ends a lease once.

A node that does not answer within `Options.attempt_s`, that says that others should be asked, or
that fails one request again and again is left for another: it may be cut off from its cluster.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from random import random
from typing import Any, Final, TypeVar

import msgspec

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import ConnectionSource, Remote
from penstock.client.options import Options
from penstock.errors import Backpressure, PenstockError, Unavailable, WrongEpoch
from penstock.wire.messages import is_repeatable

R = TypeVar("R")
Where = tuple[str, int]  # topic, partition
Question = tuple[Any, ...]  # what `Exchange.ask` takes
Ended = Callable[[asyncio.Future[Any]], None]

FAILURES_MAX: Final = 3  # After so many failures of one request a node is left for another.
ROUTES_S: Final = 3.0  # how old routes may become while they are in use
ROUTES_S_MIN: Final = 0.05  # between two questions about one topic
ROUTES_TIMEOUT_S: Final = 2.0
DIAL_AGAIN_S: Final = 0.5  # after a node could not be reached
log = logging.getLogger("penstock.client")


class Link:
    def __init__(self, source: ConnectionSource, options: Options) -> None:
        self.options = options
        self._source = source
        self._connection: Connection | None = None
        self.fleet: Fleet | None = None  # None: the node is not one of a cluster, or not known yet
        self.troubled = Counter[Where | None]()  # requests about a partition that are tried again
        # Connections that were left for another node while they had requests under way.
        self._left: list[Connection] = []
        self._opening = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()
        self.closed = False

    async def open(self) -> None:
        await self._tasks.__aenter__()
        try:
            await self.connection()
        except BaseException:
            await self.close()
            raise

    @property
    def live(self) -> Connection | None:
        """The connection for everything, if there is one right now."""
        found = self._connection
        return found if found is not None and found.alive else None

    def toward(self, topic: str, partition: int) -> Connection | None:
        """The connection nearest to a partition, if there is any right now."""
        nearest = None if self.fleet is None else self.fleet.toward(topic, partition)
        return self.live if nearest is None else nearest

    def coordinator(self, topic: str, partition: int) -> str | None:
        return None if self.fleet is None else self.fleet.coordinator(topic, partition)

    async def connection(self) -> Connection:
        found = self.live
        if found is not None:
            return found
        async with self._opening:
            if self.live is None:
                self.raise_if_closed()
                self._connection = await self._source.connect()
                self._connection.answer_s = self.options.attempt_s
                self._look_around(self._connection)
            assert self._connection is not None
            return self._connection

    def _look_around(self, connection: Connection) -> None:
        if not connection.welcome.cluster or not isinstance(self._source, Remote):
            return
        if self.fleet is None:
            self.fleet = Fleet(self, self._source)
        self.fleet.refresh()

    def _look_elsewhere(self, at: Where | None, failures: Counter[Connection]) -> None:
        """After a failure: find out who serves by now, and leave a node that does not."""
        if at is not None and self.fleet is not None:
            self.fleet.ask(at[0])
        home = self.live
        if home is not None and (home.elsewhere or failures[home] >= FAILURES_MAX):
            self._connection = None
            home.leave()
            self._left = [left for left in (*self._left, home) if left.alive]

    def raise_if_closed(self) -> None:
        if self.closed:
            raise PenstockError("the client is closed")

    # --- requests ---

    def begin(self, question: Question, *, at: Where, ended: Ended) -> None:
        """`request` for a caller that awaits nothing: the first try is made at once and without a
        task of its own. `ended` gets the answer."""
        connection = self.toward(*at)
        if connection is None:
            self.spawn(self._go_on(question, None, at=at, ended=ended))
            return
        try:
            answer = connection.ask(*question)
        except PenstockError as lost:
            self.spawn(self._go_on(question, lost, at=at, ended=ended))
        else:
            answer.add_done_callback(partial(self._on_answer, question, at=at, ended=ended))

    def _on_answer(
        self, question: Question, answer: asyncio.Future[Any], *, at: Where, ended: Ended
    ) -> None:
        error = answer.exception()
        if isinstance(error, PenstockError) and passing(error) and not self.closed:
            self.spawn(self._go_on(question, error, at=at, ended=ended))
        else:
            ended(answer)

    async def _go_on(
        self, question: Question, failed: PenstockError | None, *, at: Where, ended: Ended
    ) -> None:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(await self.request(lambda c: c.ask(*question), failed=failed, at=at))
        except PenstockError as error:
            answer.set_exception(error)
        except BaseException as error:
            answer.set_exception(PenstockError(f"the request was given up: {error!r}"))
            raise
        finally:
            ended(answer)

    async def request(
        self,
        action: Callable[[Connection], Awaitable[R]],
        *,
        repeatable: bool = True,
        failed: PenstockError | None = None,
        at: Where | None = None,
        room_by: float | None = None,
    ) -> R:
        """Do `action` until it succeeds or fails for good. `failed`: how a first try ended; `at`:
        the partition that it is about; `room_by`, a time of the loop: how long a node without room
        is tried again, instead of as long as after any failure.

        An action that is not repeatable is tried again only when it surely did not happen.
        """
        retries: Retries | None = None
        try:
            while True:
                reached = None
                if failed is None:
                    try:
                        reached = await self._reached(at)
                        return await action(reached)
                    except PenstockError as error:
                        failed = error
                if retries is None:
                    retries = Retries(self.options, repeatable=repeatable, room_by=room_by)
                    self.troubled[at] += 1
                pause_s = retries.on_failure(failed, reached)
                if self.fleet is not None:
                    self._look_elsewhere(at, retries.failures)
                if pause_s is None:
                    raise failed
                await asyncio.sleep(pause_s)
                failed = None
        finally:
            if retries is not None:
                self.troubled -= Counter([at])

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """An administrative call, repeated if that does no harm."""
        return await self.request(
            lambda connection: connection.call(method, **arguments),
            repeatable=is_repeatable(method, arguments),
        )

    async def _reached(self, at: Where | None) -> Connection:
        nearest = None if at is None else self.toward(*at)
        if nearest is not None:
            return nearest
        try:
            return await self.connection()
        except Unavailable as error:
            error.details["sent"] = False
            raise

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside everything else until it ends; it must not raise."""
        task = self._tasks.create_task(_guarded(work))
        # A task that is cancelled before its first step has not begun `work`, which nobody awaits.
        task.add_done_callback(lambda _: work.close())

    async def close(self, within_s: float = 0.0) -> None:
        """Let spawned work end `within_s`, then hang up and close the source."""
        self.closed = True
        try:
            async with asyncio.timeout(within_s):
                await self._tasks.__aexit__(None, None, None)
        except TimeoutError:
            log.warning("the client closed with work under way")
        finally:
            if self.fleet is not None:
                await self.fleet.close()
            for connection in (self._connection, *self._left):
                if connection is not None:
                    await connection.close()
            await self._source.close()


class RoutedNode(msgspec.Struct, frozen=True):
    id: str
    host: str
    port: int


class NodeRoutes(msgspec.Struct, frozen=True):
    """What the call `routes` answers."""

    nodes: list[RoutedNode]
    coordinators: list[str] = []  # the node of each partition; empty: nobody serves it right now


class Fleet:
    """The nodes of a cluster: who coordinates what, and a connection to each beside the link's own.

    All of it is a hint. A node that does not coordinate a partition forwards to the one that does,
    so a stale route costs a hop and nothing else; what makes a repeated request harmless is its
    producer key. Routes are asked for when a topic is first used, when something failed, and every
    few seconds while they are in use; never more than once at a time for a topic.
    """

    def __init__(self, link: Link, remote: Remote) -> None:
        self._link, self._remote = link, remote
        self._loop = asyncio.get_running_loop()
        self._places: dict[str, RoutedNode] = {}
        self._coordinators: dict[str, list[str]] = {}  # of each topic's partitions
        self._asked: dict[str, float] = {}  # when the routes of a topic were last asked for
        self._asking: set[str] = set()
        self._connections: dict[str, Connection] = {}
        self._dialled: dict[str, float] = {}  # when a node was last tried; infinite: right now
        self.size = 1  # nodes that can take requests

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
        home = self._link.live
        if home is not None and home.welcome.node == node:
            return home
        found = self._connections.get(node)
        if found is not None and found.alive:
            return found
        self._dial(node)
        return None

    def refresh(self) -> None:
        """The link's own connection is a new one: learn what has changed meanwhile."""
        for topic in ("", *self._coordinators):
            self.ask(topic)

    def ask(self, topic: str) -> None:
        """Learn the routes of a topic (empty: the nodes alone), in the background."""
        if self._link.closed or topic in self._asking:
            return
        self._asking.add(topic)
        self._link.spawn(self._ask(topic))

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
        home = self._link.live
        known = [] if home is None else [home]
        known += [c for c in self._connections.values() if c.alive and c is not home]
        return sorted(known, key=lambda connection: connection.elsewhere)

    def _heard(self, topic: str, routes: NodeRoutes) -> None:
        self._places = {place.id: place for place in routes.nodes}
        self.size = max(1, len(self._places))
        self._remote.learn((place.host, place.port) for place in routes.nodes)
        if topic:
            self._coordinators[topic] = routes.coordinators

    def _dial(self, node: str) -> None:
        since = self._loop.time() - self._dialled.get(node, -math.inf)
        if since >= DIAL_AGAIN_S and node in self._places and not self._link.closed:
            self._dialled[node] = math.inf
            self._link.spawn(self._reach(node, self._places[node]))

    async def _reach(self, node: str, place: RoutedNode) -> None:
        try:
            connection = await self._remote.connect_to(place.host, place.port)
        except PenstockError as error:
            log.debug("node %s cannot be reached, others forward: %s", node, error)
        else:
            if self._link.closed:
                await connection.close()
            connection.answer_s = self._link.options.attempt_s
            self._connections[node] = connection
        finally:
            self._dialled[node] = self._loop.time()

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()


def passing(error: PenstockError) -> bool:
    """Whether the same request may succeed later, or elsewhere."""
    return error.retryable or isinstance(error, WrongEpoch)


class Retries:
    """How one request has failed so far, and whether it is tried again."""

    def __init__(self, options: Options, *, repeatable: bool, room_by: float | None) -> None:
        self._options, self._repeatable, self._room_by = options, repeatable, room_by
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + options.retry_s
        self._wait_s = options.retry_wait_s
        self._doubtful = False  # whether some try may have been carried out
        self.failures = Counter[Connection]()  # of each node that was reached

    def on_failure(self, error: PenstockError, reached: Connection | None) -> float | None:
        """How long to wait before the next try; None: there is none."""
        full = isinstance(error, Backpressure)
        undone = full or error.details.get("sent") is False or bool(error.details.get("elsewhere"))
        self._doubtful = self._doubtful or not undone
        if self._doubtful:
            error.details.pop("sent", None)  # It is true of the last try alone.
        if reached is not None and isinstance(error, Unavailable):
            self.failures[reached] += 1
        now = self._loop.time()
        until = self._room_by if full and self._room_by is not None else self._until
        if not passing(error) or not (self._repeatable or undone) or now >= until:
            return None
        log.debug("a request is tried again: %s", error)
        if isinstance(error, Backpressure):
            asked_s = error.retry_after_s
            return asked_s if self._room_by is None else min(asked_s, until - now)
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, self._options.retry_wait_s_max)
        return min(wait_s + random() * self._options.retry_wait_s, self._options.retry_wait_s_max)


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("a background task of the client failed")
