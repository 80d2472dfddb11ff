"""Encodings of maps that no reader may be given: what a hostile or a careless producer sends as the
headers of a message, or as the metadata of a delta."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

from penstock.model.plain import DEPTH_MAX

_pack: Final = msgspec.msgpack.encode


def nested(depth: int) -> bytes:
    """A map whose only value nests so deep that there are `depth` levels in all."""
    return b"\x81\xa1a" + b"\x91" * (depth - 2) + b"\x90"


MALFORMED_MAPS: Final = {
    "cut-short": b"\x81\xa1a",
    "bytes-follow": _pack({"a": "b"}) + b"\0",
    "one-level-too-deep": nested(DEPTH_MAX + 1),
    "980-deep": nested(980),
    "10000-deep": nested(10_000),
    "10000-maps-deep": b"\x81\xa1a" * 4_000 + b"\xc0",
    "extension": _pack({"a": msgspec.msgpack.Ext(5, b"five")}),
    "timestamp": _pack({"a": datetime(2026, 1, 1, tzinfo=UTC)}),
    "name-is-a-number": _pack({1: "x"}),
    "name-is-bytes": _pack({b"a": "x"}),
    "name-is-an-array": b"\x81\x90\x01",
    "inner-name-is-a-number": _pack({"a": {1: "x"}}),
    "array": _pack(["a"]),
    "text": _pack("abc"),
    "number": b"\x07",
    "text-is-not-utf-8": b"\x81\xa1a\xa2\xff\xfe",
    "name-is-not-utf-8": b"\x81\xa2\xff\xfe\xa1a",
    "huge-array": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "huge-map": b"\xdf\xff\xff\xff\xff\xa1a",
    "huge-text": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "no-opcode": b"\x81\xa1a\xc1",
    "no-msgpack": b"\xff\xfe\xfd",
    "length-is-cut-short": b"\x81\xa1a\xda\x00",
    "many-values": _pack({"a": [[i] for i in range(2_000)]}),
    "many-flat-values": _pack({str(i): i for i in range(1_100)}),
}
