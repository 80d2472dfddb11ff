"""Asking the index, and keeping it tidy."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.sinks.changes import START_MS, State, held, opened, states, work

import penstock
from penstock.errors import Corruption, InvalidArgument, NotFound
from penstock.sinks import index as index_module
from penstock.sinks.index import DAY_MS, Index, IndexSink, trained_metric
from penstock.sinks.protocol import SinkCommit


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
    return int(sink.index.tables(4)[0].stats()["fragment_stats"]["num_fragments"])


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
    assert sink.index.tables(4)[0].count_rows() == 4
    now += 1000
    sink.tidy()
    assert sink.index.tables(4)[0].count_rows() == 1


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
    assert len(sink.index.tables(4)[0].list_indices()) == 0
    sink.write(work(1, states(*rows[200:])))
    sink.tidy()
    assert len(sink.index.tables(4)[0].list_indices()) == 1

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


SHOP = {
    "boot": {"lang": "de", "price": 80, "tags": ["new", "red"], "maker": {"land": "at"}},
    "clog": {"lang": "de", "price": 9.5, "tags": ["new"], "maker": {"land": "nl"}},
    "pump": {"lang": "en", "price": 30, "tags": [], "sale": True},
    "sock": {"lang": "o'b\"c", "price": "9", "sale": None},
    "lace": None,
}


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[IndexSink]:
    sink = IndexSink("shop", path=str(tmp_path / "shop"))
    sink.open()
    rows = [
        State(vector_id=name, revision=1, values=(n + 1, 0, 0, 0), metadata=metadata)
        for n, (name, metadata) in enumerate(SHOP.items())
    ]
    sink.write(work(0, states(*rows)))
    yield sink
    sink.close()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"lang": "de"}, ["boot", "clog"]),
        ({"lang": "o'b\"c"}, ["sock"]),
        ({"lang": "' OR deleted = true OR '' = '"}, []),
        ({"' OR true OR '": "x"}, []),
        ({"price": {"$lt": 50}}, ["clog", "pump"]),
        ({"price": {"$gte": 9.5, "$lte": 30}}, ["clog", "pump"]),
        ({"price": "9"}, ["sock"]),
        ({"tags": "new"}, ["boot", "clog"]),
        ({"tags": {"$in": ["red", "blue"]}}, ["boot"]),
        ({"maker.land": "nl"}, ["clog"]),
        ({"sale": True}, ["pump"]),
        ({"sale": None}, ["sock"]),
        ({"sale": {"$exists": False}}, ["boot", "clog", "lace"]),
        ({"lang": {"$ne": "de"}}, ["pump", "sock", "lace"]),
        ({"$or": [{"maker.land": "at"}, {"lang": "en"}]}, ["boot", "pump"]),
    ],
)
def test_a_condition_chooses_among_the_metadata(
    where: dict[str, Any], expected: list[str], shop: IndexSink
) -> None:
    assert ids(shop.index.search((0, 0, 0, 0), 10, metric="l2", where=where)) == expected


def test_a_condition_is_applied_before_neighbours_are_chosen(shop: IndexSink) -> None:
    (found,) = shop.index.search((0, 0, 0, 0), 1, metric="l2", where={"lang": "en"})
    assert (found.vector_id, found.metadata) == ("pump", SHOP["pump"])


def test_a_changed_or_deleted_vector_no_longer_matches(shop: IndexSink) -> None:
    changed = State(vector_id="boot", revision=2, metadata={"lang": "en"})
    gone = State(vector_id="clog", revision=2, deleted=True)
    shop.write(work(1, states(changed, gone)))
    search = shop.index.search
    assert search((1, 0, 0, 0), 10, where={"lang": "de"}) == []
    assert set(ids(search((1, 0, 0, 0), 10, where={"lang": "en"}))) == {"boot", "pump"}


def test_an_unknown_operator_is_refused(shop: IndexSink) -> None:
    with pytest.raises(InvalidArgument) as refused:
        shop.index.search((1, 0, 0, 0), where={"lang": {"$like": "d"}})
    assert refused.value.field == "where.lang"


def test_a_trained_index_finds_exactly_what_matches(tmp_path: Path) -> None:
    sink = IndexSink("index", path=str(tmp_path / "i"), metric="l2", train_rows=256, tidy_every=1)
    sink.open()
    rng = np.random.default_rng(1)
    values = rng.standard_normal((2000, 4)).astype(np.float32)
    rows = [
        State(vector_id=f"v{i}", revision=1, values=tuple(values[i].tolist()), metadata={"n": i})
        for i in range(2000)
    ]
    sink.write(work(0, states(*rows)))
    assert trained_metric(sink.index.tables(4)[0]) == "l2"
    query, rare = rng.standard_normal(4).astype(np.float32), {"n": {"$gte": 100, "$lt": 107}}
    distances = ((values[100:107] - query) ** 2).sum(axis=1)
    wanted = [f"v{100 + i}" for i in np.argsort(distances)]
    assert ids(sink.index.search(query, 7, metric="l2", where=rare)) == wanted
    sink.close()


def test_metadata_are_json_that_lancedb_itself_can_query(shop: IndexSink) -> None:
    table = shop.index.tables(4)[0]
    assert table.count_rows("json_extract(metadata, '$.maker.land') = '\"at\"'") == 1
    scanned = {row["vector_id"]: row["metadata"] for b in shop.scan() for row in b.to_pylist()}
    assert {name: text and json.loads(text) for name, text in scanned.items()} == SHOP


def test_a_large_table_finds_its_keys_by_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "KEYED_ROWS", 10)
    with opened(IndexSink("index", path=str(tmp_path / "keyed"), tidy_every=1)) as sink:
        assert isinstance(sink, IndexSink)
        for revision in (1, 2, 3):
            rows = [
                State(vector_id=f"v{n}", revision=revision, metadata={"at": [n, revision]})
                for n in range(20)
            ]
            sink.write(work(revision, states(*rows)))
        (table,) = sink.index.tables(4)
        assert [one.columns for one in table.list_indices()] == [["key"]]
        assert {row[2] for row in held(sink)} == {3}
        found = sink.index.get("v7")
        assert found is not None and found.metadata == {"at": [7, 3]}
        assert len(held(sink)) == 20


def test_an_index_is_trained_anew_when_it_has_doubled(tmp_path: Path) -> None:
    with opened(
        IndexSink("index", path=str(tmp_path / "grown"), tidy_every=1, train_rows=256)
    ) as sink:
        assert isinstance(sink, IndexSink)
        names = []
        for trigger, count in enumerate((300, 500, 700)):
            rows = [State(vector_id=f"v{n}", revision=trigger + 1) for n in range(count)]
            sink.write(work(trigger, states(*rows)))
            (table,) = sink.index.tables(4)
            names += [one.name for one in table.list_indices() if one.columns == ["vector"]]
    assert names == ["vector_300", "vector_300", "vector_700"]


def test_a_mark_goes_with_what_it_speaks_of(tmp_path: Path) -> None:
    folder = tmp_path / "marked"
    sink = IndexSink("index", path=str(folder), pipeline="p")
    with opened(sink):
        assert sink.mark() is None
        first, last = (
            SinkCommit(pipeline="p", first=0, last=n, position=(n, n, n, 3), claim=n)
            for n in (3, 4)
        )
        sink.commit([], first)
        sink.close()
        sink.open()  # by the next driver
        sink.commit([], last)
        sink.commit([], SinkCommit(pipeline="p-00000004", first=0, last=1, position=(1,)))
        assert sink.mark() == last.mark
        (left,) = folder.glob("penstock-mark-p-0000000?.json")
        assert left.name == "penstock-mark-p-00000004.json"
        left.write_text("{}")
        with pytest.raises(Corruption, match="not a pipeline's mark"):
            sink.mark()
        sink.reset()
        assert sink.mark() is None


@pytest.mark.parametrize("shards", [0, 3, 128])
def test_shards_are_a_power_of_two(shards: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        IndexSink("index", path="x", shards=shards)
    assert (caught.value.field, caught.value.limit) == ("shards", 64)
