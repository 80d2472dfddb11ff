"""Maps of plain values, as headers and metadata must be."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.columns import Binary
from penstock.model.plain import (
    DEPTH_MAX,
    HEADERS_VALUES_MAX,
    SHOWN_DEPTH_MAX,
    TOO_DEEP,
    UNREADABLE,
    fault_in,
    fault_of,
    faults_of,
    headers_of,
    plain,
    plain_map,
)
from verification.malformed_maps import MALFORMED_MAPS, nested

_pack = msgspec.msgpack.encode
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=40,
)  # fmt: skip


@given(st.dictionaries(st.text(), PLAIN, max_size=20))
def test_plain_values_have_no_fault(values: dict[str, Any]) -> None:
    assert fault_of(_pack(values)) is None


@settings(max_examples=300)
@given(st.dictionaries(st.text(), PLAIN, min_size=1, max_size=4), st.data())
def test_what_has_no_fault_can_be_decoded(values: dict[str, Any], data: st.DataObject) -> None:
    packed = bytearray(_pack(values))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    if fault_of(bytes(packed)) is None:
        msgspec.msgpack.decode(bytes(packed), type=dict[str, Any])


@pytest.mark.parametrize("name", MALFORMED_MAPS)
def test_what_is_malformed_has_a_fault(name: str) -> None:
    assert fault_of(MALFORMED_MAPS[name]) is not None
    assert set(headers_of(MALFORMED_MAPS[name])) == {UNREADABLE}


def test_the_bounds_are_the_last_that_pass() -> None:
    assert fault_of(nested(DEPTH_MAX)) is None
    deeper, more = fault_of(nested(DEPTH_MAX + 1)), {"a": [0] * HEADERS_VALUES_MAX}
    assert deeper is not None and deeper.limit == DEPTH_MAX
    assert fault_of(_pack({"a": [0] * (HEADERS_VALUES_MAX - 1)})) is None
    assert fault_of(_pack({"a": [b""] * (HEADERS_VALUES_MAX - 1)})) is None
    for values in (more, {"a": [b""] * HEADERS_VALUES_MAX}):
        fault = fault_of(_pack(values))
        assert fault is not None and fault.limit == HEADERS_VALUES_MAX


def test_a_column_tells_its_first_fault() -> None:
    good, bad = _pack({"a": "b"}), MALFORMED_MAPS["array"]
    assert fault_in(Binary.of([good] * 9)) is None
    assert fault_in(Binary.of([b""] * 9)) is None
    assert fault_in(Binary.of([b"", good, _pack({})])) is None
    found = fault_in(Binary.of([good, b"", bad, good, bad]))
    assert found is not None and found[0] == 2
    alike = fault_in(Binary.of([bad, bad]))
    assert alike is not None and alike[0] == 0
    assert list(faults_of([good, bad, b"", bad])) == [1, 3]


def test_readable_headers_are_shown_as_they_are() -> None:
    assert headers_of(b"") == {}
    assert headers_of(_pack({"a": [1, b"x", {"b": None}]})) == {"a": [1, b"x", {"b": None}]}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"n": 5, "f": 1.5, "t": True, "z": None}, {"n": 5, "f": 1.5, "t": True, "z": None}),
        ({"text": b"abc", "raw": b"\xff\x00"}, {"text": "abc", "raw_base64": "/wA="}),
        ({"list": [b"a", [1, "b"]], "map": {"b": b"\xff"}},
         {"list": ["a", [1, "b"]], "map": {"b_base64": "/w=="}}),
        ({1: "x", False: "y", b"k": "z"}, {"1": "x", "false": "y", "k": "z"}),
        ({(1, "a"): 2, None: 3}, {'[1,"a"]': 2, "null": 3}),
        ({"e": msgspec.msgpack.Ext(5, b"\x01")}, {"e": {"ext": 5, "data_base64": "AQ=="}}),
    ],
)  # fmt: skip
def test_values_are_what_json_has(value: Any, shown: Any) -> None:
    assert plain_map(value) == shown
    assert json.loads(msgspec.json.encode(plain_map(value))) == shown


def test_a_time_keeps_its_own_writing() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    assert msgspec.json.encode(plain({"at": at})) == b'{"at":"2026-01-02T00:00:00Z"}'


def test_what_is_nested_without_end_is_shown_to_a_depth() -> None:
    value: Any = "x"
    for _ in range(5 * SHOWN_DEPTH_MAX):
        value = [value]
    shown, depth = plain(value), 0
    while isinstance(shown, list):
        (shown,), depth = shown, depth + 1
    assert (shown, depth) == (TOO_DEEP, SHOWN_DEPTH_MAX)
