"""Frames that pass by, cut at every place."""

import random

import pytest
from tests.integration.raw_grpc import DATA, HEADERS, PING, PREFACE, RST_STREAM, frame

from penstock.server.grpc.front import AnswerFrames, RequestFrames


def message(length: int) -> bytes:
    return b"\x00" + length.to_bytes(4, "big") + b"x" * length


def fed(data: bytes, *, step: int = 1 << 30) -> RequestFrames:
    frames = RequestFrames()
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        assert frames.feed(piece, 0, frames_max=1 << 30) == len(piece)
    return frames


BODY = message(3000)
CALL = frame(HEADERS, 0x4, 1, b"h" * 40)


@pytest.mark.parametrize("step", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize(
    ("frames", "held"),
    [
        (frame(DATA, 0, 1, BODY), 0),
        (frame(DATA, 0, 1, BODY[:3]), 3),
        (frame(DATA, 0, 1, BODY[:1000]), 1000),
        (frame(DATA, 0, 1, BODY[:1000]) + frame(PING, 0, 0, bytes(8)), 1000),
        (frame(DATA, 0, 1, BODY[:1000]) + frame(DATA, 0, 1, BODY[1000:]), 0),
        (frame(DATA, 0, 1, BODY + BODY[:10]), 10),
        (frame(DATA, 0x8, 1, b"\x05" + BODY[:1000] + bytes(5)), 1000),
        (frame(DATA, 0, 1, BODY[:1000]) + frame(RST_STREAM, 0, 1, bytes(4)), 0),
        (frame(DATA, 0x1, 1, BODY[:1000]), 0),
        (frame(DATA, 0, 1, BODY[:1000]) + frame(DATA, 0x1, 1), 0),
        (frame(DATA, 0, 1, BODY[:1000]) + frame(DATA, 0, 3, BODY[:500]), 1500),
        (frame(DATA, 0, 1, message(0)), 0),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_counted(frames: bytes, held: int, step: int) -> None:
    found = fed(PREFACE + CALL + frames, step=step)
    assert found.held == held == sum(one.came for one in found.unfinished.values())
    assert found.greeted


def test_a_stream_that_was_answered_waits_for_nothing() -> None:
    requests = fed(PREFACE + CALL + frame(DATA, 0, 1, BODY[:1000]))
    answers = AnswerFrames(requests)
    assert requests.open == {1} and requests.held
    refusal = frame(HEADERS, 0x4, 1, b"head") + frame(HEADERS, 0x5, 1, b"trailers")
    for byte in refusal:
        answers.feed(bytes((byte,)), 0, frames_max=9)
    assert requests.open == set() and requests.held == 0


def test_frames_are_read_a_few_at_a_time() -> None:
    frames, data = RequestFrames(), PREFACE + frame(PING, 0, 0, bytes(8)) * 10
    at = frames.feed(data, 0, frames_max=4)
    assert at < len(data)
    assert frames.feed(data, at, frames_max=99) == len(data)


def test_any_bytes_are_read_along() -> None:
    dice = random.Random(7)
    for _ in range(300):
        found = fed(PREFACE + dice.randbytes(dice.randrange(400)), step=dice.randrange(1, 50))
        assert found.held == sum(one.came for one in found.unfinished.values()) >= 0
