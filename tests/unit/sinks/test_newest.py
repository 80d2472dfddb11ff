"""The newest state of each vector."""

import numpy as np
import pyarrow as pa
from tests.conformance.sinks.changes import State, states

from penstock.sinks import newest


def test_the_highest_revision_wins_wherever_it_stands() -> None:
    keys = pa.array(["a", "b", "a", "c", "b", "a"])
    found = newest.newest(keys, np.array([1, 9, 5, 1, 2, 3]))
    assert np.flatnonzero(found).tolist() == [1, 2, 3]


def test_of_equal_revisions_one_is_taken() -> None:
    found = newest.newest(pa.array(["a", "a", "a"]), np.array([2, 2, 1]))
    assert found.tolist() == [False, True, False]


def test_a_table_is_thinned_out_by_name() -> None:
    table = states(
        State(vector_id="a", revision=2),
        State(vector_id="a", revision=1),
        State(vector_id="a", revision=1, namespace="other"),
    )
    found = newest.newest_of(table)
    assert found.select(["namespace", "revision"]).to_pylist() == [
        {"namespace": "default", "revision": 2},
        {"namespace": "other", "revision": 1},
    ]
    assert newest.newest_of(found) is found


def test_a_stream_is_judged_as_a_whole() -> None:
    table = states(*(State(vector_id=f"v{i % 5}", revision=i + 1) for i in range(20)))
    batches = table.to_batches(max_chunksize=3)
    chosen = newest.winners(batches)
    rows = [row for batch in newest.chosen_rows(batches, chosen) for row in batch.to_pylist()]
    assert sorted(row["revision"] for row in rows) == [16, 17, 18, 19, 20]
    assert len(newest.winners([])) == 0
