"""Asking the index, and keeping it tidy."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.sinks.changes import START_MS, State, held, states, work

import penstock
from penstock.errors import InvalidArgument, NotFound
from penstock.sinks.index import DAY_MS, Index, IndexSink


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[IndexSink]:
    sink = IndexSink("index", path=str(tmp_path / "index"))
    sink.open()
    rows = [
        State(vector_id="east", revision=1, values=(1, 0, 0, 0)),
        State(vector_id="far east", revision=2, values=(9, 0, 0, 0), metadata={"far": True}),
        State(vector_id="north", revision=3, values=(0, 1, 0, 0)),
        State(vector_id="east", revision=4, values=(1, 0.1, 0, 0), namespace="o'ther"),
    ]
    sink.write(work(0, states(*rows)))
    yield sink
    sink.close()


@pytest.fixture
def index(sink: IndexSink) -> Index:
    return penstock.open_index(Path(sink.path))


def ids(found: list[Any]) -> list[str]:
    return [one.vector_id for one in found]


def test_the_metric_decides_what_is_near(index: Index) -> None:
    east = (2.0, 0.2, 0.0, 0.0)
    assert ids(index.search(east, 1, namespace="default", metric="l2")) == ["east"]
    assert ids(index.search(east, 1, namespace="default", metric="dot")) == ["far east"]
    found = index.search(east, 4)
    assert (found[0].namespace, found[0].distance) == ("o'ther", pytest.approx(0, abs=1e-6))
    assert ids(found)[-1] == "north"
    assert [one.distance for one in found] == sorted(one.distance for one in found)


def test_a_neighbour_brings_its_metadata(index: Index) -> None:
    (found,) = index.search((9, 0, 0, 0), 1, metric="l2")
    assert (found.vector_id, found.revision, found.metadata) == ("far east", 2, {"far": True})


def test_a_namespace_is_searched_alone(index: Index) -> None:
    assert ids(index.search((1, 0, 0, 0), 10, namespace="o'ther")) == ["east"]
    assert index.search((1, 0, 0, 0), 10, namespace="none") == []


def test_what_is_written_meanwhile_is_found(index: Index, sink: IndexSink) -> None:
    assert index.count() == 4
    gone = State(vector_id="east", revision=5, deleted=True)
    sink.write(work(1, states(gone, State(vector_id="south", revision=1, values=(0, -1, 0, 0)))))
    assert ids(index.search((0, -1, 0, 0), 1)) == ["south"]
    assert "east" not in ids(index.search((1, 0, 0, 0), 10, namespace="default"))
    assert index.count() == 4


def test_one_vector_by_its_name(index: Index) -> None:
    found = index.get("east", namespace="o'ther")
    assert found is not None
    assert found.values.tolist() == np.array([1, 0.1, 0, 0], np.float32).tolist()
    assert index.get("east'") is None


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"vector": (1.0, float("nan"), 0.0, 0.0)}, "vector"),
        ({"vector": (0.0, 0.0, 0.0, 0.0)}, "vector"),
        ({"vector": ()}, "vector"),
        ({"vector": "east"}, "vector"),
        ({"k": 0}, "k"),
        ({"metric": "hamming"}, "metric"),
    ],
)
def test_bad_questions_name_their_field(index: Index, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        index.search(**{"vector": (1, 0, 0, 0), **asked})
    assert refused.value.field == field


def test_there_is_no_table_for_every_dimension(index: Index) -> None:
    with pytest.raises(NotFound, match="no vectors of 3 dimensions"):
        index.search((1, 0, 0))


def test_an_empty_folder_has_no_vectors(tmp_path: Path) -> None:
    with penstock.open_index(tmp_path) as index:
        assert (index.count(), index.dimensions()) == (0, [])
        assert index.get("a") is None


Make = Callable[..., IndexSink]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(**options: Any) -> IndexSink:
        sink = IndexSink("index", path=str(tmp_path / "index"), **options)
        sink.open()
        return sink

    return made


def fragments(sink: IndexSink) -> int:
    return int(sink.index.table(4).stats()["fragment_stats"]["num_fragments"])


def test_many_writes_leave_few_fragments(make: Make) -> None:
    sink = make(tidy_every=4)
    for number in range(17):
        sink.write(work(number, states(State(vector_id=f"v{number % 3}", revision=number + 1))))
        assert fragments(sink) <= 5
    assert {row[1]: row[2] for row in held(sink)} == {"v0": 16, "v1": 17, "v2": 15}


def test_a_large_table_that_changed_little_is_tidied_later(make: Make) -> None:
    sink = make(tidy_every=2)
    sink.write(work(0, states(*(State(vector_id=f"v{i}", revision=1) for i in range(200)))))
    sink.tidy()
    counts = []
    for number in range(8):
        sink.write(work(number, states(State(vector_id=f"v{number}", revision=2))))
        counts.append(fragments(sink))
    assert counts[6] == 8
    assert counts[7] == 1


def test_old_tombstones_are_forgotten(make: Make) -> None:
    now = START_MS
    sink = make(tombstone_days=2.0, now_ms=lambda: now)
    gone = [State(vector_id=f"v{i}", revision=5, deleted=True) for i in range(3)]
    sink.write(work(0, states(*gone, State(vector_id="here", revision=1))))
    now = START_MS + 2 * DAY_MS
    sink.tidy()
    assert sink.index.table(4).count_rows() == 4
    now += 1000
    sink.tidy()
    assert sink.index.table(4).count_rows() == 1


def test_a_vector_twice_in_a_work_counts_once(make: Make) -> None:
    sink = make()
    rows = [State(vector_id="a", revision=revision) for revision in (2, 9, 4)]
    sink.write(work(0, states(*rows)))
    sink.write(work(1, states(*rows)))
    assert [row[2] for row in held(sink)] == [9]


def test_a_slice_of_a_larger_table_is_written_as_it_is(make: Make) -> None:
    sink = make()
    rows = [State(vector_id=f"v{i}", revision=i + 1, values=(i, 1, 1, 1)) for i in range(9)]
    sink.write(work(0, states(*rows).slice(4, 3)))
    found = [(row[1], np.frombuffer(row[3], np.float32)[0]) for row in held(sink)]
    assert found == [("v4", 4.0), ("v5", 5.0), ("v6", 6.0)]


def test_a_table_that_has_grown_is_trained(make: Make) -> None:
    rng = np.random.default_rng(7)
    sink = make(train_rows=256, metric="l2")
    values = rng.standard_normal((400, 4)).astype(np.float32)
    rows = [State(vector_id=f"v{i}", revision=1, values=tuple(values[i])) for i in range(400)]
    sink.write(work(0, states(*rows[:200], State(vector_id="x", revision=1, deleted=True))))
    sink.tidy()
    assert len(sink.index.table(4).list_indices()) == 0
    sink.write(work(1, states(*rows[200:])))
    sink.tidy()
    assert len(sink.index.table(4).list_indices()) == 1

    nearest = [sink.index.search(values[i], 1, metric="l2")[0].vector_id for i in range(20)]
    assert sum(found == f"v{i}" for i, found in enumerate(nearest)) >= 18
    far = sink.index.search(values[3], 3, metric="cosine")
    assert far == sink.index.search(values[3], 3, metric="cosine", exact=True)
    sink.write(work(2, states(State(vector_id="new", revision=1, values=(50, 50, 50, 50)))))
    assert sink.index.search((50, 50, 50, 50), 1, metric="l2")[0].vector_id == "new"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"metric": "hamming"}, "metric"), ({"tidy_every": 0}, "tidy_every"),
     ({"train_rows": 5}, "train_rows")],
)  # fmt: skip
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        IndexSink("index", path="unused", **options)
    assert refused.value.field == field
