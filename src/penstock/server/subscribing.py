"""Live subscriptions for callers of the gateway: a client of its own for each of them.

A caller that comes back says how far it was as `positions`, a text such as `0:120,1:96`: of each
partition the position up to which nothing is missing. It has all partitions from the first time on,
those that have released nothing since with the position behind which they began: where a partition
is left out it begins where the request says, which may be now.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from penstock.client.client import Client
from penstock.client.connection import Connection
from penstock.client.delta_subscription import Following, Released, ReleasedBatch, What
from penstock.client.options import Options
from penstock.errors import InvalidArgument
from penstock.model.delta import Op
from penstock.propagation.route import Route
from penstock.server import requests as ask
from penstock.server.pool import Pool

PIECE_ROWS: Final = 50  # that are decoded and written in one step of the loop
PIECE_BYTES: Final = 32 << 10  # of them, or a single one


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
) -> AsyncIterator[Following]:
    """The batches that a caller asks for, in causal order; each is done when the next is taken."""
    async with Client(_Source(pool, api_key), Options()) as client:
        deltas = await client.deltas(request.topic)
        following = await deltas.follow(_what(request))
        try:
            yield following
        finally:
            await following.close()


def pieces(batch: ReleasedBatch) -> Iterator[tuple[list[Released], bool]]:
    """A batch little by little, and whether it is the end of it. Decoded and written in one go it
    would hold up all who share the loop; so between two pieces, let them have their turn."""
    rows, ends = iter(batch), np.cumsum(batch.sizes)
    at = 0
    while at < len(ends):
        before = int(ends[at - 1]) if at else 0
        fit = int(np.searchsorted(ends, before + PIECE_BYTES, side="right"))
        end = min(max(fit, at + 1), at + PIECE_ROWS)
        yield list(islice(rows, end - at)), end == len(ends)
        at = end


def _what(request: ask.Subscribe) -> What:
    return What(
        namespace=request.namespace,
        vector_id=request.vector_id,
        op=None if request.op is None else _op(request.op),
        routes=[str(Route.parse(text)) for text in request.routes],
        from_sequence="now" if request.from_sequence is None else request.from_sequence,
        from_time=request.from_time_ms,
        positions=positions_of(request),
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


class Positions:
    """How far a caller has been sent everything, as text that it may come back with."""

    def __init__(self, reached: dict[int, int]) -> None:
        self._reached = reached

    @classmethod
    async def of(cls, request: ask.Subscribe, following: Following) -> Positions:
        """Once it is known where everything begins. Of a partition that the caller has a position
        of it is, whether or not somebody serves it now."""
        given = positions_of(request)
        return cls(given | await following.began(besides=given))

    def __str__(self) -> str:
        return ",".join(f"{partition}:{at}" for partition, at in sorted(self._reached.items()))

    def reached(self, batch: ReleasedBatch) -> str:
        """After this batch."""
        self._reached[batch.partition] = batch.position
        return str(self)


def positions_of(request: ask.Subscribe) -> dict[int, int]:
    """What the caller says that it has."""
    parts = [part for part in (request.positions or "").split(",") if part]
    pairs = dict(part.partition(":")[::2] for part in parts)
    try:
        return msgspec.convert(pairs, dict[ask.Sequence, ask.Sequence], strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            "positions are partitions and sequences, as 0:120,1:96", field="positions"
        ) from error
