"""Comparisons: equal is equal, and every kind of damage is found and named."""

import numpy as np
import pyarrow as pa
import pytest

from penstock.sinks.schema import DELTAS, states_schema
from penstock.spark.jobs.audit import (
    Comparison,
    Expected,
    compare_history,
    compare_states,
    keys_of,
)

DIMENSIONS = 4


def states(names: list[str], *, partition: int = 0, deleted: tuple[str, ...] = ()) -> pa.Table:
    rng = np.random.default_rng(len(names))
    values = rng.random((len(names), DIMENSIONS), np.float32)
    columns = {
        "namespace": ["default"] * len(names),
        "vector_id": names,
        "vector": values.tolist(),
        "metadata": [b"\x80" if n % 2 else None for n in range(len(names))],
        "deleted": [name in deleted for name in names],
        "revision": list(range(1, len(names) + 1)),
        "time": [0] * len(names),
        "sequence": [0] * len(names),
        "partition": [partition] * len(names),
        "topic": ["vectors"] * len(names),
        "log_time_ms": [0] * len(names),
        "lane": [2] * len(names),
    }
    return pa.table(columns, schema=states_schema(DIMENSIONS))


A = states(["a", "b", "c"])
B = states(["d", "e", "f", "g"], partition=1, deleted=("f",))
SCANNED = ("namespace", "vector_id", "vector", "metadata", "revision")


def scan(*tables: pa.Table) -> pa.Table:
    """What a sink that holds `tables` shows: in another order, in other batches."""
    whole = pa.concat_tables(tables)
    whole = whole.filter(pa.compute.invert(whole["deleted"])).select(SCANNED)
    return whole.take(pa.array(np.arange(whole.num_rows)[::-1]))


def compared(table: pa.Table) -> Comparison:
    return compare_states(Expected([A, B]), table.combine_chunks().to_batches(max_chunksize=2))


def changed(table: pa.Table, name: str, row: int, value: object) -> pa.Table:
    column = table[name].to_pylist()
    column[row] = value
    at = table.schema.get_field_index(name)
    return table.set_column(
        at, table.schema.field(at), pa.array(column, table.schema.field(at).type)
    )


def test_a_sink_that_holds_the_fold_is_equal() -> None:
    found = compared(scan(A, B))
    assert (found.expected, found.compared, found.wrong()) == (6, 6, {})


@pytest.mark.parametrize(
    ("damage", "kind", "vector"),
    [
        (lambda t: changed(t, "vector", 1, [0.5, 0.25, -0.0, 1.0]), "values", "e"),
        (lambda t: changed(t, "metadata", 0, b"\x81\xa1a\x01"), "metadata", "g"),
        (lambda t: changed(t, "metadata", 0, None), "metadata", "g"),
        (lambda t: changed(t, "revision", 2, 9), "revision", "d"),
        (lambda t: changed(t, "revision", 2, 0), "revision", "d"),
        (lambda t: t.slice(1), "missing", "g"),
        (lambda t: changed(t, "vector_id", 0, "z"), "extra", "z"),
        (lambda t: pa.concat_tables([t, t.slice(3, 1)]), "twice", "c"),
        (
            lambda t: pa.concat_tables([t, B.slice(2, 1).select(SCANNED)]),
            "deleted but present",
            "f",
        ),
    ],
)
def test_damage_is_found_and_its_place_named(damage, kind, vector) -> None:  # type: ignore[no-untyped-def]
    found = compared(damage(scan(A, B)))
    assert found.wrong()[kind] == 1
    shown = found.to_dict()["first_differences"]
    assert vector in [one["vector_id"] for one in shown if one["kind"] == kind]


def test_a_negative_zero_is_not_a_zero() -> None:
    zero = changed(A.slice(0, 1), "vector", 0, [0.0] * 4)
    minus = changed(zero, "vector", 0, [-0.0, 0.0, 0.0, 0.0])
    assert not compare_states(Expected([zero]), scan(zero).to_batches()).wrong()
    found = compare_states(Expected([zero]), scan(minus).to_batches())
    assert found.wrong() == {"values": 1}
    assert found.to_dict()["first_differences"][0]["component"] == 0


def test_lag_excuses_what_is_behind_and_nothing_else() -> None:
    older = changed(scan(A, B).slice(1), "revision", 2, 0)
    found = compared(older)
    assert found.wrong() == {"revision": 1, "missing": 1}
    assert (found.wrong({"behind"}), found.pending({"behind"})) == ({}, 2)
    wrong = compared(changed(older, "vector", 4, [9.0] * 4))
    assert wrong.wrong({"behind"}) == {"values": 1}
    assert wrong.wrong({"ahead"}) == {"revision": 1, "values": 1}


def test_what_a_sink_refused_is_excused_by_its_dead_letters() -> None:
    expected = Expected([A, B])
    refused = pa.table({"namespace": ["default"], "vector_id": ["g"]})
    letters = np.isin(expected.keys, keys_of(refused))
    found = compare_states(expected, scan(A, B).slice(1).to_batches(), dead=letters)
    assert (found.wrong({"dead"}), found.wrong()) == ({}, {"missing": 1})
    lost = compare_states(expected, scan(A, B).slice(2).to_batches(), dead=letters)
    assert lost.wrong({"dead"}) == {"missing": 1}


def deltas(count: int) -> pa.Table:
    rows = [
        {
            "topic": "vectors", "partition": 0, "sequence": n + 5, "position": n + 5,
            "ordinal": n + 1, "delta_id": bytes([n]) * 16, "parent": bytes(16) if n else None,
            "namespace": "default", "vector_id": f"v{n % 3}", "op": 2, "origin": "w", "time": n,
            "clock": b"\x81\xa1w\x01", "indices": list(range(n % 4)), "values": [0.5] * (n % 4),
            "metadata": None, "headers": None, "priority": 2, "source": 0, "log_time_ms": 1,
            "payload": None,
        }
        for n in range(count)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=DELTAS)


def histories(actual: pa.Table, *excuses: str) -> dict[str, int]:
    found = Comparison()
    compare_history(deltas(12), actual, found)
    return dict(found.wrong(set(excuses)))  # type: ignore[arg-type]


def test_the_same_history_in_any_order_is_equal() -> None:
    order = np.random.default_rng(1).permutation(12)
    assert histories(deltas(12).take(pa.array(order))) == {}


def test_a_lake_s_types_are_no_difference() -> None:
    lake = deltas(12).drop_columns(["payload"])
    for name, kind in (("delta_id", pa.binary()), ("indices", pa.list_(pa.int32()))):
        at = lake.schema.get_field_index(name)
        lake = lake.set_column(at, name, lake[name].cast(kind))
    assert histories(lake.append_column("payload", pa.nulls(12, pa.binary()))) == {}


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (deltas(11), {"missing": 1}),
        (deltas(13), {"extra": 1}),
        (pa.concat_tables([deltas(12), deltas(2)]), {"twice": 2}),
        (changed(deltas(12), "values", 7, [0.5, 0.5, 0.25]), {"column values": 1}),
        (changed(deltas(12), "values", 7, [0.5, 0.5]), {"column values": 1}),
        (changed(deltas(12), "vector_id", 3, "other"), {"column vector_id": 1}),
        (changed(deltas(12), "parent", 4, None), {"column parent": 1}),
        (changed(deltas(12), "ordinal", 4, 4), {"missing": 1, "twice": 1}),
    ],
)
def test_a_changed_history_is_found(actual: pa.Table, expected: dict[str, int]) -> None:
    assert expected.items() <= histories(actual).items()


def test_a_history_that_lags_is_not_wrong() -> None:
    assert histories(deltas(9), "behind") == {}
    assert histories(changed(deltas(9), "time", 2, 99), "behind") == {"column time": 1}
