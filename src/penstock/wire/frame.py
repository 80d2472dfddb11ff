"""The 0xD3 frame: 16 bytes of header, the payload, and the payload's CRC32C.

     0      1        2      3       4            12           16
    ┌──────┬────────┬──────┬───────┬────────────┬────────────┬─────────┬────────┐
    │ 0xD3 │ version│ type │ flags │ sequence   │ length     │ payload │ CRC32C │
    │      │        │      │       │ u64        │ u32        │         │ u32    │
    └──────┴────────┴──────┴───────┴────────────┴────────────┴─────────┴────────┘

Everything is big-endian. `length` counts the payload alone and is checked against the limit before
anything is kept. `sequence` is the sender's request or stream number; an answer repeats it.
"""

from __future__ import annotations

import struct
import sys
from enum import IntEnum
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.errors import Corruption, InvalidArgument

MAGIC: Final = 0xD3
VERSION: Final = 1
HEADER: Final = struct.Struct(">BBBBQI")
TRAILER: Final = struct.Struct(">I")
OVERHEAD: Final = HEADER.size + TRAILER.size
PAYLOAD_BYTES_MAX: Final = 64 << 20
LARGE_BYTES_MIN: Final = 64 << 10  # a larger frame is not kept in pieces until it is whole

Buffer = bytes | bytearray | memoryview


class FrameType(IntEnum):
    DELTA = 0  # one delta; an enqueue of one
    BATCH = 1  # entries: an enqueue, a delivery, or log batches
    ACK = 2  # a positive answer, a settlement, or returned credit
    NACK = 3  # an error answer, or a negative settlement
    BACKPRESSURE = 4  # slow down
    HEARTBEAT = 5  # greeting, liveness, lease extension
    SUBSCRIBE = 6  # open a stream, or make one call
    UNSUBSCRIBE = 7  # close a stream


class FrameFlag:
    """Plain numbers: every frame's flags are looked at, and an enum's operators are slow."""

    NONE: Final = 0
    ACK_WANTED: Final = 1
    HIGH: Final = 2
    COMPRESSED: Final = 4
    BATCHED: Final = 8


_TYPES: Final = tuple(FrameType)
CLASS_SHIFT: Final = 4  # bits 4–5 of the flags: the priority class of the most urgent delta within


def flags_of_class(priority: int | None) -> int:
    """The flags that say how urgent a frame's deltas are; HIGH goes with the two upper classes."""
    if priority is None:
        return 0
    return priority << CLASS_SHIFT | (FrameFlag.HIGH if priority <= 1 else 0)


class Frame(NamedTuple):
    type: FrameType
    flags: int
    sequence: int
    payload: memoryview


def encode(type: FrameType, sequence: int, *payload: Buffer, flags: int = 0) -> list[Buffer]:
    """The buffers of one frame, ready for `writelines`; the payload's parts are not copied."""
    length = crc = 0
    for part in payload:
        length += len(part)
        crc = crc32c(part, crc)
    if length > PAYLOAD_BYTES_MAX:
        raise InvalidArgument(
            f"a frame of {length} bytes is over {PAYLOAD_BYTES_MAX}",
            field="payload",
            limit=PAYLOAD_BYTES_MAX,
        )
    header = HEADER.pack(MAGIC, VERSION, type, flags, sequence, length)
    return [header, *payload, TRAILER.pack(crc)]


class FrameDecoder:
    """Turns received bytes into frames. Raises `Corruption` once; the connection is then over."""

    def __init__(self, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._parts: list[Buffer] = []  # received and not yet a whole frame
        self._large: bytearray | None = None  # instead of parts: a large frame, to be joined once
        self._have = 0
        self._dropped = 0  # bytes still to come of a frame that nobody wants
        self.need = HEADER.size  # bytes until the next step is possible: a header, a whole frame
        self.more = False  # `feed` has stopped at its limit

    @property
    def buffered(self) -> int:
        return self._have

    def feed(self, data: bytes, limit: int = sys.maxsize) -> list[Frame]:
        """The frames that `data` completes, as far as `limit`; if there may be `more`, the next
        call gives them, and may be made without data. Payloads are views, valid as long as they
        are held."""
        if self._dropped:
            passed = min(self._dropped, len(data))
            self._dropped -= passed
            data = data[passed:]
            if not data:
                return []
        self._have += len(data)
        if self._large is not None:
            return self._feed_large(self._large, data, limit)
        if self._have < self.need:
            self._parts.append(data)
            return []
        if self._parts:
            self._parts.append(data)
            data = self._parts[0] if not data else b"".join(self._parts)  # type: ignore[assignment]
            self._parts.clear()
        return self._split(memoryview(data), [], limit)

    def _feed_large(self, large: bytearray, data: bytes, limit: int) -> list[Frame]:
        if self._have < self.need:
            large += data
            return []
        view, missing = memoryview(data), self.need - len(large)
        large += view[:missing]
        self._large = None
        whole = self._frame(memoryview(large).toreadonly(), 0, self.need)
        return self._split(view[missing:], [whole], limit)

    def _split(self, view: memoryview, frames: list[Frame], limit: int) -> list[Frame]:
        at, end = 0, len(view)
        self.more = False
        while True:
            self.need = HEADER.size
            if end - at < HEADER.size:
                break
            if len(frames) >= limit:
                self.more = True
                break
            self.need = whole = self._frame_size(view, at)
            if end - at < whole:
                break
            frames.append(self._frame(view, at, whole))
            at += whole
        self._have = end - at
        if self.more:
            self._parts.append(view[at:])
        elif self.need > LARGE_BYTES_MIN:
            self._large = bytearray(view[at:])
        elif at < end:
            self._parts.append(bytes(view[at:]))
        return frames

    def drop(self) -> int:
        """Let go of the frame whose header is here; what is to come of it is passed over. Returns
        its number."""
        sequence: int = HEADER.unpack_from(self._large or self._parts[0])[4]
        self._dropped = self.need - self._have
        self._parts.clear()
        self._large = None
        self._have, self.need = 0, HEADER.size
        return sequence

    def _frame_size(self, view: memoryview, at: int) -> int:
        magic, version, type, _, _, length = HEADER.unpack_from(view, at)
        if magic != MAGIC:
            raise Corruption(f"a frame starts with 0x{magic:02X}, not 0xD3")
        if version != VERSION:
            raise Corruption(f"frame version {version} is not {VERSION}")
        if type > FrameType.UNSUBSCRIBE:
            raise Corruption(f"frame type {type} is unknown")
        if length > self.payload_bytes_max:
            raise Corruption(f"a frame of {length} bytes is over {self.payload_bytes_max}")
        return OVERHEAD + int(length)

    @staticmethod
    def _frame(view: memoryview, at: int, whole: int) -> Frame:
        _, _, type, flags, sequence, _ = HEADER.unpack_from(view, at)
        payload = view[at + HEADER.size : at + whole - TRAILER.size]
        (crc,) = TRAILER.unpack_from(view, at + whole - TRAILER.size)
        if crc32c(payload) != crc:
            raise Corruption("a frame's payload does not match its CRC")
        return Frame(_TYPES[type], flags, sequence, payload)
