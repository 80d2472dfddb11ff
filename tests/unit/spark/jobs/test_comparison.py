"""Comparisons: equal is equal, and every kind of damage is found and named."""

import numpy as np
import pyarrow as pa
import pytest

from penstock.sinks.schema import DELTAS, states_schema
from penstock.spark.jobs.comparison import Comparison, compare, compare_messages, total
from penstock.spark.jobs.digests import (
    DEAD,
    EXPECTED,
    HELD,
    KEY,
    delta_digests,
    keys_of,
    message_digests,
    state_digests,
)

DIMENSIONS = 4


def states(names: list[str], *, partition: int = 0, deleted: tuple[str, ...] = ()) -> pa.Table:
    rng = np.random.default_rng(len(names))
    values = rng.random((len(names), DIMENSIONS), np.float32)
    columns = {
        "namespace": ["default"] * len(names),
        "vector_id": names,
        "vector": values.tolist(),
        "metadata": ['{"a":1,"b":2.0}' if n % 2 else None for n in range(len(names))],
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


def compared(
    table: pa.Table, *, expected: tuple[pa.Table, ...] = (A, B), dead: tuple[str, ...] = ()
) -> Comparison:
    """With the digests of both sides in batches, as tasks make them."""
    held = [state_digests(b, HELD) for b in table.combine_chunks().to_batches(max_chunksize=2)]
    names = pa.table({"namespace": ["default"] * len(dead), "vector_id": list(dead)})
    letters = message_digests(keys_of(names), DEAD)
    wanted = [state_digests(one, EXPECTED) for one in expected]
    return compare(pa.concat_tables([*wanted, *held, letters]), kind="vectors")


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
        (lambda t: changed(t, "metadata", 0, '{"a":1}'), "metadata", "g"),
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


def test_metadata_may_be_written_in_another_way() -> None:
    assert not compared(changed(scan(A, B), "metadata", 0, '{"b": 2.0, "a": 1}')).wrong()
    for other in ('{"b": 2, "a": 1}', '{"a":1,"b":2.0', '{"a":true,"b":2.0}'):
        assert compared(changed(scan(A, B), "metadata", 0, other)).wrong() == {"metadata": 1}


def test_a_negative_zero_is_not_a_zero() -> None:
    zero = changed(A.slice(0, 1), "vector", 0, [0.0] * 4)
    minus = changed(zero, "vector", 0, [-0.0, 0.0, 0.0, 0.0])
    assert not compared(scan(zero), expected=(zero,)).wrong()
    assert compared(scan(minus), expected=(zero,)).wrong() == {"values": 1}


def test_of_several_revisions_the_highest_counts_and_only_once() -> None:
    older = changed(A, "revision", 2, 1)
    names = [*SCANNED, "deleted"]
    held = pa.concat_tables([older, A, B]).select(names)
    assert compared(held).wrong() == {}
    two = pa.concat_tables([held, changed(A, "vector", 2, [0.0] * 4).select(names)])
    assert compared(two).wrong() == {"twice": 1, "values": 1}


def test_a_vector_of_two_topics_is_expected_with_its_higher_revision() -> None:
    newer = changed(A.slice(0, 1), "revision", 0, 7)
    assert compared(scan(newer), expected=(A.slice(0, 1), newer)).wrong() == {}


def test_comparisons_of_shares_add_up() -> None:
    found = total(compared(scan(A, B).slice(lost)) for lost in range(3))
    assert (found.expected, found.compared, found.wrong()) == (18, 15, {"missing": 3})
    assert len(found.shown()) == 3


def test_messages_are_counted_by_their_delta() -> None:
    ids = np.array([bytes([n]) * 16 for n in range(1, 6)], KEY)
    assert compare_messages(ids, ids[::-1], others=False).wrong() == {}
    held = np.concatenate([ids[1:], ids[4:], np.array([b"x" * 16], KEY)])
    found = compare_messages(ids, held, others=False)
    assert found.wrong() == {"missing": 1, "twice": 1, "extra": 1}
    assert "extra" not in compare_messages(ids, held, others=True).wrong()


def test_lag_excuses_what_is_behind_and_nothing_else() -> None:
    older = changed(scan(A, B).slice(1), "revision", 2, 0)
    found = compared(older)
    assert found.wrong() == {"revision": 1, "missing": 1}
    assert (found.wrong({"behind"}), found.pending({"behind"})) == ({}, 2)
    wrong = compared(changed(older, "vector", 4, [9.0] * 4))
    assert wrong.wrong({"behind"}) == {"values": 1}
    assert wrong.wrong({"ahead"}) == {"revision": 1, "values": 1}


def test_what_a_sink_refused_is_excused_by_its_dead_letters() -> None:
    found = compared(scan(A, B).slice(1), dead=("g",))
    assert (found.wrong({"dead"}), found.wrong()) == ({}, {"missing": 1})
    assert compared(scan(A, B).slice(2), dead=("g",)).wrong({"dead"}) == {"missing": 1}


def deltas(count: int) -> pa.Table:
    rows = [
        {
            "topic": "vectors", "partition": 0, "sequence": n + 5, "position": n + 5,
            "ordinal": n + 1, "delta_id": bytes([n]) * 16, "parent": bytes(16) if n else None,
            "namespace": "default", "vector_id": f"v{n % 3}", "op": 2, "origin": "w", "time": n,
            "clock": '{"w":1}', "indices": list(range(n % 4)), "values": [0.5] * (n % 4),
            "metadata": None, "headers": None, "priority": 2, "source": 0, "log_time_ms": 1,
            "payload": None, "original": None,
        }
        for n in range(count)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=DELTAS)


def histories(actual: pa.Table, *excuses: str) -> dict[str, int]:
    both = pa.concat_tables([delta_digests(deltas(12), EXPECTED), delta_digests(actual, HELD)])
    return dict(compare(both, kind="history").wrong(set(excuses)))  # type: ignore[arg-type]


def test_the_same_history_in_any_order_is_equal() -> None:
    order = np.random.default_rng(1).permutation(12)
    assert histories(deltas(12).take(pa.array(order))) == {}


def test_a_lake_s_types_are_no_difference() -> None:
    lake = deltas(12).drop_columns(["payload", "original"])
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
