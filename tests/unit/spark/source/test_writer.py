"""Rows of a DataFrame as messages."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import InvalidArgument
from penstock.model.delta import Op, decode
from penstock.model.topic import TopicConfig, TopicKind
from penstock.sinks.protocol import Items
from penstock.spark.source.writer import items_of

QUEUE = TopicConfig(name="jobs")
VECTORS = TopicConfig(name="vectors", kind=TopicKind.DELTA, dimensions=2)
ROW = {"namespace": "a", "vector_id": "v", "op": "dense", "origin": "me", "delta_time": 9}


def columns(rows: list[dict[str, Any]], config: TopicConfig, first: int = 0) -> Items:
    return items_of(pa.RecordBatch.from_pylist(rows), config, producer="p", first=first)


def test_text_and_nulls() -> None:
    found = columns([{"value": "é", "key": None, "priority": None}], QUEUE)
    assert found.payloads.to_pylist() == ["é".encode()]
    assert found.keys is not None
    assert found.priorities is not None
    assert (found.keys.to_pylist(), found.priorities.tolist()) == ([None], [0])
    assert found.headers is None


def test_a_value_must_be_there() -> None:
    with pytest.raises(InvalidArgument) as refused:
        columns([{"value": b"x"}, {"value": None}], QUEUE)
    assert refused.value.field == "value"


def test_what_a_delta_lacks_is_filled_in() -> None:
    rows = [ROW | {"values": [1.0, 2.0]}, ROW | {"values": [3.0, 4.0], "vector_id": "w"}]
    one, two = (decode(p) for p in columns(rows, VECTORS).payloads.to_pylist())
    assert (one.op, one.clock, one.parent) == (Op.DENSE, {"me": 1}, None)
    assert one.delta_id != two.delta_id


def test_an_id_depends_on_the_place_and_not_on_the_cut() -> None:
    rows = [ROW | {"values": [1.0, 2.0], "vector_id": name} for name in "abc"]
    whole = columns(rows, VECTORS, first=7).payloads.to_pylist()
    cut = columns(rows[:1], VECTORS, first=7), columns(rows[1:], VECTORS, first=8)
    assert whole == [p for part in cut for p in part.payloads.to_pylist()]


@pytest.mark.parametrize(
    ("changes", "config", "field"),
    [
        ({"op": "melt", "values": [1.0, 2.0]}, VECTORS, "op"),
        ({"values": [1.0]}, VECTORS, "values"),
        ({"values": [1.0, 2.0]}, QUEUE, "topic"),
    ],
)
def test_a_row_that_is_no_delta_is_refused(
    changes: dict[str, Any], config: TopicConfig, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        columns([ROW | changes], config)
    assert refused.value.field == field
