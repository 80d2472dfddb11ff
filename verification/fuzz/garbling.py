"""A proxy before a node that changes what other nodes and it say to each other, now and then."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import msgspec

from penstock.wire.frame import Frame, FrameDecoder, FrameFlag
from verification.fuzz.corpus import Sent
from verification.fuzz.mutation import PAYLOADS, frame_bytes

_LENGTH_BYTES: Final = 4


class Garbler:
    """Listens at `port` for the node at `target`; `share` of the frames that pass are changed."""

    def __init__(self, port: int, target: int, *, seed: str) -> None:
        self._port, self._target, self.share = port, target, 0.0
        self._dice = random.Random(seed)
        self._server: asyncio.Server | None = None
        self.garbled = 0  # frames

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass(reader, far_writer))
            group.create_task(self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until either end is gone. Greetings pass as they are."""
        decoder, greeted = FrameDecoder(), False
        try:
            while data := await reader.read(1 << 16):
                for frame in decoder.feed(data):
                    writer.write(self._changed(frame) if greeted else _bytes(frame))
                    greeted = True
                await writer.drain()
        except OSError:
            pass  # it is over
        finally:
            writer.close()

    def _changed(self, frame: Frame) -> bytes:
        dice = self._dice
        sent = None if frame.flags & FrameFlag.COMPRESSED else _parts(frame)
        if sent is None or dice.random() >= self.share:
            return _bytes(frame)
        self.garbled += 1
        return dice.choice(PAYLOADS)(dice, sent)


def _bytes(frame: Frame) -> bytes:
    return frame_bytes(Sent(frame.type, frame.flags, frame.sequence, None, bytes(frame.payload)))


def _parts(frame: Frame) -> Sent | None:
    """A frame as its control message and its data; None if it has none."""
    payload = bytes(frame.payload)
    if len(payload) <= _LENGTH_BYTES:
        return None
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "big")
    control = msgspec.msgpack.decode(payload[_LENGTH_BYTES:end])
    return Sent(frame.type, frame.flags, frame.sequence, control, payload[(end + 7) & ~7 :])
