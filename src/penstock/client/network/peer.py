"""The reading end of a follow stream, and a node's connection to another node.

A follower acts on what arrives at once and in order, so nothing is queued here: the answer, the
slices and the end are handed on from within the frame's arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import msgspec

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import Address, Tls, dial
from penstock.client.network.exchange import Receiver
from penstock.errors import PenstockError
from penstock.model.batch import Batch, decode_all
from penstock.replication.messages import Append, Follow, Followed
from penstock.wire.frame import FrameFlag, FrameType
from penstock.wire.messages import OpenFollow, Tell, Told, pack, unpack
from penstock.wire.outbox import Outbox

HEARTBEAT_S: Final = 0.5  # six of these without a byte, and the connection is given up
_encoder: Final = msgspec.msgpack.Encoder()


class FollowListener(Protocol):
    """Who reads a follow stream."""

    def on_followed(self, reply: Followed) -> None: ...

    def on_slice(self, append: Append, batches: list[Batch]) -> None: ...

    def on_lost(self, error: PenstockError | None) -> None:
        """Nothing more comes; it is told once, and not after `close`."""
        ...


class FollowStream:
    """One open follow stream."""

    def __init__(self, follower: FollowListener, *, end: Callable[[], None]) -> None:
        self._follower: FollowListener | None = follower
        self._end = end

    def close(self) -> None:
        """Stop reading; what is on its way is dropped."""
        if self._follower is not None:
            self._follower = None
            self._end()

    # --- called by the connection ---

    def on_answer(self, payload: memoryview) -> None:
        if self._follower is not None:
            self._follower.on_followed(unpack(payload, Followed)[0])

    def on_batch(self, payload: memoryview) -> None:
        if self._follower is not None:
            append, data = unpack(payload, Append)
            self._follower.on_slice(append, decode_all(data))

    def on_end(self, error: PenstockError | None) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.on_lost(error)


class PeerConnection(Connection):
    """What one node may ask of another."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        outbox = Outbox(cast(asyncio.Transport, transport), self._loop.call_soon)
        super().connection_made(cast(asyncio.Transport, outbox))

    @property
    def node(self) -> str:
        """Who the other one says it is."""
        return self.welcome.node

    def tell(self, told: list[Told]) -> None:
        # The frame has a number, so that a refusal is not taken for one of the whole connection.
        self.send(FrameType.SUBSCRIBE, self._next(), pack(Tell(told)))

    def follow(
        self, topic: int, partition: int, *, follow: Follow, follower: FollowListener
    ) -> FollowStream:
        """Open a stream; raises `Unavailable` if the connection is lost already."""
        stream = FollowStream(follower, end=lambda: self.close_stream(number))
        number = self.open(OpenFollow(topic, partition, _encoder.encode(follow)), stream)
        return stream

    def open(self, control: Any, stream: Receiver) -> int:
        """Subscribe; returns the stream's number. What comes goes to `stream`, a refusal too."""
        if not self.alive:
            raise self._over()
        number = self._next()
        self._streams[number] = stream
        self.send(FrameType.SUBSCRIBE, number, pack(control), flags=FrameFlag.ACK_WANTED)
        return number

    def close_stream(self, number: int) -> None:
        """Unsubscribe; nothing comes any more."""
        if self._streams.pop(number, None) is not None:
            self.send(FrameType.UNSUBSCRIBE, number)


async def connect_peer(
    host: str, port: int, *, cluster_key: str | None = None, tls: Tls = None, node: str
) -> PeerConnection:
    """Connect to the node at this address, in the name of `node`."""
    return await dial(
        Address(host, port, tls is not None),
        lambda: PeerConnection(
            cluster_key=cluster_key, client=f"penstock-node/{node}", heartbeat_s=HEARTBEAT_S
        ),
        tls=tls,
    )
