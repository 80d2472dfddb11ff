"""Asking the index."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.sinks.changes import State, states, work

import penstock
from penstock.errors import InvalidArgument, NotFound
from penstock.sinks.index import Index
from penstock.sinks.index_sink import IndexSink


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
