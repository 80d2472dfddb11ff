from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Corruption
from penstock.model.columns import Binary, Column, Domain, Schema

SCHEMA = Schema(
    1,
    (
        Column("number", "int64"),
        Column("small", "uint8", default=7),
        Column("blob", "binary"),
        Column("run", "uint32", Domain.RUN),
        Column("name", "binary", Domain.SCALAR),
    ),
)

entries = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 255), st.binary(max_size=20))
)


@given(entries, st.lists(st.integers(0, 2**32 - 1), max_size=3), st.binary(max_size=9))
def test_columns_survive_a_round_trip(rows: list[Any], runs: list[int], name: bytes) -> None:
    numbers, smalls, blobs = ([row[i] for row in rows] for i in range(3))
    values = {"number": numbers, "small": smalls, "blob": blobs, "run": runs, "name": [name]}
    columns = SCHEMA.decode(SCHEMA.encode(len(rows), values, runs=len(runs)), len(rows))
    columns.validate()
    assert columns.fixed("number").tolist() == numbers
    assert columns.fixed("small").tolist() == smalls
    assert list(columns.binary("blob") or ()) == blobs
    assert columns.fixed("run").tolist() == runs and list(columns.binary("name") or ()) == [name]


@given(entries)
def test_lists_and_arrays_encode_to_the_same_bytes(rows: list[Any]) -> None:
    numbers, smalls, blobs = ([row[i] for row in rows] for i in range(3))
    plain = SCHEMA.encode(len(rows), {"number": numbers, "small": smalls, "blob": blobs})
    arrays = {
        "number": np.array(numbers, np.int64),
        "small": np.array(smalls, np.int64),
        "blob": Binary.of(blobs),
    }
    assert SCHEMA.encode(len(rows), arrays) == plain


def test_the_layout_of_a_body_is_fixed() -> None:
    body = SCHEMA.encode(2, {"number": [1, -1], "small": [2, 3], "blob": [b"ab", b"c"]})
    assert body.hex() == (
        "0100" "0000" "07000000"  # version, runs, present
        "0100000000000000" "ffffffffffffffff"  # number
        "0203000000000000"  # small, padded
        "00000000" "02000000" "03000000" "00000000"  # offsets, padded
        "6162630000000000"  # blob, padded
    )  # fmt: skip


def test_absent_columns_read_as_their_default() -> None:
    columns = SCHEMA.decode(SCHEMA.encode(3, {"number": None}), 3)
    assert columns.fixed("small").tolist() == [7, 7, 7] and columns.binary("blob") is None
    assert "number" not in columns.views


def test_what_does_not_fit_is_refused() -> None:
    body = SCHEMA.encode(1, {"number": [1], "blob": [b"abc"]})
    for bad in (body[:-8], body + bytes(8), body[:4] + b"\xff\xff\xff\xff" + body[8:], b""):
        with pytest.raises(Corruption):
            SCHEMA.decode(bad, 1)
    with pytest.raises(ValueError, match="expected 2"):
        SCHEMA.encode(2, {"number": [1]})
    with pytest.raises(ValueError, match="no such column"):
        SCHEMA.encode(1, {"numbers": [1]})
