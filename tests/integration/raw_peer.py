"""A peer of a node that sends what bytes it likes, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.model.batch import Codec
from penstock.model.columns import Buffer
from penstock.node.engine import Engine
from penstock.node.session.session import listen, port_of
from penstock.wire import frame
from penstock.wire.frame import Frame, FrameDecoder, FrameFlag, FrameType, expanded
from penstock.wire.messages import Hello, Welcome, pack, unpack

WANTED = FrameFlag.ACK_WANTED


class RawPeer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._frames: Iterator[Frame] = iter(())
        self.wire_bytes = 0  # received

    def send(self, type: FrameType, number: int, *payload: Buffer, flags: int = 0) -> None:
        self.write(b"".join(frame.encode(type, number, *payload, flags=flags)))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def frame(self) -> Frame | None:
        """The next one; None: the node has hung up."""
        async with asyncio.timeout(60):
            while (found := next(self._frames, None)) is None:
                data = await self._reader.read(1 << 16)
                if not data:
                    return None
                self.wire_bytes += len(data)
                self._frames = iter(self._decoder.feed(data))
        return found

    async def answer(self, number: int, type: Any = dict) -> Any:
        """The control of the frame that answers a request; an error is a map with a code."""
        while True:
            found = await self.frame()
            assert found is not None, "the node hung up"
            if found.sequence == number:
                whole = expanded(found, Codec(found.payload[0]), bytes_max=1 << 26)
                return unpack(whole.payload, dict if found.type is FrameType.NACK else type)[0]

    async def greet(self, hello: Hello | None = None) -> Any:
        self.send(FrameType.HEARTBEAT, 0, pack(hello or Hello([1])))
        return await self.answer(0, Welcome)

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def raw_peer(engine: Engine) -> AsyncIterator[RawPeer]:
    """A connection to a listener of its own, ungreeted."""
    server = await listen(engine, host="127.0.0.1", port=0, tls=None)
    peer = RawPeer(*await asyncio.open_connection("127.0.0.1", port_of(server)))
    try:
        yield peer
    finally:
        peer.close()
        server.close()
