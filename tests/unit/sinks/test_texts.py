"""Metadata, headers and clocks as JSON text."""

import json
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.sinks.changes import delta, deltas

from penstock.model.plain import UNREADABLE
from penstock.sinks.texts import clock_column, is_exact, json_column, json_of, packed_of, sorted_of
from verification.malformed_maps import MALFORMED_MAPS

pack = msgspec.msgpack.encode


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels > 1 else {"a": 1}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"b": 1, "a": 1.0, "-": [None, True]}, '{"b":1,"a":1.0,"-":[null,true]}'),
        ({"t": "\"\u00e9\u2028\0"}, '{"t":"\\"\u00e9\u2028\\u0000"}'),
        ({"a": 2**64 - 1, "b": -(2**63)}, '{"a":18446744073709551615,"b":-9223372036854775808}'),
        ({"b": b"\xff\0", "c": [b""]}, '{"b":{"base64":"/wA="},"c":[{"base64":""}]}'),
        ({"n": float("nan"), "i": [float("-inf")]}, '{"n":null,"i":[null]}'),
        (deep(16), '{"a":' * 16 + "1" + "}" * 16),
        (deep(15) | {"b": b""}, '{"a":' * 15 + "1" + "}" * 14 + ',"b":{"base64":""}}'),
        ({}, "{}"),
    ],
)  # fmt: skip
def test_a_map_is_said_in_json(held: dict[str, Any], said: str) -> None:
    assert json_of(pack(held)).decode() == said


def test_exact_is_what_comes_back_to_the_byte() -> None:
    plain, odd = pack({"a": [1, 2.5, None, "x", {"b": True}]}), pack({"a": b"x"})
    assert packed_of(json_of(plain)) == plain
    assert is_exact(plain, json_of(plain)) and not is_exact(odd, json_of(odd))


@pytest.mark.parametrize("name", MALFORMED_MAPS)
def test_whatever_is_stored_becomes_an_object(name: str) -> None:
    data = MALFORMED_MAPS[name]
    found = json.loads(json_of(data))
    assert isinstance(found, dict)
    assert json_of(data) == json_of(data)


def test_what_cannot_be_read_says_why() -> None:
    assert json.loads(json_of(pack(["a"]))) == {UNREADABLE: "it is not a map"}
    assert json.loads(json_of(b"\x81\xa1a")) == {UNREADABLE: "it is cut short"}
    assert json.loads(json_of(pack({1: "x", b"a": b"y"}))) == {"1": "x", "a": {"base64": "eQ=="}}


def test_a_column_keeps_its_nulls_and_its_order() -> None:
    values = [pack({"a": n % 3}) if n % 4 else None for n in range(20)]
    found = json_column(pa.array(values, pa.binary())).to_pylist()
    assert found == [
        json.dumps({"a": n % 3}, separators=(",", ":")) if n % 4 else None for n in range(20)
    ]
    assert json_column(pa.nulls(3, pa.binary())).to_pylist() == [None] * 3


def test_texts_that_say_the_same_are_told_by_their_sorted_form() -> None:
    assert sorted_of('{"b":1,"a":[1e16]}') == sorted_of('{"a": [1e+16], "b": 1}')
    assert sorted_of('{"a":1}') != sorted_of('{"a":1.0}')
    assert sorted_of("{") == b"{"


@pytest.mark.parametrize(
    "clock",
    [
        {"writer": 1},
        {"writer": 10**18, "b": 9, "c": 2**63 - 1},
        {'q"uote': 1, "back\\slash": 22, "plain": 4, "tab\tand\x01": 333},
        {"\u00e9\u00e9": 1, "\U0001f600": 2},
        {"sixteen bytes...": 5, "\x01" * 16: 6},
    ],
)
def test_a_clock_is_an_object_of_origins(clock: dict[str, int]) -> None:
    rows = [delta(1), delta(2, origin=next(iter(clock)), clock=clock), delta(3)]
    found = deltas(1, *rows)["clock"].to_pylist()
    assert [json.loads(text) for text in found] == [{"writer": 1}, clock, {"writer": 3}]
    assert found[1] == json.dumps(clock, separators=(",", ":"), ensure_ascii=False)


def test_a_clock_without_origins_is_an_empty_object() -> None:
    name = np.frombuffer(b"writer".ljust(16, b"\0"), np.uint64).reshape(1, 2)
    found = clock_column(np.array([0, 0, 1, 1]), name, np.array([7], np.uint64))
    assert found.to_pylist() == ["{}", '{"writer":7}', "{}"]
    nothing = clock_column(np.array([0]), name[:0], np.array([], np.uint64))
    assert nothing.to_pylist() == []
