"""What every sink promises that is written by tasks; see `TaskSink`."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.sinks.changes import PIPELINE, State, delta, deltas, opened, states
from tests.conformance.sinks.conftest import Place

from penstock.sinks.protocol import (
    Feed,
    PiecedSink,
    Sink,
    SinkCommit,
    SinkMark,
    TaskSink,
    Work,
    shards_of,
)

PARTITIONS, ROWS = 3, 5  # of the log; in each trigger and partition


def task_sink(place: Place) -> TaskSink:
    sink = place.sink()
    assert isinstance(sink, TaskSink)
    return sink


def works(trigger: int, *, shards: int) -> list[Work]:
    """A trigger's rows as tasks are given them: by log partition, or by shard."""
    changed, released = [], []
    for partition in range(PARTITIONS):
        names = [f"v{partition}-{row}" for row in range(ROWS)]
        rows = [State(vector_id=name, revision=trigger + 1) for name in names]
        changed.append(states(*rows, partition=partition))
        numbers = [(trigger * PARTITIONS + partition) * ROWS + row + 1 for row in range(ROWS)]
        made = [delta(n, vector_id=name) for n, name in zip(numbers, names, strict=True)]
        released.append(deltas(trigger * ROWS + 1, *made, partition=partition))
    if not shards:
        both = zip(changed, released, strict=True)
        return [_work(trigger, table, history) for table, history in both]
    whole = pa.concat_tables(changed)
    owners = shards_of(whole) % shards
    return [_work(trigger, whole.filter(pa.array(owners == n)), None) for n in range(shards)]


def _work(trigger: int, table: pa.Table, history: pa.Table | None) -> Work:
    return Work(pipeline=PIPELINE, first=trigger, last=trigger, states=table, deltas=history)


def written(place: Place, trigger: int) -> list[Any]:
    """The receipts of a trigger whose every part was written by a sink of its own."""
    return [write_part(place, work) for work in works(trigger, shards=task_sink(place).shards)]


def write_part(place: Place, work: Work) -> Any:
    with opened(place.sink()) as sink:
        assert isinstance(sink, TaskSink)
        return pickle.loads(pickle.dumps(sink.write_part(work)))


def commit_of(trigger: int, *, claim: int = 1, after: SinkMark | None = None) -> SinkCommit:
    return SinkCommit(
        pipeline=PIPELINE,
        first=trigger,
        last=trigger,
        position=(trigger,),
        claim=claim,
        incarnation="first",
        after=after,
    )


def committed(place: Place, receipts: Sequence[Any], commit: SinkCommit) -> SinkMark | None:
    """Commit as a driver does that has just been started; the mark that it finds then."""
    with opened(place.sink()) as sink:
        assert isinstance(sink, TaskSink)
        sink.commit([one for one in receipts if one is not None], commit)
        return sink.mark()


def mark_of(place: Place) -> SinkMark | None:
    with opened(place.sink()) as sink:
        assert isinstance(sink, TaskSink)
        return sink.mark()


def rows_expected(sink: Sink, *, triggers: int) -> int:
    vectors = PARTITIONS * ROWS
    return vectors * bool(sink.feed & Feed.STATES) + vectors * triggers * bool(
        sink.feed & Feed.DELTAS
    )


def test_parts_of_several_writers_are_all_there_after_one_commit(in_tasks: Place) -> None:
    for trigger in range(2):
        committed(in_tasks, written(in_tasks, trigger), commit_of(trigger))

    found = in_tasks.effect()
    assert len(found) == len(set(map(str, found))) == rows_expected(in_tasks.sink(), triggers=2)
    vectors = [row for row in found if isinstance(row, tuple) and len(row) == 5]
    assert {row[2] for row in vectors} <= {2}


def test_a_commit_again_changes_nothing(in_tasks: Place) -> None:
    committed(in_tasks, written(in_tasks, 0), commit_of(0))
    receipts = written(in_tasks, 1)
    commit = commit_of(1, after=mark_of(in_tasks))
    mark = committed(in_tasks, receipts, commit)
    once = in_tasks.effect()

    assert committed(in_tasks, receipts, commit) == mark
    assert in_tasks.effect() == once


def test_a_part_whose_receipt_was_lost_is_written_again(in_tasks: Place) -> None:
    first, *others = works(0, shards=task_sink(in_tasks).shards)
    write_part(in_tasks, first)  # its task died before it could answer

    receipts = [write_part(in_tasks, work) for work in (first, *others)]
    committed(in_tasks, receipts, commit_of(0))

    found = in_tasks.effect()
    assert len(found) == len(set(map(str, found))) == rows_expected(in_tasks.sink(), triggers=1)


def test_a_trigger_that_was_committed_is_not_written_twice(in_tasks: Place) -> None:
    """The driver died before its cursor moved: the next one has all of it written again."""
    for _ in range(2):
        mark = committed(in_tasks, written(in_tasks, 0), commit_of(0))
        assert len(in_tasks.effect()) == rows_expected(in_tasks.sink(), triggers=1)
        assert mark == mark_of(in_tasks)


def test_a_mark_says_what_was_committed_until_the_sink_is_emptied(marked: Place) -> None:
    assert mark_of(marked) is None
    receipts = written(marked, 0)
    assert mark_of(marked) is None
    for trigger in range(2):
        mark = committed(marked, receipts, commit_of(trigger))
        assert mark is not None
        assert mark.position == (trigger,)
        assert mark == mark_of(marked)
        receipts = written(marked, trigger + 1)
    with opened(marked.sink()) as sink:
        sink.reset()
    assert mark_of(marked) is None
    assert marked.effect() == []


def test_a_sink_without_state_keeps_no_mark(without: Place) -> None:
    assert committed(without, written(without, 0), commit_of(0)) is None


def test_a_commit_without_receipts_only_leaves_a_mark(in_tasks: Place) -> None:
    mark = committed(in_tasks, [], commit_of(-1))
    assert mark in (None, commit_of(-1).mark)
    assert in_tasks.effect() == []


@pytest.mark.parametrize("position", [0, 9])
def test_the_mark_of_a_driver_that_was_overtaken_does_not_count(
    marked: Place, position: int
) -> None:
    committed(marked, written(marked, 0), commit_of(0))
    zombie = task_sink(marked)
    with opened(zombie):
        found = committed(marked, written(marked, 1), commit_of(1, claim=2))
        zombie.commit([], commit_of(position))

        assert zombie.mark() == found == mark_of(marked)
    assert found is not None
    assert found.kept_by(mark_of(marked))


def test_a_sink_in_pieces_holds_what_it_holds_as_a_whole(marked: Place) -> None:
    committed(marked, written(marked, 0), commit_of(0))
    with opened(marked.sink()) as sink:
        if isinstance(sink, PiecedSink):
            pieces = pickle.loads(pickle.dumps(sink.pieces()))
            rows = [b for piece in pieces for b in sink.scan_piece(piece)]
            assert sum(map(len, rows)) == PARTITIONS * ROWS
