"""Live subscriptions for callers of the gateway: a client of its own for each of them.

A caller that comes back says how far it was as `positions`, a text such as `7@0:120,1:96`: the
topic's id, and of each partition the position up to which nothing is missing. It has all partitions
from the first time on, those that have released nothing since with the position behind which they
began: where a partition is left out it begins where the request says, which may be now. Without the
id, which a text that was put together by hand may lack, the positions are those of the topic that
has the name now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from penstock.client.client import Client
from penstock.client.delta.subscription import DeltaSubscription, Released, ReleasedBatch, What
from penstock.client.network.connection import Connection
from penstock.client.options import Options
from penstock.errors import InvalidArgument, NotFound
from penstock.model.delta import Op
from penstock.node.door.budget import Account, Held
from penstock.propagation.flow.route import DeltaRoute
from penstock.server import vocabulary as say
from penstock.server.pool import Pool

PIECE_ROWS: Final = 50  # that are decoded and written in one step of the loop
PIECE_BYTES: Final = 32 << 10  # of them, or a single one
# Of a partition's deltas that may be on their way to one stream, which is sent a piece at a time:
# what is here already waits in memory, and was decoded for nothing if nobody reads it.
WINDOW_BYTES: Final = 128 << 10


class CallerSubscriptions:
    """The subscriptions of a gateway's callers, which share the turns in which pieces are sent."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.turns = PieceTurns()

    @asynccontextmanager
    async def open(
        self, api_key: str | None, request: say.SubscribeCall
    ) -> AsyncIterator[DeltaSubscription]:
        """The batches that a caller asks for, in causal order; each is done when the next is
        taken."""
        async with Client(_KeySource(self._pool, api_key), Options()) as client:
            deltas = await client.deltas(request.topic)
            if Positions(request.positions).topic not in (0, deltas.topic.id):
                raise NotFound(
                    f"topic {request.topic} was deleted and made again since these positions",
                    topic=request.topic,
                )
            following = await deltas.follow(_what(request))
            try:
                yield following
            finally:
                await following.close()


class _KeySource:
    """Where a subscription's client gets connections: from the gateway, with the caller's key."""

    def __init__(self, pool: Pool, api_key: str | None) -> None:
        self._pool, self._api_key = pool, api_key

    async def connect(self) -> Connection:
        return await self._pool.connect(self._api_key)

    async def close(self) -> None:
        """Nothing is to be closed: the client closes its connections itself."""


@asynccontextmanager
async def counted(batch: ReleasedBatch, account: Account) -> AsyncIterator[None]:
    """While a batch is sent it counts among what its caller makes the node hold; raises
    `Backpressure` if there is no room for it."""
    size = int(batch.sizes.sum())
    await account.acquire(size, Held.READS)
    try:
        yield
    finally:
        account.give_back(size, Held.READS)


async def pieces(
    batch: ReleasedBatch, turns: PieceTurns
) -> AsyncIterator[tuple[list[Released], bool]]:
    """A batch little by little, and whether it is the end of it. Decoded and written in one go it
    would hold up all who share the loop."""
    rows, ends = iter(batch), np.cumsum(batch.sizes)
    at = 0
    while at < len(ends):
        await turns.mine()
        before = int(ends[at - 1]) if at else 0
        fit = int(np.searchsorted(ends, before + PIECE_BYTES, side="right"))
        end = min(max(fit, at + 1), at + PIECE_ROWS)
        yield list(islice(rows, end - at)), end == len(ends)
        at = end


def _what(request: say.SubscribeCall) -> What:
    return What(
        namespace=request.namespace,
        vector_id=request.vector_id,
        op=None if request.op is None else _op(request.op),
        routes=[str(DeltaRoute.parse(text)) for text in request.routes],
        from_sequence="now" if request.from_sequence is None else request.from_sequence,
        from_time=request.from_time_ms,
        positions=Positions(request.positions).reached,
        cursor=request.cursor,
        coalesce_ms=request.coalesce_ms,
        batch_ms=request.batch_ms,
        credits=request.credits,
        credit_bytes=WINDOW_BYTES,
    )


def _op(name: str) -> Op:
    try:
        return Op[name.upper()]
    except KeyError:
        names = ", ".join(op.name.lower() for op in Op)
        raise InvalidArgument(f"op must be one of {names}", field="op") from None


class Positions:
    """How far a caller has everything, as text that it may come back with."""

    def __init__(self, text: str | None) -> None:
        topic, _, places = (text or "").rpartition("@")
        pairs = dict(part.partition(":")[::2] for part in places.split(",") if part)
        try:
            self.topic = msgspec.convert(topic or "0", say.Sequence, strict=False)  # 0: not said
            self.reached = msgspec.convert(pairs, dict[say.Sequence, say.Sequence], strict=False)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                "positions are a topic's id, and partitions with sequences, as 7@0:120,1:96",
                field="positions",
            ) from error

    @staticmethod
    async def of(request: say.SubscribeCall, following: DeltaSubscription) -> Positions:
        """Once it is known where everything begins. Of a partition that the caller has a position
        of it is, whether or not somebody serves it now."""
        found = Positions(request.positions)
        found.topic = following.topic_id
        found.reached |= await following.began(besides=found.reached)
        return found

    def __str__(self) -> str:
        places = (f"{partition}:{at}" for partition, at in sorted(self.reached.items()))
        return f"{self.topic}@{','.join(places)}"

    def after(self, batch: ReleasedBatch) -> str:
        self.reached[batch.partition] = batch.position
        return str(self)


class PieceTurns:
    """Whose piece of a stream is decoded and written next.

    A stream of changes is sent in small pieces, and lets others have the loop between two of them.
    A hundred streams would still keep it for a hundred pieces at a time, and a request takes
    several turns of the loop. So one of them has a step in a turn, in rotation: a request waits for
    that one and not for all. A stream that nobody reads waits for its reader, and takes no turn.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # who waits longest has it next

    async def mine(self) -> None:
        """Wait until the streams that asked before have had their turns."""
        async with self._turn:
            await asyncio.sleep(0)
