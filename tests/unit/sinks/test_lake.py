"""The lake's two tables."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.conformance.sinks.changes import State, Triggers, delta, deltas, held, states, work
from tests.s3 import make_bucket, s3_server

from penstock.errors import Unavailable
from penstock.sinks.lake import VECTORS, LakeReceipt, LakeSink, latest
from penstock.sinks.protocol import SinkCommit
from penstock.sinks.schema import newest_of


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[LakeSink]:
    sink = LakeSink("lake", path=str(tmp_path / "lake"), pipeline="pipeline")
    sink.open()
    yield sink
    sink.close()


def again(lake: LakeSink) -> LakeSink:
    """The same lake after a restart."""
    sink = LakeSink("lake", path=lake.path, pipeline=lake.pipeline)
    sink.open()
    return sink


def rows(lake: LakeSink, part: str) -> int:
    return DeltaTable(f"{lake.path}/{part}").count()


def test_a_trigger_is_in_each_table_once(lake: LakeSink) -> None:
    triggers = Triggers.of(3)
    for trigger in (0, 1, 1, 0, 2):
        lake.write(triggers.work(trigger))
    assert (rows(lake, "vectors"), rows(lake, "history")) == (9, 9)
    assert lake.cursor() == again(lake).cursor() == 2


def test_a_crash_between_the_tables_is_made_good(lake: LakeSink) -> None:
    triggers = Triggers.of(4)
    lake.write(triggers.work(0))
    lake.write(work(1, triggers.work(1, 2).deltas))  # the history has 1 and 2, vectors only 0
    found = again(lake)
    assert found.cursor() == 0
    found.write(triggers.work(1, 3))
    assert rows(lake, "history") == 12
    assert {row[2] for row in held(found)} == {4}


def test_a_new_pipeline_finds_the_deltas_of_the_old_one(lake: LakeSink) -> None:
    triggers = Triggers.of(3)
    lake.write(triggers.work(0, 1))
    anew = LakeSink("lake", path=lake.path, pipeline="other")
    anew.open()
    assert anew.cursor() is None
    renamed = Triggers(triggers.each, pipeline="other")
    for trigger in range(3):
        anew.write(renamed.work(trigger))
    assert rows(lake, "history") == 9
    assert anew.cursor() == 2


def test_two_writers_that_take_turns_write_each_delta_once(lake: LakeSink) -> None:
    """As two nodes that host the sink, when a partition moves and its cursor is a little behind."""
    triggers, other = Triggers.of(4), again(lake)
    lake.write(triggers.work(0, 1))
    other.write(triggers.work(1, 3))
    lake.write(triggers.work(2))  # what was under way there
    assert rows(lake, "history") == 12
    assert held(lake) == held(other)


def test_the_history_is_readable_by_anybody(lake: LakeSink) -> None:
    lake.write(work(0, deltas(1, delta(1), delta(2, vector_id="b", metadata=None))))
    table = pa.table(DeltaTable(f"{lake.path}/history").scan())
    first = table.to_pylist()[0]
    assert first["delta_id"] == (1).to_bytes(16, "big")
    assert (first["indices"], first["values"]) == ([1], [1.0])
    assert first["vector_id"] == "a"
    assert "payload" not in table.schema.names


def test_compaction_keeps_the_newest_rows_and_the_cursor(lake: LakeSink) -> None:
    triggers = Triggers.of(5)
    for trigger in range(5):
        lake.write(triggers.work(trigger))
    lake.write(work(5, states(State(vector_id="v0", revision=9, deleted=True))))
    before = held(lake)
    pieces = lake.vectors.pieces()
    batches = [b for piece in pieces for b in lake.vectors.read_piece(piece, VECTORS.names)]
    file = lake.vectors.write(newest_of(pa.Table.from_batches(batches)).cast(VECTORS))
    assert file is not None
    lake.vectors.exchange(pieces, [file], same_rows=False)
    assert rows(lake, "vectors") == 3 < sum(piece.rows for piece in pieces)
    assert lake.vectors.vacuum(retention_hours=0) > 0
    assert held(lake) == before == held(again(lake))
    assert again(lake).cursor() == 4

    lake.write(work(6, states(State(vector_id="v0", revision=8))))  # its tombstone is still there
    lake.write(triggers.work(4))
    assert held(lake) == before
    assert rows(lake, "history") == 15


def test_what_is_appended_during_a_compaction_stays(lake: LakeSink) -> None:
    triggers = Triggers.of(4)
    for trigger in range(2):
        lake.write(triggers.work(trigger))
    pieces = lake.vectors.pieces()
    again(lake).write(triggers.work(2))
    lake.vectors.exchange(pieces, [], same_rows=False)
    assert {row[2] for row in held(again(lake))} == {3}
    assert again(lake).cursor() == 2


def test_the_cursor_survives_the_end_of_the_log(lake: LakeSink) -> None:
    lake.write(Triggers.of(1).work(0))
    for table in (lake.history, lake.vectors):
        table.table.create_checkpoint()
        for entry in (Path(lake.path) / Path(table.uri).name / "_delta_log").glob("*.json"):
            entry.unlink()
    assert again(lake).cursor() == 0


def test_latest_are_the_living_vectors(lake: LakeSink) -> None:
    lake.write(work(0, states(State(vector_id="a", revision=1), State(vector_id="b", revision=1))))
    changed = State(vector_id="a", revision=2, values=(9.0, 9.0, 9.0, 9.0))
    lake.write(work(1, states(changed, State(vector_id="b", revision=2, deleted=True))))
    found = latest(lake.path).read_all()
    assert found.select(["vector_id", "vector", "revision"]).to_pylist() == [
        {"vector_id": "a", "vector": [9.0] * 4, "revision": 2}
    ]


def test_a_lake_that_cannot_be_reached_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("a file, not a folder")
    with pytest.raises(Unavailable):
        LakeSink("lake", path=str(tmp_path / "lake")).open()
    with pytest.raises(Unavailable):
        latest(str(tmp_path / "nowhere"))


def parted(lake: LakeSink, triggers: Triggers, number: int) -> list[LakeReceipt]:
    """A trigger as two tasks write it: one the states, one the deltas."""
    whole = triggers.work(number)
    parts = (replace(whole, deltas=None), replace(whole, states=None))
    return [receipt for part in parts if (receipt := again(lake).write_part(part)) is not None]


def commit_of(number: int) -> SinkCommit:
    return SinkCommit(pipeline="pipeline", first=number, last=number, position=(number,))


def test_what_tasks_wrote_becomes_visible_by_one_commit(lake: LakeSink) -> None:
    triggers = Triggers.of(2)
    receipts = parted(lake, triggers, 0)
    assert (len(receipts), rows(lake, "vectors"), lake.mark()) == (2, 0, None)

    lake.commit(receipts, commit_of(0))
    lake.commit(receipts, commit_of(0))  # the driver did not know that it had

    assert (rows(lake, "vectors"), rows(lake, "history"), lake.cursor()) == (3, 3, 0)
    assert parted(lake, triggers, 0) == []
    assert DeltaTable(f"{lake.path}/history").version() == 1


def test_of_two_drivers_one_commits_a_trigger(lake: LakeSink) -> None:
    """A driver that was overtaken commits in the moment in which the other does."""
    triggers = Triggers.of(1)
    zombie = again(lake)
    receipts = parted(zombie, triggers, 0)
    lake.commit(parted(lake, triggers, 0), commit_of(0))
    files = [file for receipt in receipts for file in receipt if file.part == "history"]

    with pytest.raises(Unavailable, match="oncurrent"):
        zombie.history.append(files, pipeline="pipeline", trigger=0)

    assert rows(lake, "history") == 3


def test_a_lake_in_an_object_store() -> None:
    with s3_server() as options:
        path = f"s3://{make_bucket(options)}/lake"
        lake = LakeSink("lake", path=path, pipeline="pipeline", storage_options=options)
        lake.open()
        triggers = Triggers.of(2)
        for number in range(2):
            lake.write(triggers.work(number))
        lake.write(triggers.work(1))

        assert lake.cursor() == 1
        assert len(held(lake)) == 3
        assert sum(len(batch) for batch in lake.history.batches(["ordinal"])) == 6
