"""Which lake may stand in for the log, how far it holds everything, and what is read of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.spark.delivery.delivering import delta, state

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.sinks.lake import LakeSink
from penstock.sinks.protocol import SinkMark, Work
from penstock.sinks.schema import DELTAS, states_schema
from penstock.spark.delivery import lakes
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec, attach
from penstock.spark.delivery.backlog import NONE, CursorFile, SinkCursor
from penstock.spark.delivery.lakes import lake_deltas, lake_position, lake_states, with_lakes
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.options import Connecting
from penstock.spark.store import FolderStore

NOWHERE = Connecting(url="penstock://127.0.0.1:1")  # a connection to it would fail
COMMON: dict[str, Any] = {"namespace": "default", "topic": "t", "log_time_ms": 1}
INDEX = {"kind": "index", "path": "i"}
NOTIFY = {"kind": "notify", "topic": "news"}
LAKE = {"kind": "lake", "path": "l"}


def chosen(*tables: dict[str, Any], transforms: tuple[str, ...] = ()) -> dict[str, RoutedSink]:
    tree = {"name": "p", "topics": ["t"], "state": "s", "sink": list(tables)}
    settings = PipelineSettings.of(tree)
    sinks = attach(settings, pipeline="p-1", node=NOWHERE)
    return {one.sink.name: one for one in with_lakes(sinks, settings, transforms=transforms)}


@pytest.mark.parametrize(
    ("sink", "lake"),
    [
        (INDEX, LAKE),
        (INDEX | {"route": "namespace=a"}, LAKE),
        (INDEX | {"route": "namespace=a"}, LAKE | {"route": ["namespace=a", "namespace=b"]}),
        (INDEX | {"backfill": "lake"}, LAKE),
        (NOTIFY | {"route": "op=delete"}, LAKE),
        (NOTIFY, LAKE | {"transform": "module:function"}),
        (LAKE | {"name": "copy"}, LAKE),
    ],
)
def test_a_lake_fills_whoever_is_fed_no_more_than_it_has(
    sink: dict[str, Any], lake: dict[str, Any]
) -> None:
    found = chosen(sink, lake)[sink.get("name", sink["kind"])].lake
    assert found is not None
    assert found.settings.name == "lake"


@pytest.mark.parametrize(
    ("sink", "lake", "why"),
    [
        (INDEX, NOTIFY, "no lake to take it from"),
        (INDEX, LAKE | {"route": "namespace=a"}, "the routes of lake leave some of it out"),
        (NOTIFY | {"route": "namespace=a"}, LAKE | {"route": "namespace=a"}, "leave some of it"),
        (INDEX, LAKE | {"transform": "module:function"}, "are those of its transform"),
        (INDEX | {"route": "op=delete"}, LAKE, "vectors do not tell"),
        ({"kind": "remote", "topic": "copy"}, LAKE, "does not keep messages as they were sent"),
    ],
)
def test_why_no_lake_fills_a_sink_is_said(
    sink: dict[str, Any], lake: dict[str, Any], why: str
) -> None:
    one = chosen(sink, lake)[sink["kind"]]
    assert one.lake is None
    assert why in one.lakeless
    with pytest.raises(InvalidArgument, match=why):
        chosen(sink | {"backfill": "lake"}, lake)


def test_a_lake_does_not_fill_itself_nor_one_that_is_to_have_the_log_alone() -> None:
    assert chosen(LAKE)["lake"].lake is None
    only = chosen(INDEX | {"backfill": "log"}, LAKE)["index"]
    assert (only.lake, only.lakeless) == (None, 'backfill = "log" rules lakes out')


def test_a_transform_of_the_program_counts_too() -> None:
    assert chosen(INDEX, LAKE, transforms=("lake",))["index"].lake is None
    assert chosen(INDEX, LAKE, transforms=("index",))["index"].lake is not None


# --- what it holds ---


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[LakeSink]:
    sink = LakeSink("lake", path=str(tmp_path / "lake"), pipeline="p-1")
    sink.open()
    yield sink
    sink.close()


def write(lake: LakeSink, trigger: int, *rows: tuple[int, str, int]) -> None:
    """A trigger of deltas by ordinal, vector and revision, and of their states."""
    deltas = [delta(ordinal, name, revision, 2, **COMMON) for ordinal, name, revision in rows]
    states = [state(name, revision, 2, **COMMON) for _, name, revision in rows]
    lake.write(
        Work(
            pipeline="p-1", first=trigger, last=trigger,
            states=pa.Table.from_pylist(states, states_schema(2)),
            deltas=pa.Table.from_pylist(deltas, DELTAS),
        )
    )  # fmt: skip


def test_deltas_come_in_the_order_of_release_in_pieces(
    lake: LakeSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lakes, "DELTAS_ROWS", 2)
    write(lake, 0, (2, "b", 1), (1, "a", 1))
    write(lake, 1, (3, "a", 2), (4, "c", 1))
    found = list(lake_deltas(lake, ("t", 0), through=3))
    assert [table["ordinal"].to_pylist() for table in found] == [[1, 2], [3]]
    assert all(table.schema == DELTAS for table in found)
    assert list(lake_deltas(lake, ("t", 1), through=3)) == []  # nothing was released there


def test_of_each_vector_the_newest_row_is_its_state(lake: LakeSink) -> None:
    write(lake, 0, (1, "a", 1), (2, "b", 1))
    write(lake, 1, (3, "a", 2))
    rows = [row for table in lake_states(lake, ("t", 0)) for row in table.to_pylist()]
    assert {row["vector_id"]: row["revision"] for row in rows} == {"a": 2, "b": 1}
    assert list(lake_states(lake, ("other", 0))) == []


@pytest.mark.parametrize("condition", [f"ordinal {rows}" for rows in ("= 1", "= 2", "= 3", "> 0")])
def test_a_history_from_which_rows_were_deleted_is_refused(lake: LakeSink, condition: str) -> None:
    write(lake, 0, (1, "a", 1), (2, "b", 1), (3, "a", 2))
    lake.history.table.delete(condition)
    with pytest.raises(FailedPrecondition, match="does not have every delta of t/0"):
        list(lake_deltas(lake, ("t", 0), through=3))


def test_a_lake_holds_what_its_cursor_and_its_mark_say(lake: LakeSink, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "state")
    spec = _spec(tmp_path)
    assert lake_position(store, spec) == NONE  # it has never been served
    write(lake, 7, (1, "a", 1))
    file = CursorFile(store, "lake")
    file.save(SinkCursor(position=(8,), told=SinkMark(position=(7,))))  # trigger 8 had no rows
    assert lake_position(store, spec) == 8
    lake.reset()
    assert lake_position(store, spec) == NONE
    file.save(SinkCursor(position=(8,), started=3))
    with pytest.raises(FailedPrecondition, match="what came before trigger 3"):
        lake_position(store, spec)


def _spec(folder: Path) -> SinkSpec:
    table = {"kind": "lake", "path": str(folder / "lake")}
    tree = {"name": "p", "topics": ["t"], "state": "s", "sink": [table]}
    (one,) = PipelineSettings.of(tree).sinks
    return SinkSpec(settings=one, pipeline="p-1", node=NOWHERE)
