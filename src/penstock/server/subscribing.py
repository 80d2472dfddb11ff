"""Live subscriptions for callers of the gateway: a client of its own for each of them.

A caller that comes back says how far it was as `positions`, a text such as `0:120,1:96`: of each
partition the position up to which nothing is missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from penstock.client.client import Client
from penstock.client.connection import Connection
from penstock.client.delta_subscription import ReleasedBatch, Start, What
from penstock.client.options import Options
from penstock.errors import InvalidArgument
from penstock.model.delta import Op
from penstock.propagation.route import Route
from penstock.server import requests as ask
from penstock.server.pool import Pool


class _Source:
    """Connections of the gateway, with a caller's key."""

    def __init__(self, pool: Pool, api_key: str | None) -> None:
        self._pool, self._api_key = pool, api_key

    async def connect(self) -> Connection:
        return await self._pool.connect(self._api_key)

    async def close(self) -> None:
        """The connections are the client's."""


@asynccontextmanager
async def subscribed(
    pool: Pool, api_key: str | None, request: ask.Subscribe
) -> AsyncIterator[AsyncGenerator[ReleasedBatch, None]]:
    """The batches that a caller asks for, in causal order; each is done when the next is taken."""
    async with Client(_Source(pool, api_key), Options()) as client:
        deltas = await client.deltas(request.topic)
        batches = deltas.subscribe_batches(**_what(request))
        try:
            yield batches
        finally:
            await batches.aclose()


def _what(request: ask.Subscribe) -> What:
    return What(
        namespace=request.namespace,
        vector_id=request.vector_id,
        op=None if request.op is None else _op(request.op),
        routes=[str(Route.parse(text)) for text in request.routes],
        from_sequence=_start(request),
        from_time=request.from_time_ms,
        cursor=request.cursor,
        coalesce_ms=request.coalesce_ms,
        batch_ms=request.batch_ms,
        credits=request.credits,
    )


def _op(name: str) -> Op:
    try:
        return Op[name.upper()]
    except KeyError:
        names = ", ".join(op.name.lower() for op in Op)
        raise InvalidArgument(f"op must be one of {names}", field="op") from None


def _start(request: ask.Subscribe) -> Start:
    if request.positions is not None:
        return {partition: at + 1 for partition, at in positions_of(request.positions).items()}
    return "now" if request.from_sequence is None else request.from_sequence


class Positions:
    """How far a caller has been sent everything, as text that it may come back with."""

    def __init__(self, request: ask.Subscribe) -> None:
        given = request.positions
        self._reached = {} if given is None else positions_of(given)

    def reached(self, batch: ReleasedBatch) -> str:
        """After this batch."""
        self._reached[batch.partition] = batch.position
        return ",".join(f"{partition}:{at}" for partition, at in sorted(self._reached.items()))


def positions_of(text: str) -> dict[int, int]:
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        return {int(partition): int(at) for partition, at in pairs}
    except ValueError as error:
        raise InvalidArgument(
            "positions are partitions and sequences, as 0:120,1:96", field="positions"
        ) from error
