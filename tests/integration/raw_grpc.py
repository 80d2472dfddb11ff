"""gRPC in plain HTTP/2 frames, for callers that do what no library does."""

from __future__ import annotations

import asyncio
from typing import Any

from verification.fuzz.gateway_corpus import PREFACE, frame, grpc_headers

__all__ = ["DATA", "HEADERS", "PING", "PREFACE", "RST_STREAM", "RawGrpc", "close_all", "frame"]

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
CHUNK = 16_384


class RawGrpc:
    """One connection. What arrives is read and sorted; windows are obeyed by `send_message`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.window = 65_535
        self.windows: dict[int, int] = {}
        self.ended: dict[int, bytes] = {}  # by stream: what ended it
        self.answered: set[int] = set()  # streams of which anything has come
        self.closed = asyncio.Event()
        self._changed = asyncio.Event()
        self._next = 1
        self._initial = 65_535
        self.reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(cls, port: int) -> RawGrpc:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        return cls(reader, writer)

    def call(self, path: str, *, end: bool = False, **metadata: str) -> int:
        """Begin a call; its stream."""
        stream, self._next = self._next, self._next + 2
        self.windows[stream] = self._initial
        flags = 0x4 | (0x1 if end else 0)
        self.writer.write(frame(HEADERS, flags, stream, grpc_headers(path, **metadata)))
        return stream

    async def send_message(self, stream: int, length: int, *, sent: int) -> int:
        """The first `sent` bytes of a message of so many, as far as the windows let them; how many
        that were. It gives up when nothing has moved for a second."""
        whole = b"\x00" + length.to_bytes(4, "big")
        left, done = sent + len(whole), 0
        while left and stream not in self.ended and not self.closed.is_set():
            room = min(self.window, self.windows[stream], CHUNK, left)
            if room <= 0:
                self._changed.clear()
                try:
                    async with asyncio.timeout(1.0):
                        await self._changed.wait()
                except TimeoutError:
                    break
                continue
            piece = whole[done : done + room].ljust(room, b"x")
            self.writer.write(frame(DATA, 0, stream, piece))
            self.window -= room
            self.windows[stream] -= room
            done, left = done + room, left - room
            await self.writer.drain()
        return done

    async def _read(self) -> None:
        try:
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                stream = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
                self._on_frame(head[3], head[4], stream, payload)
                self._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            self._changed.set()

    def _on_frame(self, type: int, flags: int, stream: int, payload: bytes) -> None:
        if type == SETTINGS and not flags & 1:
            for at in range(0, len(payload), 6):
                name = int.from_bytes(payload[at : at + 2], "big")
                value = int.from_bytes(payload[at + 2 : at + 6], "big")
                if name == 4:
                    for one in self.windows:
                        self.windows[one] += value - self._initial
                    self._initial = value
            self.writer.write(frame(SETTINGS, 1, 0))
        elif type == PING and not flags & 1:
            self.writer.write(frame(PING, 1, 0, payload))
        elif type == WINDOW_UPDATE:
            size = int.from_bytes(payload, "big") & 0x7FFFFFFF
            if stream:
                self.windows[stream] = self.windows.get(stream, 0) + size
            else:
                self.window += size
        if type in (DATA, HEADERS, RST_STREAM):
            self.answered.add(stream)
        if type == RST_STREAM or (type in (DATA, HEADERS) and flags & 1):
            self.ended.setdefault(stream, payload)

    async def wait_answered(self, streams: set[int], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not streams <= self.answered and not self.closed.is_set():
                self._changed.clear()
                await self._changed.wait()

    async def wait_ended(self, stream: int, within_s: float = 60.0) -> bytes:
        async with asyncio.timeout(within_s):
            while stream not in self.ended and not self.closed.is_set():
                self._changed.clear()
                await self._changed.wait()
        return self.ended.get(stream, b"")

    async def close(self) -> None:
        self.reading.cancel()
        self.writer.transport.abort()
        await asyncio.wait((self.reading,))


async def close_all(connections: list[Any]) -> None:
    for connection in connections:
        await connection.close()
