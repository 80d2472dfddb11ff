"""Control messages that are not what they should be, and how that is said."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from penstock.client.queue.producer import ids_in
from penstock.errors import Corruption, InvalidArgument
from penstock.model.ids import MessageId
from penstock.wire.messages import (
    OFFERS_MAX,
    OPENING_BYTES_MAX,
    ROUTES_MAX,
    Call,
    Duplicate,
    Enqueue,
    Enqueued,
    Grant,
    Hello,
    OpenLease,
    OpenLog,
    OpenSubscription,
    Placed,
    Settle,
    pack,
    unpack,
)

Open: Any = OpenLease | OpenLog | OpenSubscription | Call


def control(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


@pytest.mark.parametrize(
    ("message", "type", "field", "limit"),
    [
        (OpenSubscription("t", 0, ["*"] * 65), Open, "routes", ROUTES_MAX),
        (OpenSubscription("t", "0"), Open, "partition", None),  # type: ignore[arg-type]
        (OpenLease("t" * 5000, 1), Open, "topic", 4096),
        (Call("x", 3), Open, "arguments", None),  # type: ignore[arg-type]
        (Hello([1] * 65), Hello, "versions", OFFERS_MAX),
        (Settle("t", [[0, 1, "x"]]), Settle, "parts", None),  # type: ignore[list-item]
        (["t"], Enqueue, "control", None),
        (["nothing", 1], Open, "control", None),
        ({}, Open, "control", None),
        ([], Grant, "control", None),
    ],
)
def test_a_refusal_names_field_and_limit(
    message: Any, type: Any, field: str, limit: int | None
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        unpack(pack(message), type)
    assert (refused.value.field, refused.value.limit) == (field, limit)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x93\xa4call\xa1x\x81\xa1a" + b"\x91" * 100_000,  # deeper than anybody reads
        b"\x93\xa4call\xa2\xff\xfe\x80",  # no UTF-8
        b"\xdd\xff\xff\xff\xff",  # elements that never come
        b"\xc1",
        b"",
    ],
)
def test_what_is_not_msgpack_is_damage(raw: bytes) -> None:
    with pytest.raises(Corruption):
        unpack(control(raw), Open)


def test_a_control_has_so_many_bytes() -> None:
    with pytest.raises(InvalidArgument) as refused:
        unpack(pack(Call("x", {"a": "b" * 200})), Call, bytes_max=100)
    assert (refused.value.field, refused.value.limit) == ("control", 100)
    assert OPENING_BYTES_MAX == 1 << 20
    with pytest.raises(Corruption, match="does not fit"):
        unpack(struct.pack(">I", 50), Call)


def test_fields_that_a_later_version_has_are_left_out() -> None:
    assert unpack(pack([5, 6, 7, "new"]), Grant)[0] == Grant(5, 6, 7)
    assert unpack(pack([5]), Grant)[0] == Grant(5)


def test_every_entry_gets_its_own_id_in_the_order_of_the_request() -> None:
    enqueued = Enqueued(
        7,
        [Placed(0, 2, 0, 5, 100), Placed(3, 1, 1, 9, 100)],
        [Duplicate(2, 1, 4, 50)],
    )
    found = [MessageId.parse(text) for text in ids_in(enqueued, 4)]
    assert [(m.partition, m.sequence) for m in found] == [(0, 5), (0, 6), (1, 4), (1, 9)]
    assert found[2].time_ms == 50
