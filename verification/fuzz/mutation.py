"""What may be wrong with a frame: its fields, its control message, its data, its bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec
from crc32c import crc32c

from penstock.wire.frame import HEADER, MAGIC, TRAILER, VERSION
from verification.fuzz.corpus import Sent

_LENGTH_BYTES: Final = 4
# What counters, sizes and names go wrong at.
EXTREMES: Final[tuple[Any, ...]] = (
    0, 1, -1, 2, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0.5,
    float("nan"), None, True, "", "x", "x" * 5000, "\x00", "ä" * 700, b"", b"\xff" * 40, [], [[]],
    [0] * 200, {}, {"a": {"b": []}}, "*", "now",
)  # fmt: skip


def frame_bytes(sent: Sent) -> bytes:
    payload, flags = sent.payload()
    head = HEADER.pack(MAGIC, VERSION, sent.type, flags, sent.number, len(payload))
    return head + payload + TRAILER.pack(crc32c(payload))


def mutated(dice: random.Random, sent: Sent) -> bytes:
    """The frame's bytes with something wrong in them; often with a CRC that fits."""
    return dice.choice(MUTATIONS)(dice, sent)


def _tree(dice: random.Random, value: Any, depth: int = 0) -> Any:
    """The same value with one thing in it replaced, dropped or doubled."""
    if isinstance(value, list) and value and (depth == 0 or dice.random() < 0.7):
        at = dice.randrange(len(value))
        how = dice.randrange(6)
        if how == 0:
            return value[:at] + value[at + 1 :]
        if how == 1:
            return value[:at] + [value[at]] * dice.choice((2, 100, 20_000)) + value[at + 1 :]
        return [*value[:at], _tree(dice, value[at], depth + 1), *value[at + 1 :]]
    if isinstance(value, dict) and value and dice.random() < 0.7:
        key = dice.choice(list(value))
        return {**value, key: _tree(dice, value[key], depth + 1)}
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.3:
        return value + dice.choice((-1, 1, 8))
    return dice.choice(EXTREMES)


def control(dice: random.Random, sent: Sent) -> bytes:
    """A control message of the wrong shape."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.control))
    return frame_bytes(sent._replace(control=_tree(dice, plain)))


def data(dice: random.Random, sent: Sent) -> bytes:
    """Columns, tokens or a delta with some bytes changed, cut or added."""
    return frame_bytes(sent._replace(data=_scrambled(dice, sent.data)))


def payload(dice: random.Random, sent: Sent) -> bytes:
    """Any bytes of the payload, under a CRC that fits."""
    plain, flags = sent.payload()
    wrong = _scrambled(dice, plain)
    head = HEADER.pack(MAGIC, VERSION, sent.type, flags, sent.number, len(wrong))
    return head + wrong + TRAILER.pack(crc32c(wrong))


def control_length(dice: random.Random, sent: Sent) -> bytes:
    plain, flags = sent.payload()
    length = dice.choice((0, 1, len(plain), 2**31, 2**32 - 1, 4 << 20, dice.randrange(1 << 16)))
    wrong = length.to_bytes(_LENGTH_BYTES, "big") + plain[_LENGTH_BYTES:]
    head = HEADER.pack(MAGIC, VERSION, sent.type, flags, sent.number, len(wrong))
    return head + wrong + TRAILER.pack(crc32c(wrong))


def header(dice: random.Random, sent: Sent) -> bytes:
    """Another type, other flags, another number or length; bytes that are not a frame's."""
    plain, flags = sent.payload()
    fields = [MAGIC, VERSION, sent.type, flags, sent.number, len(plain)]
    at = dice.choice((0, 1, 2, 2, 3, 3, 3, 4, 4, 5))
    fields[at] = dice.randrange(256) if at < 4 else dice.choice((0, 2**32 - 1, 64 << 20, 17))
    return HEADER.pack(*fields) + plain + TRAILER.pack(crc32c(plain))


def raw(dice: random.Random, sent: Sent) -> bytes:
    """Bytes changed on the way."""
    return _scrambled(dice, frame_bytes(sent))


def cut(dice: random.Random, sent: Sent) -> bytes:
    whole = frame_bytes(sent)
    return whole[: dice.randrange(len(whole))]


def noise(dice: random.Random, sent: Sent) -> bytes:
    return dice.randbytes(dice.randrange(1, 4096))


def nested(dice: random.Random, sent: Sent) -> bytes:
    """Arrays in arrays, or a count of elements that never come."""
    deep = dice.choice((b"\x91" * 50_000, b"\xdd\xff\xff\xff\xff", b"\x81\xa1a" * 20_000, b"\xc1"))
    wrong = len(deep).to_bytes(_LENGTH_BYTES, "big") + deep
    head = HEADER.pack(MAGIC, VERSION, sent.type, sent.flags & 1, sent.number, len(wrong))
    return head + wrong + TRAILER.pack(crc32c(wrong))


def _scrambled(dice: random.Random, plain: bytes) -> bytes:
    found = bytearray(plain)
    for _ in range(dice.choice((1, 1, 2, 8))):
        how, at = dice.randrange(4), dice.randrange(len(found) + 1)
        if how == 0 and found:
            found[at % len(found)] ^= 1 << dice.randrange(8)
        elif how == 1 and found:
            found[at % len(found)] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif how == 2:
            del found[at : at + dice.choice((1, 8, 1000))]
        else:
            found[at:at] = dice.randbytes(dice.choice((1, 8, 64)))
    return bytes(found)


MUTATIONS: Final[tuple[Callable[[random.Random, Sent], bytes], ...]] = (
    control, control, control, data, data, payload, control_length, header, raw, cut, noise, nested,
)  # fmt: skip
# Those of a payload alone: the frame itself is sound.
PAYLOADS: Final = (control, control, control, data, payload, control_length)
