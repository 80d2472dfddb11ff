"""Asking the index in the node's memory."""

from typing import Any

import numpy as np
import pytest
from tests.conformance.sinks.changes import State, states, work

from penstock.errors import InvalidArgument, NotFound
from penstock.sinks.memory_index import MemoryIndexSink


def filled(metric: str = "cosine") -> MemoryIndexSink:
    sink = MemoryIndexSink("memory", metric=metric)
    rows = [
        State(vector_id="east", revision=1, values=(1, 0, 0, 0)),
        State(vector_id="far east", revision=2, values=(9, 0, 0, 0), metadata={"far": True}),
        State(vector_id="north", revision=3, values=(0, 1, 0, 0)),
        State(vector_id="east", revision=4, values=(1, 0.1, 0, 0), namespace="other"),
    ]
    sink.write(work(0, states(*rows)))
    return sink


def ids(found: list[Any]) -> list[str]:
    return [one.vector_id for one in found]


def test_the_metric_decides_what_is_near() -> None:
    east = (2.0, 0.2, 0.0, 0.0)
    assert ids(filled("l2").search(east, 1, namespace="default")) == ["east"]
    assert ids(filled("dot").search(east, 1, namespace="default")) == ["far east"]
    found = filled().search(east, 4)
    assert (found[0].namespace, found[0].distance) == ("other", pytest.approx(0, abs=1e-6))
    assert ids(found)[-1] == "north"


def test_a_namespace_is_searched_alone() -> None:
    sink = filled()
    assert [one.revision for one in sink.search((1, 0, 0, 0), 10, namespace="other")] == [4]
    assert sink.search((1, 0, 0, 0), 10, namespace="none") == []
    (far,) = sink.search((9, 0, 0, 0), 1, namespace="default")
    assert far.distance == pytest.approx(0, abs=1e-6)


def test_a_change_is_found_at_its_new_place() -> None:
    sink = filled("l2")
    sink.write(work(1, states(State(vector_id="north", revision=5, values=(0, 0, 7, 0)))))
    sink.write(work(2, states(State(vector_id="east", revision=6, deleted=True))))
    (found,) = sink.search((0, 0, 7, 0), 1)
    assert (found.vector_id, found.revision, found.distance) == ("north", 5, 0.0)
    assert len(sink) == 3
    assert "default" not in {one.namespace for one in sink.search((1, 0, 0, 0), 1)}


def test_many_changes_of_many_vectors_are_all_found() -> None:
    sink = MemoryIndexSink("memory", metric="l2")
    values = np.random.default_rng(1).random((300, 4)).astype(np.float32)
    for turn in range(3):
        rows = [
            State(vector_id=f"v{n}", revision=turn + 1, values=tuple(values[n] + turn))
            for n in range(300)
        ]
        sink.write(work(turn, states(*rows)))
    found = [sink.search(values[n] + 2, 1)[0].vector_id for n in range(300)]
    assert sum(name == f"v{n}" for n, name in enumerate(found)) >= 295  # it is approximate


def test_a_partition_that_moved_is_forgotten_and_may_come_back() -> None:
    sink = filled("l2")
    other = states(State(vector_id="west", revision=3, values=(-1, 0, 0, 0)), partition=1)
    sink.write(work(1, other))
    origin = (0, 0, 0, 0)
    assert ids(sink.search(origin, 5, partitions={1})) == ["west"]
    sink.forget(0)
    assert ids(sink.search(origin, 5)) == ["west"] and len(sink) == 1
    sink.write(work(2, states(State(vector_id="north", revision=2, values=(0, 1, 0, 0)))))
    assert set(ids(sink.search(origin, 5))) == {"west", "north"}


def test_nearer_vectors_of_other_partitions_take_nobodys_place() -> None:
    sink = MemoryIndexSink("memory", metric="l2")
    for partition, far in ((0, 0), (1, 100)):
        rows = [
            State(vector_id=f"{partition}-{n}", revision=1, values=(n + far, 0, 0, 0))
            for n in range(50)
        ]
        sink.write(work(partition, states(*rows, partition=partition)))
    found = sink.search((0, 0, 0, 0), 3, partitions={1})
    assert ids(found) == ["1-0", "1-1", "1-2"]
    assert len(sink.search((0, 0, 0, 0), 60, partitions={1})) == 50


def test_what_cannot_be_asked_is_refused() -> None:
    sink = filled()
    with pytest.raises(NotFound, match="3 dimensions"):
        sink.search((1.0, 2.0, 3.0))
    with pytest.raises(InvalidArgument, match="direction"):
        sink.search((0.0, 0.0, 0.0, 0.0))
    with pytest.raises(InvalidArgument, match="metric"):
        MemoryIndexSink("memory", metric="hamming")


@pytest.mark.parametrize("count", [30, 3000])
def test_a_condition_is_applied_before_neighbours_are_chosen(count: int) -> None:
    """However rare a match is: what the graph shows first may be all others."""
    sink = MemoryIndexSink("memory", metric="l2")
    rows = [
        State(
            vector_id=f"v{n}",
            revision=1,
            values=(n, 0, 0, 0),
            metadata={"n": n, "even": n % 2 == 0},
        )
        for n in range(count)
    ]
    sink.write(work(0, states(*rows)))
    origin = (0.0, 0.0, 0.0, 0.0)
    assert ids(sink.search(origin, 3, where={"even": False})) == ["v1", "v3", "v5"]
    last = [f"v{n}" for n in range(count - 4, count)]
    assert ids(sink.search(origin, 5, where={"n": {"$gte": count - 4}})) == last
    assert sink.search(origin, 5, where={"n": "1"}) == []
    (found,) = sink.search(origin, 5, where={"n": count - 1}, partitions={0})
    assert found.distance == pytest.approx((count - 1) ** 2)
    assert found.metadata == {"n": count - 1, "even": count % 2 == 1}
    assert sink.search(origin, 5, where={"n": count - 1}, partitions={1}) == []


def test_a_deleted_vector_matches_nothing() -> None:
    sink = filled()
    sink.write(work(1, states(State(vector_id="far east", revision=9, deleted=True))))
    assert sink.search((1, 0, 0, 0), 10, where={"far": True}) == []
    with pytest.raises(InvalidArgument, match="where"):
        sink.search((1, 0, 0, 0), where={})
