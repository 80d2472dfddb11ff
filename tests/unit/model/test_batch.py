"""Batches: what was sealed is what is read; any change is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Corruption
from penstock.model import batch as codec
from penstock.model.batch import SCHEMAS, Batch, Codec, Kind, seal, verify_chain


def sealed(payloads: list[bytes], chain: int = 5, codec_: Codec = Codec.NONE) -> Batch:
    raw = SCHEMAS[Kind.ENQ].encode(
        len(payloads), {"payload": payloads, "priority": np.arange(len(payloads))}
    )
    body = codec.compress(codec_, raw)
    return seal(
        Kind.ENQ, body, topic=1, partition=2, epoch=3, epoch_previous=2, first=10,
        count=len(payloads), time_ms=1_700_000_000_000, chain_previous=chain, codec=codec_,
        raw_length=len(raw),
    )  # fmt: skip


@given(payloads=st.lists(st.binary(max_size=60), min_size=1, max_size=20))
@pytest.mark.parametrize("codec_", list(Codec))
def test_round_trip(codec_: Codec, payloads: list[bytes]) -> None:
    batch = sealed(payloads, codec_=codec_)
    found = codec.decode(batch.encode())
    verify_chain(found, 5)
    assert (found.first, found.last, found.epoch) == (10, 9 + len(payloads), 3)
    columns = found.columns()
    columns.validate()
    cell = columns.binary("payload")
    assert cell is not None
    assert list(cell) == payloads
    assert columns.fixed("priority").tolist() == list(range(len(payloads)))
    assert set(columns.fixed("max_retries").tolist()) == {-1}


def test_every_flipped_bit_is_found() -> None:
    data = sealed([b"hello", b"world"]).encode()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(Corruption):
                codec.decode(bytes(damaged))


def test_a_batch_follows_only_its_own_prefix() -> None:
    with pytest.raises(Corruption, match="chain"):
        verify_chain(sealed([b"x"], chain=5), 6)


def test_a_body_that_lies_about_its_size_is_refused() -> None:
    raw = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x" * 1000]})
    body = codec.compress(Codec.ZSTD, raw)
    batch = seal(
        Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=1, count=1,
        time_ms=1, chain_previous=0, codec=Codec.ZSTD, raw_length=len(raw) + 8,
    )  # fmt: skip
    with pytest.raises(Corruption, match="stated length"):
        batch.columns()


@given(body=st.binary(max_size=200), count=st.integers(1, 50))
def test_noise_in_a_body_is_refused_not_misread(body: bytes, count: int) -> None:
    try:
        columns = SCHEMAS[Kind.ENQ].decode(body, count)
        columns.validate()
    except Corruption:
        return
    cell = columns.binary("payload")
    assert cell is None or len(cell) == count
