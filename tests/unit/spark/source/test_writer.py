"""Rows of a DataFrame as messages."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from penstock.client.delta.writer import encode_columns
from penstock.errors import InvalidArgument
from penstock.model.delta import Delta, Op, Source, decode, encode
from penstock.model.topic import TopicConfig, TopicKind
from penstock.sinks.protocol import Items
from penstock.spark.source import writer
from penstock.spark.source.writer import items_of

QUEUE = TopicConfig(name="jobs")
VECTORS = TopicConfig(name="vectors", kind=TopicKind.DELTA, dimensions=2)
SAME = ("delta_id", "parent", "namespace", "vector_id", "origin", "indices", "values")
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


def test_rows_are_encoded_by_shape_and_stay_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(*columns: Any, **how: Any) -> Any:
        calls.append(len(how["rows"]))
        return encode_columns(*columns, **how)

    monkeypatch.setattr(writer, "encode_columns", counted)
    shapes: list[dict[str, Any]] = [
        {"op": Op.CREATE, "values": [1.0, 2.0], "metadata": {"colour": "red"}},
        {"op": Op.SPARSE, "values": [5.0], "indices": [1], "clock": {"you": 7, "me": 2, "it": 3}},
        {"op": Op.DELETE, "clock": {"me": 3}, "parent": b"p" * 16, "source": Source.IMPORT},
        {"op": Op.SCALE, "values": [2.0], "namespace": "b", "origin": "x" * 16},
    ]
    deltas = []
    for number in range(40):
        named = {
            "namespace": f"n{number}",
            "vector_id": f"é{number}",
            "origin": "me",
            "time": number + 1,
        }
        given = named | {"source": Source.TRANSFORM, "delta_id": b"%016d" % number}
        given |= shapes[number % 4]
        deltas.append(Delta(**({"clock": {given["origin"]: 1}} | given)))
    rows = [
        {
            "op": d.op.name,
            "delta_time": d.time,
            "source": d.source.name.lower(),
            "clock": list(d.clock.items()),
            "metadata": None if d.metadata is None else json.dumps(d.metadata),
            **{name: getattr(d, name) for name in SAME},
        }
        for d in deltas
    ]
    kinds = {"clock": pa.map_(pa.string(), pa.int64()), "metadata": pa.string()}
    inferred = pa.RecordBatch.from_pylist([row | {"clock": None} for row in rows]).schema
    schema = pa.schema([(f.name, kinds.get(f.name, f.type)) for f in inferred])
    batch = pa.RecordBatch.from_pylist(rows, schema)

    found = items_of(batch, VECTORS, producer="p", first=0).payloads.to_pylist()

    assert found == [encode(delta, dimensions=2) for delta in deltas]
    assert calls == [10] * len(shapes)


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
        ({"values": [1.0], "indices": [0, 1]}, VECTORS, "indices"),
        ({"values": [1.0, 2.0], "delta_id": b"short"}, VECTORS, "delta_id"),
        ({"values": [1.0, 2.0], "origin": "x" * 17}, VECTORS, "origin"),
        ({"values": [1.0, 2.0], "namespace": None}, VECTORS, "namespace"),
        ({"values": [1.0, 2.0]}, QUEUE, "topic"),
    ],
)
def test_a_row_that_is_no_delta_is_refused(
    changes: dict[str, Any], config: TopicConfig, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        columns([ROW | changes], config)
    assert refused.value.field == field
