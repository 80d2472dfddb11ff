"""What routing asks of a partition, of the cluster, and of a connection to another node.

A topic has a port for each of its partitions: the `Partition` itself where this node serves it, a
`RemotePartition` elsewhere. Whoever hands requests over need not know which of the two it is.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.node.write.enqueuer import EnqueuePart
from penstock.node.write.settler import TokenRequest
from penstock.wire.frame import Buffer, FrameType

Key = tuple[int, int]  # (topic id, partition)


class PartitionPort(Protocol):
    """A partition, wherever it is. Each request is answered once, at commit or with an error."""

    @property
    def index(self) -> int: ...

    def enqueue(self, part: EnqueuePart) -> None: ...

    def settle(self, request: TokenRequest) -> None: ...


class PeerStream(Protocol):
    """Our end of a stream that we opened at another node."""

    def on_answer(self, payload: memoryview) -> None:
        """It was opened."""

    def on_batch(self, payload: memoryview) -> None: ...

    def on_end(self, error: PenstockError | None) -> None:
        """Nothing more comes: refused or closed by the other side, or the connection is lost."""


class PeerPort(Protocol):
    """A live connection to another node, on which we are the client."""

    @property
    def alive(self) -> bool: ...

    def ask(self, type: FrameType, answer: Any, *payload: Buffer) -> asyncio.Future[Any]:
        """Send one request. The future gets the answer, unpacked as `answer`, or the error; when
        the connection is lost, `Unavailable`: then nobody knows whether it took effect."""

    def open(self, control: Any, stream: PeerStream) -> int:
        """Subscribe; returns the stream's number. What comes goes to `stream`, a refusal too."""

    def send(self, type: FrameType, sequence: int, *payload: Buffer, flags: int = 0) -> None:
        """A frame that is not answered, on a stream that we opened."""

    def close_stream(self, number: int) -> None:
        """Unsubscribe; nothing comes any more."""


class ClusterView(Protocol):
    """Who coordinates what, as far as this node knows."""

    @property
    def node(self) -> str:
        """This node's name."""

    @property
    def alone(self) -> bool:
        """There are no other nodes."""

    @property
    def cut_off(self) -> bool:
        """This node reaches neither a majority of the others nor the metadata store: whoever it
        does not serve itself is better off with another node."""

    @property
    def available(self) -> bool:
        """The metadata store answered when it was asked last."""

    def coordinator(self, key: Key) -> str:
        """The node that coordinates a partition; empty if nobody is known to."""

    def live(self, node: str) -> PeerPort | None:
        """The connection to another node, if there is one right now."""

    async def changed(self, key: Key) -> None:
        """Returns when something about a partition's coordinator has changed since the call."""


class AlwaysHere:
    """A node that runs alone: whatever there is, is here."""

    alone = True
    cut_off = False
    available = True

    def __init__(self, node: str = "") -> None:
        self.node = node

    def coordinator(self, key: Key) -> str:
        return self.node

    def live(self, node: str) -> PeerPort | None:
        return None

    async def changed(self, key: Key) -> None:
        await asyncio.get_running_loop().create_future()
