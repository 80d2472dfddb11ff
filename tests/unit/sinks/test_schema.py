"""States and deltas as Arrow tables, and the newest state of each vector."""

import json

import numpy as np
import pyarrow as pa
from tests.conformance.sinks.changes import START_MS, State, delta, deltas, states

from penstock.demo.corpus import CorpusOptions, generate
from penstock.model.columns import Binary
from penstock.model.delta import Op
from penstock.model.delta_batch import DeltaBatch
from penstock.sinks.schema import (
    DELTAS,
    chosen_rows,
    deltas_table,
    dimensions_of,
    newest,
    newest_of,
    states_schema,
    winners,
)


def table_of(batch: DeltaBatch, *, partition: int = 0, payloads: bool = False) -> pa.Table:
    numbers = np.arange(1, len(batch) + 1, dtype=np.uint64)
    return deltas_table(
        batch,
        positions=numbers,
        ordinals=numbers,
        topic="t",
        partition=partition,
        payloads=payloads,
    )


def test_deltas_say_what_their_payloads_do() -> None:
    ops = dict.fromkeys(Op, 1.0)
    options = CorpusOptions(
        deltas=500, vectors=40, dimensions=8, components=3, concurrent=0.3, origins=5, ops=ops
    )
    batch = DeltaBatch.of(generate(options).chunk(0, 500).payloads)
    table = table_of(batch, partition=3, payloads=True)
    table.validate(full=True)
    assert table.schema.equals(DELTAS)
    for row, wanted in zip(table.to_pylist(), batch.decoded(), strict=True):
        for name in ("delta_id", "parent", "namespace", "vector_id", "op", "origin", "time"):
            assert row[name] == getattr(wanted, name), name
        assert json.loads(row["clock"]) == wanted.clock
        assert row["values"] == ([] if wanted.values is None else wanted.values.tolist())
        if wanted.indices is not None:
            assert row["indices"] == wanted.indices.tolist()
        text = row["metadata"]
        assert (None if text is None else json.loads(text)) == wanted.metadata
        assert (row["topic"], row["partition"]) == ("t", 3)
    assert table["payload"].to_pylist() == list(batch.payloads)


def test_a_clock_may_have_many_origins() -> None:
    clock = {f"origin-{i}": 1000**i % 2**60 + 1 for i in range(32)}
    table = deltas(1, delta(1, origin="origin-0", clock=clock), delta(2))
    first, second = table["clock"].to_pylist()
    assert json.loads(first) == clock
    assert second == '{"writer":2}'


def test_headers_are_null_where_there_are_none() -> None:
    payloads = Binary.of(deltas(1, delta(1), delta(2))["payload"].to_pylist())
    batch = DeltaBatch.of(payloads, headers=Binary.of([b"", b"\x80"]))
    table = table_of(batch)
    assert table["headers"].to_pylist() == [None, "{}"]
    assert table["payload"].null_count == 2


def test_nothing_released_is_an_empty_table() -> None:
    table = table_of(DeltaBatch.empty(), payloads=True)
    table.validate(full=True)
    assert len(table) == 0
    assert table.schema.equals(DELTAS)


def test_states_keep_every_column() -> None:
    table = states(
        State(vector_id="é", revision=3, metadata={"a": 1}),
        State(vector_id="b", revision=2**40, deleted=True),
        partition=5,
    )
    table.validate(full=True)
    assert table.schema.equals(states_schema(4))
    assert dimensions_of(table) == 4
    first, second = table.to_pylist()
    assert first["vector"] == [1.0, 2.0, 3.0, 4.0]
    assert first["metadata"] == '{"a":1}'
    assert (second["metadata"], second["deleted"], second["revision"]) == (None, True, 2**40)
    assert second["vector"] == [0.0] * 4
    assert (first["partition"], first["lane"], first["log_time_ms"]) == (5, 2, START_MS + 3)


def test_no_states_are_an_empty_table() -> None:
    table = states(State(vector_id="a", revision=1)).slice(0, 0)
    assert pa.concat_tables([table, states(State(vector_id="a", revision=1))]).num_rows == 1


def test_the_highest_revision_wins_wherever_it_stands() -> None:
    keys = pa.array(["a", "b", "a", "c", "b", "a"])
    found = newest(keys, np.array([1, 9, 5, 1, 2, 3]))
    assert np.flatnonzero(found).tolist() == [1, 2, 3]


def test_of_equal_revisions_one_is_taken() -> None:
    found = newest(pa.array(["a", "a", "a"]), np.array([2, 2, 1]))
    assert found.tolist() == [False, True, False]


def test_a_table_is_thinned_out_by_name() -> None:
    table = states(
        State(vector_id="a", revision=2),
        State(vector_id="a", revision=1),
        State(vector_id="a", revision=1, namespace="other"),
    )
    found = newest_of(table)
    assert found.select(["namespace", "revision"]).to_pylist() == [
        {"namespace": "default", "revision": 2},
        {"namespace": "other", "revision": 1},
    ]
    assert newest_of(found) is found


def test_a_stream_is_judged_as_a_whole() -> None:
    table = states(*(State(vector_id=f"v{i % 5}", revision=i + 1) for i in range(20)))
    batches = table.to_batches(max_chunksize=3)
    chosen = winners(batches)
    rows = [row for batch in chosen_rows(batches, chosen) for row in batch.to_pylist()]
    assert sorted(row["revision"] for row in rows) == [16, 17, 18, 19, 20]
    assert len(winners([])) == 0
