"""Frames whose payload is compressed, where the greeting has agreed on a codec.

    u8 codec | 3 zeros | u32 length of the payload before, big-endian | compressed payload

The length is checked before anything is decompressed, and no more than that comes out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from penstock.errors import Corruption
from penstock.model.batch import Codec, compress, decompress
from penstock.wire.frame import Buffer, Frame, FrameFlag

CODECS: Final = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4}  # as a greeting names them
COMPRESS_BYTES_MIN: Final = 1024  # smaller payloads stay as they are
_HEAD: Final = struct.Struct(">B3xI")


def compressed(codec: Codec, payload: Sequence[Buffer]) -> list[Buffer] | None:
    """The compressed payload; None if it is too small, or does not shrink by an eighth."""
    size = sum(map(len, payload))
    if size < COMPRESS_BYTES_MIN:
        return None
    packed = compress(codec, payload[0] if len(payload) == 1 else b"".join(payload))
    if len(packed) + _HEAD.size > size - size // 8:
        return None
    return [_HEAD.pack(codec, size), packed]


def raw_length(frame: Frame) -> int:
    """How long a frame's payload is once it is decompressed, as it says."""
    if not frame.flags & FrameFlag.COMPRESSED:
        return len(frame.payload)
    if len(frame.payload) < _HEAD.size:
        raise Corruption("a compressed frame is shorter than its own header")
    length: int = _HEAD.unpack_from(frame.payload)[1]
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
    raw = decompress(codec, frame.payload[_HEAD.size :], length + 1)
    if len(raw) != length:
        raise Corruption(f"a compressed frame is not of the {length} bytes that it says")
    return Frame(frame.type, frame.flags & ~FrameFlag.COMPRESSED, frame.sequence, memoryview(raw))
