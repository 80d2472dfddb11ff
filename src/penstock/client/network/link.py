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
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import ConnectionSource, Remote
from penstock.client.network.fleet import Fleet
from penstock.client.options import Options
from penstock.errors import Backpressure, PenstockError, Unavailable, WrongEpoch
from penstock.wire.calls import is_repeatable

if TYPE_CHECKING:
    from tenacity import AsyncRetrying

R = TypeVar("R")
Where = tuple[str, int]  # topic, partition

FAILURES_MAX: Final = 3  # After so many failures of one request a node is left for another.
log = logging.getLogger("penstock.client")


class Link:
    """Connections shared by all topics of a client."""

    def __init__(self, source: ConnectionSource, options: Options) -> None:
        self.options = options
        self._source = source
        self._connection: Connection | None = None
        self._fleet: Fleet | None = None  # None: the node is not one of a cluster, or not known yet
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

    @property
    def clustered(self) -> bool:
        """Whether partitions may be served by several nodes, each with a fate of its own."""
        return self._fleet is not None

    @property
    def nodes(self) -> int:
        """Nodes that take requests; 1 unless this is a cluster."""
        return 1 if self._fleet is None else self._fleet.size

    def toward(self, topic: str, partition: int) -> Connection | None:
        """The connection nearest to a partition, if there is any right now."""
        if self._fleet is None:
            return self.live
        return self._fleet.toward(topic, partition) or self.live

    def partitions(self, topic: str) -> int:
        """How many a cluster's topic has, as last heard; 0: not known."""
        return 0 if self._fleet is None else self._fleet.partitions(topic)

    def coordinator(self, topic: str, partition: int) -> str | None:
        """The node that serves a partition; empty: none right now; None: not known."""
        return None if self._fleet is None else self._fleet.coordinator(topic, partition)

    async def connection(self) -> Connection:
        """The connection; opens one if there is none."""
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
        """If the node is one of a cluster, learn of the others."""
        if not connection.welcome.cluster or not isinstance(self._source, Remote):
            return
        if self._fleet is None:
            self._fleet = Fleet(
                self._source,
                home=lambda: self.live,
                spawn=self.spawn,
                answer_s=self.options.attempt_s,
            )
        self._fleet.refresh()

    def _look_elsewhere(self, at: Where | None, failures: Counter[Connection]) -> None:
        """After a failure: find out who serves by now, and leave a node that does not."""
        assert self._fleet is not None
        if at is not None:
            self._fleet.ask(at[0])
        home = self.live
        if home is not None and (home.elsewhere or failures[home] >= FAILURES_MAX):
            self._connection = None
            home.leave()
            self._left = [left for left in (*self._left, home) if left.alive]

    def raise_if_closed(self) -> None:
        if self.closed:
            raise PenstockError("the client is closed")

    async def request(
        self,
        action: Callable[[Connection], Awaitable[R]],
        *,
        repeatable: bool = True,
        failed: PenstockError | None = None,
        at: Where | None = None,
    ) -> R:
        """Do `action` until it succeeds or fails for good. `failed`: how a first try ended; `at`:
        the partition that it is about.

        An action that is not repeatable is tried again only when it surely did not happen.
        """
        reached: Connection | None = None
        if failed is None:
            try:
                reached = await self._reached(at)
                return await action(reached)
            except PenstockError as error:
                failed = error
        return await self._repeat(action, repeatable, failed=failed, reached=reached, at=at)

    async def _repeat(
        self,
        action: Callable[[Connection], Awaitable[R]],
        repeatable: bool,
        *,
        failed: PenstockError,
        reached: Connection | None,
        at: Where | None,
    ) -> R:
        """Go on after a first try that `failed` at the node that it had `reached`."""
        failures = Counter[Connection]()
        doubtful = False  # whether some try may have been carried out

        def again(error: BaseException) -> bool:
            nonlocal doubtful
            if not isinstance(error, PenstockError):
                return False
            doubtful = doubtful or not _undone(error)
            if doubtful:
                error.details.pop("sent", None)  # It is true of the last try alone.
            if reached is not None and isinstance(error, Unavailable):
                failures[reached] += 1
            if self._fleet is not None:
                self._look_elsewhere(at, failures)
            return passing(error) and (repeatable or _undone(error))

        if not again(failed):
            raise failed
        await asyncio.sleep(_pause_s(failed, self.options.retry_wait_s))
        async for attempt in self._retries(again):
            with attempt:
                reached = await self._reached(at)
                return await action(reached)
        raise AssertionError("retries end by returning or raising")

    def _retries(self, again: Callable[[BaseException], bool]) -> AsyncRetrying:
        import tenacity  # only now: most clients never need it

        options = self.options
        growing = tenacity.wait_exponential_jitter(
            multiplier=options.retry_wait_s,
            max=options.retry_wait_s_max,
            jitter=options.retry_wait_s,
        )

        def pause_s(state: tenacity.RetryCallState) -> float:
            assert state.outcome is not None
            return _pause_s(state.outcome.exception(), growing(state))

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(again),
            stop=tenacity.stop_after_delay(options.retry_s),
            wait=pause_s,
            before_sleep=tenacity.before_sleep_log(log, logging.DEBUG),
            reraise=True,
        )

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """An administrative call, repeated if that does no harm."""
        return await self.request(
            lambda connection: connection.call(method, **arguments),
            repeatable=is_repeatable(method, arguments),
        )

    async def _reached(self, at: Where | None) -> Connection:
        if at is not None and self._fleet is not None:
            nearest = self._fleet.toward(*at)
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
        if self._fleet is not None:
            self._fleet.stop()
        try:
            async with asyncio.timeout(within_s):
                await self._tasks.__aexit__(None, None, None)
        except TimeoutError:
            log.warning("the client closed with work under way")
        finally:
            if self._fleet is not None:
                await self._fleet.close()
            for connection in (self._connection, *self._left):
                if connection is not None:
                    await connection.close()
            await self._source.close()


def passing(error: PenstockError) -> bool:
    """Whether the same request may succeed later, or elsewhere."""
    return error.retryable or isinstance(error, WrongEpoch)


def _undone(error: PenstockError) -> bool:
    """Whether it says that the request was surely not carried out."""
    return (
        isinstance(error, Backpressure)
        or error.details.get("sent") is False
        or bool(error.details.get("elsewhere"))
    )


def _pause_s(error: BaseException | None, otherwise_s: float) -> float:
    """How long to wait before a retry: as long as the error asks, if it does."""
    return error.retry_after_s if isinstance(error, Backpressure) else otherwise_s


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("a background task of the client failed")
