import time

import msgspec
import numpy as np
import pytest

from penstock.client.delta.writer import (
    Causes,
    DeltaColumns,
    HybridClock,
    Names,
    VectorHeads,
    encode_columns,
)
from penstock.errors import InvalidArgument
from penstock.model.delta import Delta, Op, PriorityClass, Source, decode
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import validate

ALL = slice(None)


def encoded(columns: DeltaColumns, *, rows: slice = ALL) -> tuple[list[Delta], Causes]:
    columns = columns.checked()
    names = Names.of(columns.namespace, columns.vector_ids)
    causes = VectorHeads(b"w").chain(names, HybridClock())
    chosen = np.arange(len(columns))[rows]
    payloads = encode_columns(columns, names, causes, origin=b"w", rows=chosen)
    validate(DeltaBatch.of(payloads), dimensions=8, now_ms=time.time_ns() // 1_000_000)
    return [decode(payload) for payload in payloads], causes


def test_rows_become_the_deltas_they_describe() -> None:
    values = np.arange(12, dtype=np.float64).reshape(4, 3) / 4
    indices = np.array([[0, 2, 5], [1, 2, 3], [0, 6, 7], [2, 3, 4]])
    ids = ["a", "longer-name", "é", "a"]
    priority = np.array([0, 1, 2, 3])
    deltas, causes = encoded(
        DeltaColumns(vector_ids=ids, values=values, indices=indices, namespace="n",
                     priority=priority, source=Source.IMPORT)
    )  # fmt: skip
    assert [d.vector_id for d in deltas] == ids
    assert [d.delta_id for d in deltas] == [row.tobytes() for row in causes.delta_ids]
    for row, delta in enumerate(deltas):
        assert (delta.namespace, delta.op, delta.origin) == ("n", Op.SPARSE, "w")
        assert (delta.priority, delta.source) == (PriorityClass(row), Source.IMPORT)
        assert delta.indices is not None and (delta.indices == indices[row]).all()
        assert delta.values is not None and (delta.values == values[row]).all()


@pytest.mark.parametrize(
    ("op", "width"),
    [(Op.CREATE, 8), (Op.DENSE, 8), (Op.OFFSET, 8), (Op.SCALE, 1), (Op.DELETE, 0)],
)
def test_every_op_without_indices_has_its_shape(op: Op, width: int) -> None:
    columns = DeltaColumns(vector_ids=["a", "b"], values=np.ones((2, width), "f4"), op=op)
    deltas, _ = encoded(columns)
    assert [d.op for d in deltas] == [op, op]
    assert [0 if d.values is None else len(d.values) for d in deltas] == [width, width]


def test_metadata_goes_with_its_row() -> None:
    packed = [msgspec.msgpack.encode({"k": 1}), b"", msgspec.msgpack.encode({"k": [2, 3]})]
    deltas, _ = encoded(
        DeltaColumns(vector_ids=["a", "b", "c"], values=np.ones((3, 8), "f4"), metadata=packed)
    )
    assert [d.metadata for d in deltas] == [{"k": 1}, None, {"k": [2, 3]}]


def test_some_rows_are_encoded_as_all_are() -> None:
    columns = DeltaColumns(vector_ids=list("abcdef"), values=np.ones((6, 8), "f4"))
    deltas, _ = encoded(columns, rows=slice(1, 6, 2))
    assert [d.vector_id for d in deltas] == ["b", "d", "f"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"values": np.ones((1, 3))}, "values"),
        ({"values": np.ones(2)}, "values"),
        ({"indices": np.ones((2, 2), int)}, "indices"),
        ({"indices": np.array([[0, 1, 2], [0, 1, -1]])}, "indices"),
        ({"indices": np.array([[0, 1, 2], [0, 1, 70_000]])}, "indices"),
        ({"op": np.zeros(3)}, "op"),
        ({"metadata": [b""]}, "metadata"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, object], field: str) -> None:
    fields = {"vector_ids": ["a", "b"], "values": np.ones((2, 3)), **changes}
    with pytest.raises(InvalidArgument) as refused:
        DeltaColumns(**fields).checked()  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("namespace", "vector_id", "field"),
    [("", "a", "namespace"), ("n" * 256, "a", "namespace"), ("n", "", "vector_id"),
     ("n", "v" * 513, "vector_id")],
)  # fmt: skip
def test_names_within_their_bounds(namespace: str, vector_id: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Names.of(namespace, ["fine", vector_id])
    assert refused.value.field == field
