"""The columns never say yes where `check` says no, and say yes to what is common."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.demo.corpus import ALL_OPS, CorpusOptions, generate
from penstock.errors import InvalidArgument
from penstock.model.delta import Delta, Op, check, encode
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import _sound

NOW_MS = 4_000_000_000_000
DIMENSIONS = 48


def payloads(**options: object) -> list[bytes]:
    chosen = CorpusOptions(
        deltas=400, vectors=40, dimensions=DIMENSIONS, components=5, duplicates=0.0, disorder=0.0,
        seed=3, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    corpus = generate(chosen)
    return [bytes(p) for p in corpus.chunk(0, 400).payloads.tolist()]


def is_valid(payload: bytes) -> bool:
    try:
        check(payload, dimensions=DIMENSIONS, now_ms=NOW_MS)
    except InvalidArgument:
        return False
    return True


def is_sound(payload: bytes, *, now_ms: int = NOW_MS) -> bool:
    """What the columns say, without `check` being asked."""
    try:
        return _sound(DeltaBatch.of([payload] * 2), DIMENSIONS, now_ms)
    except InvalidArgument:
        return False


def test_common_deltas_are_sound() -> None:
    assert all(is_sound(p) for p in payloads(origins=1))


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_delta_is_never_sound(seed: int) -> None:
    rng = random.Random(seed)
    sound = 0
    for payload in payloads(concurrent=0.1, ops=ALL_OPS):
        for _ in range(5):
            bad = bytearray(payload)
            for _ in range(rng.randint(1, 3)):
                bad[rng.randrange(len(bad))] = rng.choice(
                    (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
                )
            if rng.random() < 0.1:
                bad = bad[: rng.randrange(len(bad))]
            if is_sound(bytes(bad)):
                sound += 1
                assert is_valid(bytes(bad)), bytes(bad).hex()
    assert sound  # some damage leaves a delta that is as good


def test_numbers_that_are_not_are_seen() -> None:
    few = next(p for p in payloads(origins=1) if p[1] == 2)
    whole = next(p for p in payloads(origins=1, ops=ALL_OPS) if p[1] == 1)
    for payload, values_at in ((few, 112 + 2 * 5), (whole, 112)):
        for wrong in (np.inf, -np.inf, np.nan):
            bad = bytearray(payload)
            bad[values_at + 4 : values_at + 8] = np.float32(wrong).tobytes()
            assert not is_sound(bytes(bad)) and not is_valid(bytes(bad))


def test_a_clock_that_is_ahead_is_seen() -> None:
    (payload, *_) = payloads(origins=1)
    assert not is_sound(payload, now_ms=0)


PLAIN = Delta(
    delta_id=b"d" * 16, namespace="a", vector_id="v", op=Op.SPARSE, origin="me", time=1 << 20,
    parent=b"p" * 16, clock={"me": 3}, indices=np.array([1, 5]), values=np.array([0.5, 2.0]),
)  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"values": np.array([1e300, 1.0])}, {"values": np.array([np.nan, 1.0])},
        {"values": np.array([np.inf, -np.inf])}, {"values": np.array([1.0])},
        {"values": np.array(["a", "b"])}, {"values": None}, {"indices": np.array([5, 1])},
        {"indices": np.array([-1, 5])}, {"indices": np.array([1, DIMENSIONS])},
        {"indices": np.array([1.0, 5.0])}, {"indices": None}, {"op": Op.SCALE}, {"time": 0},
        {"delta_id": bytes(16)}, {"delta_id": b"short"}, {"parent": bytes(16)},
        {"parent": b"d" * 16}, {"clock": {"me": 0}}, {"clock": {"you": 1}}, {"priority": 9},
        {"source": 99}, {"namespace": ""}, {"vector_id": "a\0b"}, {"vector_id": "x" * 2000},
        {"origin": "much too long a name", "clock": {"much too long a name": 1}},
        {"metadata": {"a": 1}}, {"namespace": None},
    ],
)  # fmt: skip
def test_what_a_topic_would_refuse_is_not_laid_out(wrong: dict[str, Any]) -> None:
    assert is_sound(encode(PLAIN, dimensions=DIMENSIONS))
    delta = msgspec.structs.replace(PLAIN, **wrong)
    with pytest.raises(InvalidArgument):
        encode(delta, dimensions=DIMENSIONS)
