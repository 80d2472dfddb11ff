"""Where a task that folds begins, and what it leaves behind. Real nodes and no Spark."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.s3 import make_bucket, s3_server
from tests.spark.conftest import RunningNode
from tests.spark.folding import delta, delta_topic, put_payloads

from penstock.errors import Corruption, FailedPrecondition
from penstock.model.delta import Op
from penstock.spark.fold import local_state
from penstock.spark.fold.local_state import StateCache
from penstock.spark.frames import folded
from penstock.spark.frames.folded import FoldStore, FoldTask
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import FoldRange
from penstock.spark.store import StoreAddress

QUERY = "query-released"
Ranges = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the executor that all tasks of a test run on."""
    folder = tmp_path / "executor"
    folder.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """The ranges of the log that are read from now on."""
    found: Ranges = []
    real = NodeAccess.read_range

    def read_range(
        self: NodeAccess, topic: str, partition: int, first: int, last: int, **more: Any
    ) -> Iterator[Any]:
        found.append((first, last))
        return real(self, topic, partition, first, last, **more)

    monkeypatch.setattr(NodeAccess, "read_range", read_range)
    return found


class Log:
    """A topic of one partition, and the tasks that fold it."""

    def __init__(self, node: RunningNode, state: Path | str | None, **options: str) -> None:
        self.node, self.topic = node, options.get("topic", "vectors")
        delta_topic(node, self.topic, dimensions=4)
        given = {"url": node.url, "topic": self.topic, "mode": "released"} | options
        self.given = given | ({} if state is None else {"state": str(state)})
        self.count, self.read = 0, 0
        self.cache: StateCache = {}

    def leave(self, executor: Path) -> None:
        """What comes next goes to another executor, which has nothing."""
        self.cache.clear()
        shutil.rmtree(executor / "penstock")

    def put(self, count: int) -> None:
        numbers = range(self.count + 1, self.count + count + 1)
        deltas = [delta(n, "v", Op.SPARSE if n > 1 else Op.CREATE) for n in numbers]
        put_payloads(self.node, deltas, at=self.count, topic=self.topic)
        self.count += count

    def range(self, first: int | None = None) -> FoldRange:
        """What was not read yet."""
        (status,) = self.node.access().log_status(self.topic)
        first = self.read + 1 if first is None else first
        return FoldRange(self.topic, 0, first, status.readable, status.topic_id)

    def fold(self, part: FoldRange, owner: str | None = QUERY, **options: str) -> list[int]:
        """The ordinals of what a range released."""
        task = FoldTask(ReadOptions.of(self.given | options), part, owner=owner, cache=self.cache)
        self.read = part.last
        return [int(n) for rows in task.released() for n in rows.ordinals]

    def trigger(self, count: int, **options: str) -> list[int]:
        self.put(count)
        return self.fold(self.range(), **options)


def snapshots(state: Path, owner: str = QUERY) -> list[int]:
    found = state.rglob(f"*-{owner}.fold")
    return sorted(int(path.name.split("-")[0]) for path in found)


def test_a_worker_goes_on_from_what_it_folded_last(node: RunningNode, reads: Ranges) -> None:
    log = Log(node, None)
    assert log.trigger(3) == [1, 2, 3]
    reads.clear()

    assert log.trigger(2) == [4, 5]

    assert len(reads) == 1


def test_without_a_state_an_executor_folds_the_log(
    node: RunningNode, executor: Path, reads: Ranges
) -> None:
    log = Log(node, None)
    log.trigger(3)
    before = log.read
    log.leave(executor)
    reads.clear()

    assert log.trigger(2) == [4, 5]

    assert reads == [(1, before), (before + 1, log.read)]


def test_a_snapshot_is_begun_from(
    node: RunningNode, executor: Path, tmp_path: Path, reads: Ranges
) -> None:
    log = Log(node, tmp_path, snapshotDeltas="400")
    log.trigger(300)  # the first range always ends with one
    saved = log.read
    log.trigger(300)
    before = log.read
    assert snapshots(tmp_path) == [saved]
    log.leave(executor)
    reads.clear()

    assert log.trigger(200) == list(range(601, 801))

    assert reads == [(saved + 1, before), (before + 1, log.read)]
    assert snapshots(tmp_path) == [saved, log.read]


def test_a_task_run_twice_gives_the_same_rows(
    node: RunningNode, executor: Path, tmp_path: Path
) -> None:
    log = Log(node, tmp_path, snapshotDeltas="1")
    log.trigger(300)
    log.put(300)
    again = log.range()

    assert log.fold(again) == log.fold(again) == list(range(301, 601))
    assert snapshots(tmp_path) == [again.first - 1, again.last]
    log.leave(executor)
    assert log.fold(again) == list(range(301, 601))


def test_the_two_newest_snapshots_of_a_query_stay(node: RunningNode, tmp_path: Path) -> None:
    log = Log(node, tmp_path, snapshotDeltas="1")
    log.trigger(300)
    kept = log.read
    log.fold(log.range(first=1), owner="other-released")
    ends = [log.trigger(300) and log.read for _ in range(3)]

    assert snapshots(tmp_path) == ends[1:]
    assert snapshots(tmp_path, "other-released") == [kept]


def test_a_query_that_begins_with_the_snapshot_of_another_writes_one(
    node: RunningNode, tmp_path: Path, reads: Ranges
) -> None:
    log = Log(node, tmp_path)
    log.trigger(3)
    saved = log.read
    reads.clear()

    log.put(1)
    log.fold(log.range(), owner="other-released")

    assert reads == [(saved + 1, log.read)]
    assert snapshots(tmp_path, "other-released") == [log.read]


def test_a_batch_read_begins_with_a_snapshot_and_leaves_none(
    node: RunningNode, tmp_path: Path, reads: Ranges
) -> None:
    log = Log(node, tmp_path, snapshotDeltas="1")
    log.trigger(3)
    saved, kept = log.read, dict(log.cache)
    reads.clear()
    log.put(2)

    assert log.fold(log.range(), owner=None) == [4, 5]

    assert reads == [(saved + 1, log.read)]
    assert snapshots(tmp_path) == [saved]
    assert log.cache == kept


def test_a_parent_that_had_to_be_looked_for_is_followed_by_a_snapshot(
    node: RunningNode, tmp_path: Path
) -> None:
    """Its id is forgotten at once, and there is room for one that waits."""
    log = Log(node, tmp_path, **{"propagation.dedup_ms": "0", "propagation.pending_max": "1"})
    log.trigger(1)
    time.sleep(0.005)  # for the log's next millisecond
    parent = b"v-1".rjust(16, b".")
    children = [delta(1, vector, Op.CREATE, parent=parent) for vector in ("w", "x")]
    put_payloads(node, children, at=10)

    assert log.fold(log.range()) == [2]  # the other one still waits

    assert log.read in snapshots(tmp_path)


def test_the_state_of_another_log_is_refused(
    node: RunningNode, executor: Path, tmp_path: Path
) -> None:
    """As if the node had been set up anew, and had given out the same ids again."""
    log, other = Log(node, tmp_path), Log(node, None, topic="other")
    log.trigger(3)
    other.trigger(3)
    folds = tmp_path / "folds"
    shutil.move(folds / str(log.range().topic_id), folds / str(other.range().topic_id))
    other.leave(executor)
    assert other.read == log.read

    with pytest.raises(FailedPrecondition, match="that was another log"):
        other.trigger(1, state=str(tmp_path))


def test_another_way_to_fold_needs_another_state(node: RunningNode, tmp_path: Path) -> None:
    log = Log(node, tmp_path)
    log.trigger(3)

    with pytest.raises(FailedPrecondition, match="which cannot be changed") as refused:
        log.trigger(1, **{"propagation.pending_ms": "17"})

    assert refused.value.details["field"] == "propagation"


def test_a_state_in_an_object_store(node: RunningNode, executor: Path, reads: Ranges) -> None:
    with s3_server() as options:
        storage = {f"storage.{name}": value for name, value in options.items()}
        place = f"s3://{make_bucket(options)}/folds"
        log = Log(node, place, snapshotDeltas="1", **storage)
        for _ in range(3):
            log.trigger(300)
        saved = log.read
        log.leave(executor)
        reads.clear()

        assert log.trigger(2) == [901, 902]

        assert reads == [(saved + 1, log.read)]
        names = FoldStore(StoreAddress(url=place, options=options).open(), log.range()).names()
        assert len(names) == 2 and max(names) == saved


@pytest.mark.parametrize("keep", [5, 30, 200])
def test_a_damaged_snapshot_is_named(
    node: RunningNode, executor: Path, tmp_path: Path, keep: int
) -> None:
    log = Log(node, tmp_path)
    log.trigger(3)
    (path,) = tmp_path.rglob("*.fold")
    path.write_bytes(path.read_bytes()[:keep])
    log.leave(executor)

    with pytest.raises(Corruption):
        log.trigger(1)


def test_a_snapshot_of_another_version_is_refused(
    node: RunningNode, executor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(node, tmp_path)
    log.trigger(3)
    log.leave(executor)
    monkeypatch.setattr(folded, "VERSION", 2)

    with pytest.raises(FailedPrecondition, match="has version 1, this Penstock reads version 2"):
        log.trigger(1)


# --- one state for all workers of an executor ---


def told(log: Log, part: FoldRange, *, owner: str = QUERY) -> tuple[Ranges, list[list[Any]]]:
    """What a worker process of its own reads and gives out."""
    numbers = str(part.first), str(part.last), str(part.topic_id)
    given = msgspec.json.encode(log.given).decode()
    command = [sys.executable, "-m", "tests.spark.fold_task_child", given, *numbers, owner]
    done = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE)
    found = msgspec.json.decode(done.stdout)
    log.read = part.last
    return [(first, last) for first, last in found["ranges"]], found["rows"]


def test_worker_processes_share_one_state(node: RunningNode) -> None:
    log = Log(node, None)
    log.put(3)
    assert told(log, log.range()) == ([(1, log.read)], [[1], [2], [3]])
    for count in (2, 1):
        log.put(count)
        part = log.range()

        ranges, rows = told(log, part)

        assert ranges == [(part.first, part.last)]
        assert rows == [[n] for n in range(log.count - count + 1, log.count + 1)]


def test_a_feed_tells_what_was_there_before_whoever_folded_it(node: RunningNode) -> None:
    log = Log(node, None, mode="vectors")
    feed = []
    for deltas in (
        [delta(1, "v", Op.CREATE), delta(1, "w", Op.CREATE), delta(1, "x", Op.CREATE)],
        [delta(2, "v"), delta(2, "w", Op.DELETE), delta(1, "y"), delta(2, "x", Op.DELETE)],
        [delta(3, "v", Op.DELETE), delta(3, "w", Op.CREATE), delta(2, "y"), delta(3, "x")],
    ):
        put_payloads(node, deltas, at=log.read)
        feed.append(told(log, log.range(), owner="query-vectors"))

    assert [rows for _, rows in feed] == [
        [["v", "insert"], ["w", "insert"], ["x", "insert"]],
        [["v", "update_postimage"], ["w", "delete"], ["y", "insert"], ["x", "delete"]],
        [["v", "delete"], ["w", "insert"], ["y", "update_postimage"]],
    ]
    assert all(len(ranges) == 1 for ranges, _ in feed)


def test_when_a_snapshot_is_due_is_known_to_all(node: RunningNode, tmp_path: Path) -> None:
    log = Log(node, tmp_path, snapshotDeltas="400")
    ends = []
    for _ in range(4):
        log.put(150)
        told(log, log.range())
        ends.append(log.read)

    assert snapshots(tmp_path) == [ends[0], ends[3]]


@pytest.mark.parametrize("other", ["query", "way to fold", "topic"])
def test_the_state_of_anything_else_is_not_taken(
    node: RunningNode, reads: Ranges, other: str
) -> None:
    log = Log(node, None)
    log.trigger(3)
    owner, options = QUERY, dict[str, str]()
    if other == "query":
        owner = "other-released"
    elif other == "way to fold":
        options = {"propagation.pending_ms": "17"}
    else:
        node.client.topic(log.topic).delete(force=True)
        NodeAccess.close_shared()
        delta_topic(node, log.topic, dimensions=4)
        log.count = 0
        log.put(3)
    log.put(1)
    part = log.range()
    reads.clear()

    assert log.fold(part, owner=owner, **options) == [4]

    assert reads == [(1, part.first - 1), (part.first, part.last)]


@pytest.fixture
def by_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are read and folded batch by batch, and states have no room to spare."""
    real = NodeAccess.read_range

    def read_range(self: NodeAccess, *place: Any, **more: Any) -> Iterator[Any]:
        for batches in real(self, *place, **more):
            yield from ([batch] for batch in batches)

    monkeypatch.setattr(NodeAccess, "read_range", read_range)
    monkeypatch.setattr(folded, "FEED_BYTES", 1)
    monkeypatch.setattr(local_state, "ROOM_BYTES", 8)
    monkeypatch.setattr("penstock.propagation.fold.table.ROWS_MIN", 1)


@pytest.mark.usefixtures("by_batches")
def test_rows_come_once_from_a_disk_that_fills_on_the_way(
    node: RunningNode, executor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(node, None)
    for _ in range(4):
        log.put(5)
    task = FoldTask(ReadOptions.of(log.given), log.range(), owner=QUERY, cache=log.cache)
    released = task.released()
    found = next(released).ordinals.tolist()
    assert found == [1, 2, 3, 4, 5]
    fill_disk(monkeypatch)

    found += [int(n) for rows in released for n in rows.ordinals]

    assert found == list(range(1, 21))
    assert [path.name for path in executor.rglob("*") if path.is_file()] == ["lock"]
    (kept,) = log.cache.values()
    assert kept.generation is None and kept.fold.ordinal == 20


@pytest.mark.usefixtures("by_batches")
def test_a_feed_is_whole_from_a_disk_that_is_full(
    node: RunningNode, executor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(node, None, mode="vectors")
    log.put(1)
    part = log.range()
    FoldTask(ReadOptions.of(log.given), part, owner=QUERY, cache=log.cache).changes()
    log.read = part.last
    log.put(20)
    fill_disk(monkeypatch)
    task = FoldTask(ReadOptions.of(log.given), log.range(), owner=QUERY, cache=log.cache)

    states, kinds, news = task.changes()

    assert (states.revision.tolist(), kinds.tolist(), news.tolist()) == (
        [21], ["update_postimage"], [True],
    )  # fmt: skip
    assert [path.name for path in executor.rglob("*") if path.is_file()] == ["lock"]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", allocate)
