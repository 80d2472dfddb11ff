"""The 0xD3 frame: 16 bytes of header, the payload, and the payload's CRC32C.

     0      1        2      3       4            12           16
    ┌──────┬────────┬──────┬───────┬────────────┬────────────┬─────────┬────────┐
    │ 0xD3 │ version│ type │ flags │ sequence   │ length     │ payload │ CRC32C │
    │      │        │      │       │ u64        │ u32        │         │ u32    │
    └──────┴────────┴──────┴───────┴────────────┴────────────┴─────────┴────────┘

Everything is big-endian. `length` counts the payload alone and is checked against the limit before
anything is kept. `sequence` is the sender's request or stream number; an answer repeats it.

A payload is

    u32 control length | control (msgpack) | zero padding to 8 bytes | data …

so that columns in `data` stay aligned. `messages` has what a control may be.

Where the greeting has agreed on a codec, a payload may be compressed:

    u8 codec | 3 zeros | u32 length of the payload before, big-endian | compressed payload

That length is checked before anything is decompressed, and no more than that comes out.

An `Outbox` sends the frames of one turn of the loop in one write. A transport writes at once what
it is given. Between nodes that is a system call for every slice and every answer of every
partition, and each wakes the other side for little.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, TypeVar, get_args

import msgspec
from crc32c import crc32c

from penstock.errors import Corruption, InvalidArgument
from penstock.model.batch import Codec, compress, decompress
from penstock.model.columns import Buffer

MAGIC: Final = 0xD3
VERSION: Final = 1
VERSIONS: Final = (VERSION,)  # of the protocol, that this software speaks
HEADER: Final = struct.Struct(">BBBBQI")
TRAILER: Final = struct.Struct(">I")
OVERHEAD: Final = HEADER.size + TRAILER.size
PAYLOAD_BYTES_MAX: Final = 64 << 20
CODECS: Final = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4}  # as a greeting names them
CONTROL_BYTES_MAX: Final = 4 << 20
COMPRESS_BYTES_MIN: Final = 1024  # smaller payloads stay as they are
_LENGTH: Final = struct.Struct(">I")
_COMPRESSED: Final = struct.Struct(">B3xI")

M = TypeVar("M")
_encoder: Final = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


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

    ACK_WANTED: Final = 1
    HIGH: Final = 2
    COMPRESSED: Final = 4
    BATCHED: Final = 8


_TYPES: Final = tuple(FrameType)
_TYPE_LAST: Final = len(_TYPES) - 1
_SHOWN: Final = 8  # offered versions that a refusal repeats
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


def choose_version(offered: Sequence[int]) -> int:
    """The highest version that both ends speak. The frames of the greeting itself are version 1,
    whatever is offered in them; so ends of different ages understand at least why they do not."""
    common = set(offered).intersection(VERSIONS)
    if not common:
        shown = ", ".join(map(str, offered[:_SHOWN])) or "none"
        spoken = ", ".join(map(str, VERSIONS))
        raise InvalidArgument(
            f"versions {spoken} are spoken here, not {shown}",
            field="versions",
            versions=list(VERSIONS),
        )
    return max(common)


class FrameDecoder:
    """Turns received bytes into frames. Raises `Corruption` once; the connection is then over."""

    def __init__(self, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._kept: bytearray | memoryview = bytearray()  # received and not yet a whole frame
        self.buffered = 0  # bytes of it
        self._dropped = 0  # bytes still to come of a frame that nobody wants
        self.need = HEADER.size  # bytes until the next step is possible: a header, a whole frame
        self.more = False  # `feed` has stopped at its limit

    def feed(self, data: bytes, limit: int = sys.maxsize) -> list[Frame]:
        """The frames that `data` completes, as far as `limit`; if there may be `more`, the next
        call gives them, and may be made without data. Payloads are views, valid as long as they
        are held."""
        if self._dropped:
            passed = min(self._dropped, len(data))
            self._dropped -= passed
            data = data[passed:]
        self.buffered += len(data)
        received: Buffer = data
        if self._kept or self.buffered < self.need:
            received = self._kept
            if data:
                received = received if isinstance(received, bytearray) else bytearray(received)
                received += data
            self._kept = received
            if self.buffered < self.need:
                return []
        return self._split(memoryview(received).toreadonly(), limit)

    def _split(self, view: memoryview, limit: int) -> list[Frame]:
        frames: list[Frame] = []
        at, end, need = 0, len(view), HEADER.size
        self.more = False
        while end - at >= HEADER.size:
            if len(frames) >= limit:
                self.more = True
                break
            magic, version, type, flags, sequence, length = HEADER.unpack_from(view, at)
            if magic != MAGIC:
                raise Corruption(f"a frame starts with 0x{magic:02X}, not 0xD3")
            if version != VERSION:
                raise Corruption(f"frame version {version} is not {VERSION}")
            if type > _TYPE_LAST:
                raise Corruption(f"frame type {type} is unknown")
            if length > self.payload_bytes_max:
                raise Corruption(f"a frame of {length} bytes is over {self.payload_bytes_max}")
            if end - at < OVERHEAD + length:
                need = OVERHEAD + length
                break
            trailer = at + HEADER.size + length
            payload = view[at + HEADER.size : trailer]
            if crc32c(payload) != TRAILER.unpack_from(view, trailer)[0]:
                raise Corruption("a frame's payload does not match its CRC")
            frames.append(Frame(_TYPES[type], flags, sequence, payload))
            at = trailer + TRAILER.size
        self.buffered, self.need = end - at, need
        # What is not looked at yet need not be copied; what waits for bytes grows by them.
        self._kept = view[at:] if self.more else bytearray(view[at:])
        return frames

    def drop(self) -> int:
        """Let go of the frame whose header is here; what is to come of it is passed over. Returns
        its number."""
        sequence: int = HEADER.unpack_from(self._kept)[4]
        self._dropped = self.need - self.buffered
        self._kept = bytearray()
        self.buffered, self.need = 0, HEADER.size
        return sequence


# --- what stands in a payload ---


def pack(control: Any) -> bytes:
    body = _encoder.encode(control)
    return b"".join((_LENGTH.pack(len(body)), body, bytes(-(len(body) + _LENGTH.size) & 7)))


def unpack(
    payload: Buffer, type: type[M], *, bytes_max: int = CONTROL_BYTES_MAX
) -> tuple[M, memoryview]:
    """The control message and the data behind it. `type` may be a union of tagged messages."""
    view = memoryview(payload)
    if len(view) < _LENGTH.size:
        raise Corruption("a payload is shorter than its control length")
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    if length > bytes_max:
        raise InvalidArgument(
            f"a control message of {length} bytes is over {bytes_max}",
            field="control",
            limit=bytes_max,
        )
    if end > len(view):
        raise Corruption(f"a control message of {length} bytes does not fit its payload")
    decoder = _decoders.get(type)
    if decoder is None:
        decoder = _decoders[type] = msgspec.msgpack.Decoder(type)
    try:
        control = decoder.decode(view[_LENGTH.size : end])
    except msgspec.ValidationError as error:
        raise _malformed(type, view[_LENGTH.size : end], error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corruption(f"a control message is not msgpack: {error}") from error
    return control, view[(end + 7) & ~7 :]


_PLACE: Final = re.compile(r"\$\[(\d+)\]")
_LIMIT: Final = re.compile(r"<= (\d+)")


def _malformed(type: Any, control: memoryview, error: msgspec.ValidationError) -> InvalidArgument:
    """The refusal of a message, with the field that is wrong and the limit that it passes."""
    known = [t for t in get_args(type) or (type,) if issubclass(t, msgspec.Struct)]
    found = known[0] if len(known) == 1 else next((t for t in known if _is_a(t, control)), None)
    if found is None:
        return InvalidArgument(f"malformed control message: {error}", field="control")
    place, limit = _PLACE.search(str(error)), _LIMIT.search(str(error))
    fields = found.__struct_fields__
    at = int(place[1]) - (found.__struct_config__.tag is not None) if place else -1
    field = fields[at] if 0 <= at < len(fields) else "control"
    return InvalidArgument(
        f"malformed {found.__name__}, {field}: {error}",
        field=field,
        limit=int(limit[1]) if limit else None,
    )


def _is_a(type: Any, control: memoryview) -> bool:
    tag = str(type.__struct_config__.tag).encode()
    return bytes(control[:32]).find(bytes((0xA0 | len(tag),)) + tag, 1, 6 + len(tag)) > 0


# --- compressed payloads ---


def compressed(codec: Codec, payload: Sequence[Buffer]) -> list[Buffer] | None:
    """The compressed payload; None if it is too small, or does not shrink by an eighth."""
    size = sum(map(len, payload))
    if size < COMPRESS_BYTES_MIN:
        return None
    packed = compress(codec, payload[0] if len(payload) == 1 else b"".join(payload))
    if len(packed) + _COMPRESSED.size > size - size // 8:
        return None
    return [_COMPRESSED.pack(codec, size), packed]


def raw_length(frame: Frame) -> int:
    """How long a frame's payload is once it is decompressed, as it says."""
    if not frame.flags & FrameFlag.COMPRESSED:
        return len(frame.payload)
    if len(frame.payload) < _COMPRESSED.size:
        raise Corruption("a compressed frame is shorter than its own header")
    length: int = _COMPRESSED.unpack_from(frame.payload)[1]
    return length


def expanded(frame: Frame, codec: Codec, *, bytes_max: int) -> Frame:
    """The frame with its payload as it was; `codec` is the one that was agreed on."""
    if not frame.flags & FrameFlag.COMPRESSED:
        return frame
    length = raw_length(frame)
    if codec is Codec.NONE or frame.payload[0] != codec:
        raise Corruption(f"a frame is compressed by codec {frame.payload[0]}, not {codec:d}")
    if length > bytes_max:
        raise Corruption(f"a compressed frame of {length} bytes is over {bytes_max}")
    raw = decompress(codec, frame.payload[_COMPRESSED.size :], length + 1)
    if len(raw) != length:
        raise Corruption(f"a compressed frame is not of the {length} bytes that it says")
    return Frame(frame.type, frame.flags & ~FrameFlag.COMPRESSED, frame.sequence, memoryview(raw))


GATHER_BYTES_MAX: Final = 64 << 10  # more is written at once, so that the transport can say: enough


class WireTransport(Protocol):
    """What is needed of a transport of asyncio."""

    def writelines(self, list_of_data: Iterable[Buffer], /) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int: ...


class Outbox:
    """A transport before a transport; `soon` calls back at the end of the turn."""

    def __init__(
        self, transport: WireTransport, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._transport, self._soon = transport, soon
        self._gathered: list[Buffer] = []
        self._bytes = 0
        self.is_closing = transport.is_closing
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def writelines(self, list_of_data: Iterable[Buffer], /) -> None:
        buffers = list(list_of_data)
        if not self._gathered:
            self._soon(self.flush)
        self._gathered += buffers
        self._bytes += sum(map(len, buffers))
        if self._bytes >= GATHER_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        if self._gathered:
            gathered, self._gathered, self._bytes = self._gathered, [], 0
            if not self._transport.is_closing():
                self._transport.writelines(gathered)

    def get_write_buffer_size(self) -> int:
        return self._bytes + self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the transport after everything that was handed over is written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._gathered.clear()
        self._transport.abort()
