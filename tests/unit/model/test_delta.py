from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.model.columns import Binary
from penstock.model.delta import (
    Delta,
    Op,
    PriorityClass,
    Source,
    check,
    decode,
    encode,
    hybrid_time,
    vector_hash,
)
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import validate
from verification.malformed_maps import MALFORMED_MAPS

DIMENSIONS = 8
NOW_MS = 1_800_000_000_000


def sparse(**changes: Any) -> Delta:
    fields: dict[str, Any] = {
        "delta_id": b"\x11" * 16,
        "namespace": "ns",
        "vector_id": "v",
        "op": Op.SPARSE,
        "origin": "a",
        "time": hybrid_time(NOW_MS, 7),
        "clock": {"a": 1},
        "indices": np.array([1, 5], np.uint16),
        "values": np.array([0.5, -2.0], np.float32),
    }
    return Delta(**{**fields, **changes})


def test_the_bytes_are_fixed() -> None:
    delta = sparse(parent=b"\x22" * 16, clock={"b": 3, "a": 2})
    assert encode(delta, dimensions=DIMENSIONS).hex() == (
        "01" "02" "02" "00" "0200" "02" "03"  # version, op, priority, source, n, clock, flags
        + "11" * 16 + "22" * 16 + "61" + "00" * 15  # delta_id, parent, origin
        + hybrid_time(NOW_MS, 7).to_bytes(8, "little").hex()
        + vector_hash("ns", "v").hex()
        + "0200" "0100" "00000000"  # bytes of namespace, vector_id, metadata
        "61" + "00" * 15 + "0200000000000000"  # own clock entry
        "62" + "00" * 15 + "0300000000000000"
        "0100" "0500" "0000003f" "000000c0"  # indices, values
        "6e73" "76"
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parent": b"\x22" * 16, "priority": PriorityClass.CRITICAL, "source": Source.IMPORT},
        {"origin": "é", "clock": {"é": 4, "z": 1}},
        {"op": Op.CREATE, "indices": None, "values": np.arange(8, dtype=np.float32)},
        {"op": Op.DENSE, "indices": None, "values": np.zeros(8, np.float32), "metadata": {"k": 1}},
        {"op": Op.SCALE, "indices": None, "values": np.array([2], np.float32)},
        {"op": Op.OFFSET, "indices": None, "values": np.ones(8, np.float32)},
        {"op": Op.DELETE, "indices": None, "values": None},
        {"op": Op.METADATA, "indices": None, "values": None, "metadata": {}},
    ],
)
def test_a_delta_survives_its_bytes(changes: dict[str, Any]) -> None:
    delta = sparse(**changes)
    assert decode(encode(delta, dimensions=DIMENSIONS)) == delta
    assert hash(delta) == hash(sparse(**changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"delta_id": b"short"}, "delta_id"),
        ({"delta_id": bytes(16)}, "delta_id"),
        ({"parent": b"\x11" * 16}, "parent"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "a\0b"}, "namespace"),
        ({"namespace": "n" * 256}, "namespace"),
        ({"vector_id": "v" * 513}, "vector_id"),
        ({"vector_id": "\ud800"}, "vector_id"),
        ({"origin": "o" * 17}, "origin"),
        ({"origin": "", "clock": {"": 1}}, "origin"),
        ({"clock": {}}, "clock"),
        ({"clock": {"b": 1}}, "clock"),
        ({"clock": {"a": 0}}, "clock[0]"),
        ({"clock": {"a": -1}}, "clock"),
        ({"clock": {"a": 1} | {f"o{i}": 1 for i in range(32)}}, "clock"),
        ({"time": 0}, "time"),
        ({"time": 1 << 62}, "time"),
        ({"time": 1 << 63}, "delta"),
        ({"values": np.array([1, np.nan])}, "values[1]"),
        ({"values": np.array([1e300, 1])}, "values[0]"),
        ({"values": [["a", "b"]]}, "values"),
        ({"values": np.ones(3)}, "indices"),
        ({"indices": [5, 5]}, "indices[1]"),
        ({"indices": [1, 8]}, "indices[1]"),
        ({"indices": [-1, 8]}, "indices[0]"),
        ({"indices": [0.5, 1.5]}, "indices"),
        ({"indices": None}, "indices"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"op": Op.CREATE, "indices": None}, "values"),
        ({"op": Op.SCALE, "indices": None}, "values"),
        ({"op": Op.SCALE}, "indices"),
        ({"op": Op.DELETE, "indices": None}, "values"),
        ({"op": Op.METADATA, "indices": None, "values": None}, "metadata"),
        ({"op": Op.METADATA, "indices": None, "values": None, "metadata": {1: 2}}, "metadata"),
        ({"op": Op.METADATA, "indices": None, "values": None, "metadata": {"a": {1}}}, None),
    ],
)
def test_what_a_topic_refuses_is_not_encoded(changes: dict[str, Any], field: str | None) -> None:
    if field is None:  # a set is an array in msgpack, and so allowed
        encode(sparse(**changes), dimensions=DIMENSIONS)
        return
    with pytest.raises(InvalidArgument) as caught:
        encode(sparse(**changes), dimensions=DIMENSIONS)
    assert caught.value.field == field


def patched(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda payload: payload[:at] + data + payload[at + len(data) :]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda payload: payload[:50], "payload"),
        (lambda payload: payload + b"x", "payload"),
        (lambda payload: payload + bytes(1 << 20), "payload"),
        (patched(0, b"\x02"), "version"),
        (patched(1, b"\x07"), "op"),
        (patched(2, b"\x04"), "priority"),
        (patched(3, b"\x04"), "source"),
        (patched(7, b"\x0a"), "flags"),
        (patched(7, b"\x03"), "parent"),
        (patched(7, b"\x06"), "metadata"),
        (patched(40, b"a\0b"), "origin"),
        (patched(40, b"\xff"), "origin"),
        (patched(64, b"\0\0\0\0"), "vector"),
        (patched(88, b"b"), "clock[0]"),
    ],
)
def test_damaged_bytes_are_named(change: Callable[[bytes], bytes], field: str) -> None:
    payload = change(encode(sparse(), dimensions=DIMENSIONS))
    with pytest.raises(InvalidArgument) as caught:
        check(payload, dimensions=DIMENSIONS, now_ms=NOW_MS)
    assert caught.value.field == field


def test_a_time_far_ahead_is_refused() -> None:
    payload = encode(sparse(), dimensions=DIMENSIONS)
    check(payload, now_ms=NOW_MS - 300_000)
    with pytest.raises(InvalidArgument, match="ahead"):
        check(payload, now_ms=NOW_MS - 300_001)


@given(st.binary(max_size=300), st.integers(0, 160))
def test_no_bytes_do_worse_than_be_refused(noise: bytes, at: int) -> None:
    payload = encode(sparse(clock={"a": 1, "b": 2}), dimensions=DIMENSIONS)
    for hostile in (noise, payload[:at] + noise, payload[:at] + noise + payload[at + len(noise) :]):
        try:
            found = decode(hostile)
        except InvalidArgument:
            continue
        dense = found.indices is None and found.values is not None
        dimensions = len(found.values) if dense and found.op != Op.SCALE else 4096
        assert decode(encode(found, dimensions=dimensions)) == found


# Metadata may have more values than headers.
@pytest.mark.parametrize("name", [name for name in MALFORMED_MAPS if not name.startswith("many")])
def test_hostile_metadata_is_refused(name: str) -> None:
    """Before, extension types, inner names that are no text and a level too many passed."""
    metadata = MALFORMED_MAPS[name]
    fields = {"op": Op.METADATA, "indices": None, "values": None, "metadata": {"x": 1}}
    good = encode(sparse(**fields), dimensions=DIMENSIONS)
    own = len(msgspec.msgpack.encode({"x": 1}))
    payload = good[:84] + len(metadata).to_bytes(4, "little") + good[88:-own] + metadata
    with pytest.raises(InvalidArgument, match="metadata"):
        decode(payload)
    many = DeltaBatch.of(Binary.of([good] * 9 + [payload]))
    validate(DeltaBatch.of(Binary.of([good] * 9)), dimensions=DIMENSIONS, now_ms=NOW_MS)
    with pytest.raises(InvalidArgument, match="metadata"):
        validate(many, dimensions=DIMENSIONS, now_ms=NOW_MS)


INDICES = st.integers(-1, DIMENSIONS + 1) | st.integers(4000, 70_000)
NUMBERS = st.one_of(st.floats(width=64), st.sampled_from([0.0, 1e39, -1e39]))


@given(st.lists(st.tuples(INDICES, NUMBERS), max_size=4), st.sampled_from("iuf"))
def test_a_few_numbers_are_judged_and_laid_out_as_many_are(
    components: list[tuple[int, float]], kind: str
) -> None:
    indices = np.array([index for index, _ in components]).astype(f"{kind}8")
    delta = sparse(indices=indices, values=np.array([value for _, value in components]))

    def outcome(few: int) -> bytes | None:
        """The payload; None if it is refused. Of two faults either may be named."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.model.delta.FEW", few)
            try:
                return encode(delta, dimensions=DIMENSIONS)
            except InvalidArgument:
                return None

    assert outcome(32) == outcome(-1)
