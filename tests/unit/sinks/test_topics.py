"""Deltas on their way to a topic, and what a notice says."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from tests.conformance.sinks.changes import delta, deltas
from tests.unit.spark.delivery.delivering import FileTopics

from penstock.errors import InvalidArgument
from penstock.model.delta import Op
from penstock.model.entries import PRODUCER_ID_BYTES_MAX
from penstock.sinks.protocol import Items
from penstock.sinks.topics import Notice, NotifySink, by_place, producer_id, refused


def items(count: int) -> Items:
    numbers = np.arange(1, count + 1)
    return Items(sequences=numbers, payloads=pa.array([b"%d" % n for n in numbers], pa.binary()))


def test_rows_are_told_apart_by_their_log_partition() -> None:
    table = pa.concat_tables(
        [
            deltas(5, delta(1), delta(2), topic="b", partition=1),
            deltas(1, delta(3), topic="a", partition=1),
            deltas(3, delta(4), delta(5), topic="b", partition=1),
            deltas(1, delta(6), topic="b", partition=0),
        ]
    )
    found = {place: rows.tolist() for place, rows in by_place(table)}
    assert found == {("b", 1): [3, 4, 0, 1], ("a", 1): [2], ("b", 0): [5]}


def test_refused_items_are_found_among_the_others() -> None:
    bad, taken = {3, 4, 11}, set[int]()

    def append(part: Items) -> None:
        if bad & set(part.sequences.tolist()):
            raise InvalidArgument("bad", field="payload")
        taken.update(part.sequences.tolist())

    assert [at + 1 for at, _ in refused(append, items(12))] == [3, 4, 11]
    assert taken == set(range(1, 13)) - bad


def test_a_slice_keeps_its_columns_together() -> None:
    part = items(9).slice(3, 5)
    assert part.sequences.tolist() == [4, 5]
    assert part.payloads.to_pylist() == [b"4", b"5"]
    assert len(part) == 2


def test_a_producer_has_a_name_that_fits() -> None:
    assert producer_id("pipe", "remote", ("vectors", 3)) == "pipe/remote/vectors/3"
    long = producer_id("pipe", "remote", ("v" * 255, 3))
    assert len(long.encode()) < PRODUCER_ID_BYTES_MAX
    assert long != producer_id("pipe", "remote", ("v" * 255, 4))


def test_a_notice_names_the_change_not_its_values(tmp_path: Path) -> None:
    table = deltas(8, delta(6), delta(7, vector_id="b", op=Op.SCALE, indices=None), partition=2)
    found = NotifySink("notify", writer=FileTopics(tmp_path / "topics.lines")).items(table)
    first, second = (msgspec.msgpack.decode(p.as_py(), type=Notice) for p in found.payloads)
    assert first == Notice(
        topic="vectors",
        partition=2,
        sequence=8,
        ordinal=8,
        namespace="default",
        vector_id="a",
        op="sparse",
        delta_id=(6).to_bytes(16, "big"),
        origin="writer",
        time=table["time"][0].as_py(),
    )
    assert (second.op, second.vector_id) == ("scale", "b")
    assert found.sequences.tolist() == [8, 9]
    assert found.priorities is not None
    assert found.priorities.tolist() == [2, 3]
