"""One native connection: what may be asked of a node, over any asyncio transport.

connection = await open_connection("penstock://127.0.0.1:7440")      # TCP or TLS, one or several
connection = Connection(); memory_pair(connection, session); await connection.greeted()
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.client.address import Address, Tls
from penstock.client.exchange import GREETING_TIMEOUT_S, Exchange
from penstock.client.streams import ChangeStream, LeaseStream, LogStream, Numbered, Opened
from penstock.errors import Unavailable
from penstock.model.ids import LeaseToken
from penstock.wire.frame import Buffer, FrameType
from penstock.wire.messages import (
    Call,
    Changes,
    Enqueue,
    Enqueued,
    Extend,
    OpenLease,
    OpenLog,
    OpenSubscription,
    Part,
    Return,
    Settle,
    Settled,
    TokenPart,
    pack,
)

ENDPOINT_TIMEOUT_S: Final = 2.0  # for one of several: the next one may answer at once

# Calls whose work grows with what there is, or that return when other nodes have done theirs: how
# long that may be the node knows. Their answers are waited for as long as it takes.
LENGTHY: Final = frozenset(
    {"verify", "snapshot", "purge", "topic_create", "topic_update", "topic_delete", "dlq_replay",
     "dlq_delete", "cluster_rebalance", "cluster_drain", "cluster_remove_replica"}
)  # fmt: skip


class Connection(Exchange):
    """The calls, the enqueues and the streams of one client's end."""

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """One administrative call; the result map, or the error it was refused with."""
        result: dict[str, Any] = await self._request(
            FrameType.SUBSCRIBE,
            dict,
            pack(Call(method, arguments)),
            wait_s=_wait_s(method, arguments.get("wait_ms")),
        )
        return result

    async def enqueue(
        self,
        topic: str,
        parts: Sequence[tuple[int, int, Buffer]],
        *,
        atomic: bool = False,
        expected_sequence: int | None = None,
        partitioned: bool = True,
        codec: int = 0,
        raw_lengths: list[int] | None = None,
    ) -> Enqueued:
        """Append ENQ bodies, given as (partition, entries, body); answered when durable."""
        if self._resume is not None:
            await self._resumed()
        return await self.enqueue_nowait(
            Enqueue(
                topic,
                [Part(partition, count, len(body)) for partition, count, body in parts],
                atomic,
                expected_sequence,
                codec,
                raw_lengths,
                partitioned,
            ),
            [body for _, _, body in parts],
        )

    def enqueue_nowait(
        self, request: Enqueue, bodies: Sequence[Buffer]
    ) -> asyncio.Future[Enqueued]:
        """`enqueue` for a caller that bounds by itself what it has in flight."""
        return self._ask(FrameType.BATCH, Enqueued, pack(request), *bodies)

    async def settle(self, topic: str, tokens: Sequence[LeaseToken]) -> list[int]:
        """Acknowledge leases; returns the positions of those that were no longer held."""
        if self._resume is not None:
            await self._resumed()
        answer, lost = self.settle_nowait(topic, tokens)
        return lost(await answer)

    def settle_nowait(
        self, topic: str, tokens: Sequence[LeaseToken]
    ) -> tuple[asyncio.Future[Settled], Callable[[Settled], list[int]]]:
        """`settle` for a caller with a callback; the function reads lost positions out of it."""
        parts, data, order = _grouped(tokens)
        answer = self._ask(FrameType.ACK, Settled, pack(Settle(topic, parts)), data)
        return answer, lambda settled: _positions(settled, order)

    async def settle_range(
        self, topic: str, *, partition: int, epoch: int, tokens: NDArray[np.uint64]
    ) -> list[int]:
        """`settle` for tokens of one partition and epoch."""
        parts = [TokenPart(partition, epoch, len(tokens))]
        settled: Settled = await self._request(
            FrameType.ACK, Settled, pack(Settle(topic, parts)), tokens.astype("<u8").tobytes()
        )
        return settled.lost

    async def give_back(
        self,
        topic: str,
        tokens: Sequence[LeaseToken],
        *,
        delay_ms: int | None = None,
        reject: bool = False,
        counted: bool = True,
        reason: str = "",
    ) -> list[int]:
        """End leases unfinished: retry, dead letter (`reject`) or unused (`counted=False`)."""
        parts, data, order = _grouped(tokens)
        request = Return(topic, parts, delay_ms, reject, counted, reason)
        settled: Settled = await self._request(FrameType.NACK, Settled, pack(request), data)
        return _positions(settled, order)

    async def extend(self, topic: str, tokens: Sequence[LeaseToken], extend_ms: int) -> list[int]:
        """Let leases run `extend_ms` from now; returns the positions of lost ones."""
        parts, data, order = _grouped(tokens)
        request = Extend(topic, parts, extend_ms)
        settled: Settled = await self._request(FrameType.HEARTBEAT, Settled, pack(request), data)
        return _positions(settled, order)

    # --- streams ---

    async def lease_stream(
        self,
        topic: str,
        *,
        credits: int,
        consumer: str = "",
        visibility_ms: int | None = None,
        batch_max: int = 100,
    ) -> LeaseStream:
        """Open a stream of leased messages."""
        stream = LeaseStream(self, self._next())
        request = OpenLease(topic, credits, consumer, visibility_ms, batch_max)
        await self._open(stream, request)
        return stream

    async def log_stream(
        self,
        topic: str,
        *,
        partition: int,
        from_sequence: int = 1,
        credit_entries: int = 1000,
        credit_bytes: int = 8 << 20,
        through: int = 0,
    ) -> LogStream:
        """Open a stream of committed batches; with `through` it ends there by itself."""
        stream = LogStream(self, self._next())
        request = OpenLog(topic, partition, from_sequence, credit_entries, credit_bytes, through)
        await self._open(stream, request)
        return stream

    async def subscribe(
        self,
        request: OpenSubscription,
        arrived: Callable[[ChangeStream, Changes, memoryview], None],
    ) -> tuple[ChangeStream, Opened]:
        """Open a stream of released deltas, handed on as they come; and where it starts."""
        stream = ChangeStream(self, self._next(), request=request, arrived=arrived)
        opened: Opened = await self._open(stream, request, Opened)
        return stream, opened

    async def _open(
        self, stream: Numbered, request: OpenLease | OpenLog | OpenSubscription, answer: Any = dict
    ) -> Any:
        number = stream.number
        self._streams[number] = stream
        # Readers of a log may have to wait until somebody serves it, or has folded it.
        wait_s = 0.0 if isinstance(request, OpenLease) else math.inf
        try:
            return await self._ask(
                FrameType.SUBSCRIBE, answer, pack(request), number=number, wait_s=wait_s
            )
        except BaseException:
            # A caller that gave up waiting must not leave a stream behind that leases messages.
            if number in self._streams:
                self.send(FrameType.UNSUBSCRIBE, number)
            self._let_go(number)
            raise

    async def unsubscribe(self, number: int) -> None:
        """End a stream; what the server sent before it knew still arrives before this returns."""
        if number in self._streams:
            try:
                await self._ask(FrameType.UNSUBSCRIBE, dict, number=number)
            finally:
                self._let_go(number)


C = TypeVar("C", bound=Connection)


async def open_connection(
    url: str | Sequence[str],
    *,
    api_key: str | None = None,
    tls: Tls = None,
    client: str = "penstock-python",
) -> Connection:
    """Connect to `penstock://host:port`, or with TLS to `penstocks://host:port`; where several are
    named, to the first that serves."""

    def make() -> Connection:
        return Connection(api_key=api_key, client=client)

    first, *others = Address.parse_all(url)
    if not others:
        return await dial(first, make, tls=tls, timeout=GREETING_TIMEOUT_S)
    failed: Unavailable | None = None
    for address in (first, *others):
        try:
            connection = await dial(address, make, tls=tls, timeout=ENDPOINT_TIMEOUT_S)
            await _serving(connection)
        except Unavailable as error:
            failed = error
        else:
            return connection
    assert failed is not None
    raise failed


async def _serving(connection: Connection) -> None:
    """Raises `Unavailable` if it is a node's that only joins its cluster, or leaves it."""
    if not connection.welcome.cluster:
        return
    try:
        async with asyncio.timeout(ENDPOINT_TIMEOUT_S):
            await connection.call("routes")
    except TimeoutError as error:
        connection.abort()
        raise Unavailable("the node greeted and then said nothing") from error
    except BaseException:
        connection.abort()
        raise


async def connect(url: str, make: Callable[[], C], *, tls: Tls = None) -> C:
    """`open_connection` for any kind of connection, to one address."""
    return await dial(Address.parse(url), make, tls=tls, timeout=GREETING_TIMEOUT_S)


async def dial(address: Address, make: Callable[[], C], *, tls: Tls, timeout: float) -> C:
    """Connect and be greeted, each within `timeout`. A refused connection is told by the error's
    `refused`: nobody listens there."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            _, connection = await loop.create_connection(
                make, address.host, address.port, ssl=address.context(tls)
            )
    except (OSError, TimeoutError) as error:
        refused = True if isinstance(error, ConnectionRefusedError) else None
        raise Unavailable(f"cannot connect to {address}: {error}", refused=refused) from error
    try:
        await connection.greeted(timeout)
    except BaseException:
        connection.abort()
        raise
    return connection


def _wait_s(method: str, wait_ms: object) -> float:
    """How much longer than others a call may take."""
    if method in LENGTHY:
        return math.inf
    return wait_ms / 1000 if isinstance(wait_ms, int) else 0.0


_U64: Final = struct.Struct("<Q")


def _grouped(tokens: Sequence[LeaseToken]) -> tuple[list[TokenPart], bytes, list[int] | None]:
    """Tokens as parts of one (partition, epoch) each; `order` maps back unless nothing moved."""
    if len(tokens) == 1:
        token = tokens[0]
        return [TokenPart(token[0], token[1], 1)], _U64.pack(token[2]), None
    order = sorted(range(len(tokens)), key=lambda i: tokens[i][:2])
    parts: list[TokenPart] = []
    start = 0
    for end in range(1, len(order) + 1):
        head = tokens[order[start]]
        if end == len(order) or tokens[order[end]][:2] != head[:2]:
            parts.append(TokenPart(head[0], head[1], end - start))
            start = end
    data = np.fromiter((tokens[i][2] for i in order), dtype="<u8", count=len(order)).tobytes()
    return parts, data, order


def _positions(settled: Settled, order: list[int] | None) -> list[int]:
    if order is None or not settled.lost:
        return settled.lost
    return sorted(order[i] for i in settled.lost)
