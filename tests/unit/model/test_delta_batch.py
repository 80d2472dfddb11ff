import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.delta.writer import (
    DeltaColumns,
    HybridClock,
    Names,
    VectorHeads,
    encode_columns,
)
from penstock.errors import InvalidArgument
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.model.columns import Binary
from penstock.model.delta import Delta, Op, check, decode, encode, hybrid_time
from penstock.model.delta_batch import DeltaBatch, deltas_of
from penstock.model.delta_checks import sound_rows, validate

DIMENSIONS = 8
NOW_MS = 1_800_000_000_000


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    op = draw(st.sampled_from(Op))
    indices, values, metadata = None, None, None
    if op in (Op.CREATE, Op.DENSE):
        values = draw(floats(DIMENSIONS))
    elif op == Op.SCALE:
        values = draw(floats(1))
    elif op == Op.SPARSE or (op == Op.OFFSET and draw(st.booleans())):
        named = sorted(draw(st.sets(st.integers(0, DIMENSIONS - 1), min_size=1)))
        indices, values = np.array(named, np.uint16), draw(floats(len(named)))
    elif op == Op.OFFSET:
        values = draw(floats(DIMENSIONS))
    if op == Op.METADATA or (op in (Op.CREATE, Op.DENSE) and draw(st.booleans())):
        metadata = {"k": draw(st.text(max_size=5))}
    clock = draw(st.dictionaries(st.sampled_from("abcdé"), st.integers(1, 9), min_size=1))
    return Delta(
        delta_id=draw(st.binary(min_size=16, max_size=16).filter(any)),
        namespace=draw(st.sampled_from(["n", "other", "ñ"])),
        vector_id=draw(st.sampled_from(["v", "w" * 30])),
        op=op,
        origin=next(iter(clock)),
        time=hybrid_time(NOW_MS, draw(st.integers(0, 9))),
        parent=draw(st.none() | st.just(b"\xfe" * 16)),
        clock=clock,
        indices=indices,
        values=values,
        metadata=metadata,
    )


def floats(count: int) -> st.SearchStrategy[Any]:
    some = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=count,
                    max_size=count)  # fmt: skip
    return some.map(lambda found: np.array(found, np.float32))


def encoded(found: list[Delta]) -> list[bytes]:
    return [encode(delta, dimensions=DIMENSIONS) for delta in found]


@settings(max_examples=40)
@given(st.lists(deltas(), max_size=20))
def test_columns_are_what_the_deltas_hold(found: list[Delta]) -> None:
    batch = DeltaBatch.of(encoded(found))
    validate(batch, dimensions=DIMENSIONS, now_ms=NOW_MS)
    assert sound_rows(batch, dimensions=DIMENSIONS).all()
    assert batch.delta_ids() == [delta.delta_id for delta in found]
    assert batch.op.tolist() == [delta.op for delta in found]
    assert batch.counter.tolist() == [delta.clock[delta.origin] for delta in found]
    offsets, indices, values = batch.components()
    clock_offsets, _, counters = batch.clocks()
    for row, delta in enumerate(found):
        some = slice(offsets[row], offsets[row + 1])
        own = np.empty(0) if delta.values is None else delta.values
        named = np.arange(len(own)) if delta.indices is None else delta.indices
        assert values[some].tobytes() == own.astype(np.float32).tobytes()
        assert indices[some].tolist() == named.tolist()
        some = slice(clock_offsets[row], clock_offsets[row + 1])
        assert sorted(counters[some].tolist()) == sorted(delta.clock.values())
        assert batch.names()[row] == (delta.namespace.encode(), delta.vector_id.encode())
        assert bool(batch.metadata(row)) == (delta.metadata is not None)


@settings(max_examples=40)
@given(st.lists(deltas(), min_size=1, max_size=12), st.data())
def test_taking_and_joining_keep_payloads(found: list[Delta], data: st.DataObject) -> None:
    count = len(found)
    headers = Binary.of([b"h%d" % i for i in range(count)])
    times = np.arange(count, dtype=np.int64) * 10
    batch = DeltaBatch.of(encoded(found), log_times_ms=times, headers=headers)
    rows = np.array(data.draw(st.lists(st.integers(0, count - 1))), np.int64)
    plain = DeltaBatch.of(encoded(found))
    joined = DeltaBatch.concat([batch.take(rows), DeltaBatch.empty(), plain])
    expected = [found[row] for row in rows.tolist()] + found
    assert joined.payloads.tolist() == encoded(expected)
    assert [joined.payload(i) for i in range(len(joined))] == encoded(expected)
    assert joined.log_times_ms.tolist() == times[rows].tolist() + [0] * count
    if len(rows):
        assert joined.headers is not None
        assert joined.headers.tolist() == [b"h%d" % row for row in rows.tolist()] + [b""] * count


@settings(max_examples=40)
@given(st.lists(deltas(), min_size=9, max_size=12), st.data())
def test_columns_and_single_checks_agree(found: list[Delta], data: st.DataObject) -> None:
    payloads = [bytearray(payload) for payload in encoded(found)]
    for _ in range(data.draw(st.integers(1, 3))):
        victim = data.draw(st.sampled_from(payloads))
        victim[data.draw(st.integers(0, len(victim) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    hostile = [bytes(payload) for payload in payloads]
    wrong = {row: refusal(payload) for row, payload in enumerate(hostile) if refusal(payload)}
    if not wrong:
        validate(DeltaBatch.of(hostile), dimensions=DIMENSIONS, now_ms=NOW_MS)
        return
    with pytest.raises(InvalidArgument) as caught:
        validate(DeltaBatch.of(hostile), dimensions=DIMENSIONS, now_ms=NOW_MS)
    row = int(caught.value.message.split()[1].rstrip(":"))
    assert wrong[row] == caught.value.field


def refusal(payload: bytes) -> str:
    try:
        check(payload, dimensions=DIMENSIONS, now_ms=NOW_MS)
    except InvalidArgument as error:
        return error.field
    return ""


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=400), max_size=12))
def test_noise_is_refused(noise: list[bytes]) -> None:
    try:
        validate(DeltaBatch.of(noise), dimensions=DIMENSIONS, now_ms=NOW_MS)
    except InvalidArgument:
        return
    assert all(decode(payload) for payload in noise)


def test_offsets_outside_of_the_blob_are_refused() -> None:
    (payload,) = encoded([sparse(0)])
    with pytest.raises(InvalidArgument, match="outside"):
        DeltaBatch.of(Binary(np.array([0, len(payload) + 9], np.int32), payload))
    with pytest.raises(InvalidArgument, match="less than"):
        DeltaBatch.of(Binary(np.array([9, 0], np.int32), payload))


def sparse(number: int) -> Delta:
    return Delta(
        delta_id=number.to_bytes(15, "big") + b"x", namespace="default", vector_id=f"v{number}",
        op=Op.SPARSE, origin="a", time=hybrid_time(NOW_MS), clock={"a": 1},
        indices=np.arange(8, dtype=np.uint16), values=np.ones(8, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize(("size", "us_max"), [(1, 300.0), (100, 600.0)])
def test_validating_is_quick(size: int, us_max: float) -> None:
    payloads = Binary.of(encoded([sparse(i) for i in range(size)]))
    best = np.inf
    for _ in range(20):
        started = time.process_time()
        for _ in range(10):
            validate(DeltaBatch.of(payloads), dimensions=DIMENSIONS, now_ms=NOW_MS)
        best = min(best, (time.process_time() - started) * 1e5)
    assert best < us_max  # a few times what it takes on an idle machine


@pytest.mark.parametrize("size", [1, 3, 24, 25])
def test_few_rows_are_read_as_many_are(size: int) -> None:
    rows = encoded([sparse(i) for i in range(size)])
    first = DeltaBatch.of(rows)
    inside = DeltaBatch.of(
        Binary(Binary.of([b"before", *rows]).offsets[1:], b"before" + b"".join(rows))
    )
    for batch in (first, inside):
        assert batch.fixed.tobytes() == b"".join(row[:112] for row in rows)
        assert batch.payloads.tolist() == rows and batch.sizes.tolist() == [len(r) for r in rows]
        assert batch.payloads.offsets[0] == 0 and len(batch.payloads.blob) == len(b"".join(rows))


@pytest.mark.parametrize("rows", [np.array([2, 0]), np.array([False, True, True])])
def test_rows_take_their_known_sizes_along(rows: Any) -> None:
    batch = DeltaBatch.of(encoded([sparse(number) for number in (1, 10, 100)]))
    sizes = batch.sizes
    assert len(set(sizes.tolist())) == 3
    taken = batch.take(rows)
    assert taken._parts["sizes"].tolist() == sizes[rows].tolist()
    assert [len(payload) for payload in taken.payloads] == sizes[rows].tolist()


@pytest.mark.parametrize("size", [1, 24, 25])
@pytest.mark.parametrize("at", [0, 4, 6, 80, 84])
def test_sizes_that_do_not_add_up_are_refused(size: int, at: int) -> None:
    rows = encoded([sparse(i) for i in range(size)])
    rows[-1] = rows[-1][:at] + bytes([9]) + rows[-1][at + 1 :]
    with pytest.raises(InvalidArgument, match=f"delta {size - 1}"):
        DeltaBatch.of(rows)


@pytest.mark.parametrize("origins", [1, 10, 11, 32])
def test_components_are_found_behind_any_clock(origins: int) -> None:
    clock = {"a": 1} | {f"o{i}": 1 for i in range(1, origins)}
    some = [msgspec.structs.replace(sparse(i), clock=clock) for i in range(3)]
    batch = DeltaBatch.of(encoded(some))
    _, indices, values = batch.components()
    assert indices.tolist() == list(range(8)) * 3 and values.tolist() == [1.0] * 24
    assert sound_rows(batch, dimensions=DIMENSIONS).all()


def payloads(count: int) -> Binary:
    columns = DeltaColumns(vector_ids=["v"] * count, values=np.ones((count, 2), "f4")).checked()
    names = Names.of("n", columns.vector_ids)
    causes = VectorHeads(b"w").chain(names, HybridClock())
    return encode_columns(columns, names, causes, origin=b"w", rows=np.arange(count))


def batch(first: int, count: int, *, kind: Kind = Kind.ENQ, **columns: object) -> Batch:
    body = SCHEMAS[kind].encode(count, columns)  # type: ignore[arg-type]
    return seal(
        kind, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=first, count=count,
        time_ms=1000 + first, chain_previous=0,
    )  # fmt: skip


def test_deltas_stand_where_the_log_has_them() -> None:
    found = deltas_of(
        [
            batch(1, 1, kind=Kind.BARRIER, node=[b"n"]),
            batch(2, 3, payload=payloads(3)),
            batch(5, 1, kind=Kind.CONFIG, config=[b""]),
            batch(6, 2, payload=payloads(2), headers=[b"\x81\xa1a\x01", b""]),
        ]
    )
    assert found.sequences.tolist() == [2, 3, 4, 6, 7]
    assert found.log_times_ms.tolist() == [1002, 1002, 1002, 1006, 1006]
    assert found.counter.tolist() == [1, 2, 3, 1, 2]
    assert found.headers is not None
    assert found.headers.tolist() == [b"", b"", b"", b"\x81\xa1a\x01", b""]


def test_a_log_without_deltas_has_none() -> None:
    assert len(deltas_of([batch(1, 1, kind=Kind.BARRIER, node=[b"n"])])) == 0
    assert len(deltas_of([])) == 0
