"""Frames: round trips in any pieces, and every kind of damage refused before memory is spent."""

import struct
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import Corruption, InvalidArgument
from penstock.wire.frame import (
    HEADER,
    FrameDecoder,
    FrameFlag,
    FrameType,
    encode,
    flags_of_class,
)


def frame_bytes(
    type: FrameType = FrameType.BATCH, sequence: int = 7, payload: bytes = b"x"
) -> bytes:
    return b"".join(encode(type, sequence, payload, flags=1))


def test_the_documented_bytes() -> None:
    assert frame_bytes(FrameType.ACK, 258, b"ok").hex() == (
        "d30102010000000000000102000000026f6b6ecb6070"
    )


@given(
    frames=st.lists(
        st.tuples(st.sampled_from(FrameType), st.integers(0, 2**64 - 1), st.binary(max_size=300)),
        min_size=1,
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
)
def test_frames_survive_any_cutting(frames: list, cuts: list[int]) -> None:
    data = b"".join(b"".join(encode(t, s, p)) for t, s, p in frames)
    decoder, found = FrameDecoder(), []
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    for a, b in pairwise(edges):
        found += decoder.feed(data[a:b])
    assert [(f.type, f.sequence, bytes(f.payload)) for f in found] == frames
    assert decoder.buffered == 0


@given(data=st.binary(max_size=600))
@example(data=b"\xd3\x01\x01\x00" + bytes(8) + b"\xff\xff\xff\xff")
def test_noise_is_refused_or_waited_for_but_never_accepted_wrongly(data: bytes) -> None:
    decoder = FrameDecoder(payload_bytes_max=1024)
    try:
        for frame in decoder.feed(data):
            assert len(frame.payload) <= 1024
    except Corruption:
        return
    assert decoder.buffered <= 1024 + 20


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_a_different_valid_payload(position: int, bit: int) -> None:
    original = frame_bytes(payload=b"some payload that matters")
    data = bytearray(original)
    data[position % len(data)] ^= 1 << bit
    try:
        frames = FrameDecoder().feed(bytes(data))
    except Corruption:
        return
    for frame in frames:
        assert bytes(frame.payload) == b"some payload that matters"


@given(first=st.integers(16, 319), pieces=st.integers(1, 400))
def test_a_dropped_frame_is_passed_over(first: int, pieces: int) -> None:
    unwanted, wanted = frame_bytes(sequence=3, payload=bytes(300)), frame_bytes(sequence=4)
    decoder = FrameDecoder()
    assert decoder.feed(unwanted[:first]) == []
    assert (decoder.need, decoder.buffered) == (len(unwanted), first)
    assert decoder.drop() == 3 and decoder.buffered == 0
    rest = unwanted[first:] + wanted
    found = [f for at in range(0, len(rest), pieces) for f in decoder.feed(rest[at : at + pieces])]
    assert [(f.sequence, bytes(f.payload)) for f in found] == [(4, b"x")]


def test_length_is_checked_before_the_payload_arrives() -> None:
    header = HEADER.pack(0xD3, 1, 1, 0, 1, 5000)
    with pytest.raises(Corruption, match="over 4096"):
        FrameDecoder(payload_bytes_max=4096).feed(header)


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [(0, 0xD4, "not 0xD3"), (1, 2, "version"), (2, 8, "type"), (-1, 0, "CRC")],
)
def test_damage_is_named(position: int, value: int, reason: str) -> None:
    data = bytearray(frame_bytes())
    data[position] = value if data[position] != value else value + 1
    with pytest.raises(Corruption, match=reason):
        FrameDecoder().feed(bytes(data))


def test_an_oversized_frame_is_not_sent() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 31

    with pytest.raises(InvalidArgument, match="over"):
        encode(FrameType.BATCH, 1, Huge())


def test_header_is_sixteen_bytes_big_endian() -> None:
    assert HEADER.size == 16
    assert struct.unpack(">Q", frame_bytes(sequence=9)[4:12]) == (9,)


@pytest.mark.parametrize(("priority", "flags"), [(None, 0), (0, 2), (1, 18), (2, 32), (3, 48)])
def test_flags_say_the_class_and_whether_it_is_an_upper_one(
    priority: int | None, flags: int
) -> None:
    assert flags_of_class(priority) == flags
    assert bool(flags & FrameFlag.HIGH) == (priority in (0, 1))
