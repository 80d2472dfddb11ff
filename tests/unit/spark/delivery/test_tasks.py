"""Shares of a write, and what a task makes of one; without Spark."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.sinks.changes import State, states

from penstock.errors import InvalidArgument, Unavailable
from penstock.sinks.index import Index
from penstock.sinks.protocol import SHARDS_MAX, Feed, InTasks, Work, shards_of
from penstock.spark.delivery.attachment import SinkSpec
from penstock.spark.delivery.selection import ChangeSelection, Portion, Shard, SinkRoutes, TakenPart
from penstock.spark.delivery.tasks import SinkOrder, joined, shares, without_shards, write_share
from penstock.spark.delivery.transform import (
    STATES_IN_SPARK,
    check_columns,
    states_of,
    transform_named,
)
from penstock.spark.fold.partition_step import SHARDED_ROWS, write_states
from penstock.spark.fold.state import ChangePart, ChangeWriter
from penstock.spark.settings import SinkSettings
from penstock.spark.source.options import Connecting
from penstock.spark.store import FolderStore, StoreAddress

NOWHERE = Connecting(url="penstock://127.0.0.1:1")
LANE = frozenset({2})


def written(folder: Path, *names: str, partition: int = 0, sharded: bool = False) -> TakenPart:
    rows = [State(vector_id=name, revision=1) for name in names]
    writer = ChangeWriter(FolderStore(folder), claim=1, topic="vectors", partition=partition)
    write_states(writer, states(*rows, partition=partition), sharded=sharded)
    return TakenPart(writer.finish(first=1, last=len(rows), counts={}), LANE)


def order_for(folder: Path, **settings: Any) -> SinkOrder:
    spec = SinkSpec(settings=SinkSettings(**settings), pipeline="p", node=NOWHERE)
    return SinkOrder(spec=spec, changes=StoreAddress(url=str(folder)))


def part_of(partition: int, size: int) -> TakenPart:
    part = ChangePart(topic="vectors", partition=partition, first=1, last=9, bytes=size)
    return TakenPart(part, LANE)


def test_a_write_is_shared_out_by_partition_about_equally() -> None:
    sizes = {0: 90, 1: 40, 2: 30, 3: 20}
    taken = tuple(part_of(p, size) for p, size in sizes.items() for _ in range(2))

    found = shares(Portion(3, 5, taken), tasks=2, shards=0)

    places = [{one.part.partition for one in task.portion.taken} for task in found]
    assert places == [{0}, {1, 2, 3}]
    assert sum(len(task.portion.taken) for task in found) == len(taken)
    assert len(shares(Portion(3, 5, taken), tasks=16, shards=0)) == 4


def test_every_shard_belongs_to_one_task() -> None:
    found = shares(Portion(0, 0, (part_of(0, 1),)), tasks=3, shards=8)
    numbers = [shard.number for task in found for shard in task.shards if shard]
    assert (len(found), sorted(numbers)) == (3, list(range(8)))


def test_a_transform_reads_each_part_once_however_the_write_is_shared_out() -> None:
    taken = tuple(part_of(partition, 10) for partition in range(3))
    for shards in (0, 8):
        found, units = without_shards(shares(Portion(0, 0, taken), tasks=3, shards=shards))
        assert found == shards
        assert sorted(p.part.partition for u in units for p in u.portion.taken) == [0, 1, 2]
        assert {shard for unit in units for shard in unit.shards} == {None}


@pytest.mark.parametrize("count", [50, SHARDED_ROWS + 10])
@pytest.mark.parametrize("of", [1, 4, SHARDS_MAX])
def test_each_row_is_in_one_shard_however_the_file_is_laid_out(
    tmp_path: Path, count: int, of: int
) -> None:
    taken = written(tmp_path, *(f"v{n}" for n in range(count)), sharded=True)
    assert len(taken.part.sections) == (SHARDS_MAX if count > SHARDED_ROWS else 1)
    selection = ChangeSelection(store=FolderStore(tmp_path), pipeline="p", routes=SinkRoutes())
    found = []
    for number in range(of):
        for work in selection.select(Portion(0, 0, (taken,)), shard=Shard(number, of)).works:
            assert work.states is not None
            assert set(shards_of(work.states) % of) == {number}
            found += work.states["vector_id"].to_pylist()
    assert sorted(found) == sorted(f"v{n}" for n in range(count))


def test_a_task_writes_its_shards_into_tables_of_their_own(tmp_path: Path) -> None:
    names = [f"v{n}" for n in range(40)]
    portion = Portion(0, 0, (written(tmp_path, *names),))
    order = order_for(
        tmp_path, kind="index", name="index", options={"path": str(tmp_path / "i"), "shards": 2}
    )
    outcomes = [write_share(order, task) for task in shares(portion, tasks=2, shards=2)]

    assert joined(outcomes).rows == len(names)
    index = Index(str(tmp_path / "i"))
    assert [place.name for place in index.places()] == ["vectors_4_0_of_2", "vectors_4_1_of_2"]
    assert index.count() == len(names)
    assert {one.vector_id for one in index.search([1.0, 2.0, 3.0, 4.0], 40)} == set(names)
    assert index.get("v7") is not None


class Moody(InTasks):
    """A sink whose store is away at first."""

    feed, ordered, name = Feed.STATES, False, "moody"
    opened: ClassVar[list[str]] = []
    away = True

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self) -> None:
        self.opened.append("open")

    def write(self, work: Work) -> None:
        if self.away:
            raise Unavailable("the store is away")

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Any:
        return iter(())

    def reset(self) -> None:
        return

    def close(self) -> None:
        self.opened.append("close")


def test_a_store_that_is_away_is_an_answer_and_the_next_task_opens_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portion = Portion(0, 0, (written(tmp_path, "a"),))
    order = order_for(tmp_path, kind=f"{__name__}:Moody", name="moody")
    (task,) = shares(portion, tasks=1, shards=0)

    failed = write_share(order, task)
    assert failed.failure == ("Unavailable", "the store is away")
    with pytest.raises(Unavailable, match="the store is away"):
        joined([failed])
    monkeypatch.setattr(Moody, "away", False)

    assert joined([write_share(order, task)]).rows == 1
    assert Moody.opened == ["open", "close", "open"]


def test_what_a_transform_gives_back_is_checked() -> None:
    with pytest.raises(InvalidArgument, match="namespace as nothing, must be string"):
        check_columns({})
    with pytest.raises(InvalidArgument, match="cannot be loaded"):
        transform_named("no.such.module:function", field="transform")
    with pytest.raises(InvalidArgument, match="no function"):
        transform_named(f"{__name__}:LANE", field="transform")


def test_rows_from_spark_are_grouped_by_their_dimensions() -> None:
    columns = STATES_IN_SPARK
    row = {field.name: None for field in columns} | {
        "namespace": "n", "deleted": False, "revision": 1, "time": 1, "sequence": 1,
        "partition": 0, "topic": "t", "log_time_ms": 1, "lane": 2,
    }  # fmt: skip
    rows = [row | {"vector_id": f"v{n}", "vector": [1.0] * (2 + n % 2)} for n in range(4)]

    found = list(states_of(pa.Table.from_pylist(rows, columns).to_batches()))

    shapes = [np.stack(t["vector"].to_numpy(zero_copy_only=False)).shape for t in found]
    assert shapes == [(2, 2), (2, 3)]
    with pytest.raises(InvalidArgument, match="vector that is null"):
        list(states_of(pa.Table.from_pylist([row | {"vector_id": "v"}], columns).to_batches()))
