"""The change log: commits, pruning, and what a damaged folder or file says."""

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import Corruption, NotFound, StorageFailed
from penstock.spark.fold.changes import ChangeLog, ChangePart, ChangeWriter


def part(log: ChangeLog, *, first: int = 1, rows: int = 3, partition: int = 0) -> ChangePart:
    writer = ChangeWriter(log.data, topic="vectors", partition=partition)
    writer.add("states", pa.table({"n": list(range(rows)), "log_time_ms": [7] * rows}), lane=2)
    return writer.finish(first=first, last=first + rows - 1, counts={"read": rows})


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    return ChangeLog(tmp_path / "changes")


def test_a_committed_trigger_is_read_back_after_a_restart(log: ChangeLog) -> None:
    assert log.last is None
    written = part(log)
    assert log.commit(0, [written])
    again = ChangeLog(log.folder)
    assert (again.first, again.last) == (0, 0)
    (manifest,) = again.after(-1, limit=10)
    assert manifest.parts == (written,)
    assert again.table(written, written.sections[0])["n"].to_pylist() == [0, 1, 2]


def test_parts_stand_in_the_order_of_topic_and_partition(log: ChangeLog) -> None:
    parts = [part(log, partition=2), part(log, partition=0), part(log, partition=1)]
    log.commit(0, parts)
    assert [p.partition for p in log.manifest(0).parts] == [0, 1, 2]


def test_committing_a_trigger_again_changes_nothing(log: ChangeLog) -> None:
    log.commit(0, [part(log)])
    before = (log.folder / "000000000000.json").read_bytes()
    assert not log.commit(0, [part(log)])
    assert (log.folder / "000000000000.json").read_bytes() == before


def test_another_outcome_of_a_committed_trigger_is_refused(log: ChangeLog) -> None:
    log.commit(0, [part(log)])
    with pytest.raises(Corruption, match="came out otherwise"):
        log.commit(0, [part(log, rows=4)])
    with pytest.raises(Corruption, match="came out otherwise"):
        log.commit(0, [])
    assert log.manifest(0).parts[0].counts["read"] == 3


def test_a_gap_between_triggers_is_refused(log: ChangeLog) -> None:
    with pytest.raises(Corruption, match="trigger 3 follows trigger None"):
        log.commit(3, [])
    log.commit(0, [])
    with pytest.raises(Corruption, match="trigger 2 follows trigger 0"):
        log.commit(2, [])


def test_a_missing_manifest_is_noticed_at_the_start(log: ChangeLog) -> None:
    for trigger in range(3):
        log.commit(trigger, [])
    (log.folder / "000000000001.json").unlink()
    with pytest.raises(Corruption, match="trigger 1 is missing"):
        ChangeLog(log.folder)


@pytest.mark.parametrize(
    "content", [b"{", b'{"trigger":5,"parts":[]}', b'{"version":9,"trigger":0}']
)
def test_a_file_that_is_no_such_manifest_is_corruption(log: ChangeLog, content: bytes) -> None:
    (log.folder / "000000000000.json").write_bytes(content)
    with pytest.raises(Corruption, match=r"000000000000\.json"):
        ChangeLog(log.folder).sweep()


def test_after_gives_the_oldest_first_and_no_more_than_asked(log: ChangeLog) -> None:
    for trigger in range(5):
        log.commit(trigger, [])
    assert [m.trigger for m in log.after(1, limit=2)] == [2, 3]
    assert [m.trigger for m in log.after(3, limit=9)] == [4]
    assert log.after(4, limit=9) == []


def test_pruning_deletes_manifests_and_files_but_the_newest(log: ChangeLog) -> None:
    parts = [part(log, first=10 * trigger) for trigger in range(4)]
    for trigger, made in enumerate(parts):
        log.commit(trigger, [made])
    assert log.prune(1) == 2
    assert (log.first, log.last) == (2, 3)
    assert {p.name for p in log.data.iterdir()} == {parts[2].file, parts[3].file}
    assert log.prune(99) == 1
    assert log.prune(99) == 0
    assert ChangeLog(log.folder).last == 3
    with pytest.raises(NotFound):
        log.after(0, limit=1)


def test_a_pruned_trigger_that_is_run_again_changes_nothing(log: ChangeLog) -> None:
    for trigger in range(3):
        log.commit(trigger, [part(log, first=10 * trigger)])
    log.prune(1)
    assert not log.commit(0, [part(log)])
    assert log.first == 2


def test_sweeping_takes_only_what_no_manifest_names(log: ChangeLog) -> None:
    kept, stray = part(log), part(log, first=50)
    log.commit(0, [kept])
    (log.data / ".half-written").write_bytes(b"x")
    assert log.sweep() == 2
    assert [p.name for p in log.data.iterdir()] == [kept.file]
    assert stray.file != kept.file


def test_whoever_waits_is_told_of_a_commit(log: ChangeLog) -> None:
    log.wait(-1, timeout_s=0.0)
    waiter = threading.Thread(target=lambda: log.wait(-1, timeout_s=300))
    waiter.start()
    log.commit(0, [])
    waiter.join(30)
    assert not waiter.is_alive()
    log.wait(-1, timeout_s=300)  # it is there already


def written(folder: Path, *values: int) -> ChangePart:
    writer = ChangeWriter(folder, topic="vectors", partition=3)
    writer.add("states", pa.table({"n": values, "log_time_ms": [v * 10 for v in values]}), lane=1)
    writer.add("states", pa.table({"n": pa.array([], pa.int64())}), lane=2)
    writer.add("deltas", pa.table({"id": ["a", "b"], "log_time_ms": [1, 2]}))
    return writer.finish(first=5, last=9, counts={"read": 2})


def test_each_section_is_read_alone(log: ChangeLog) -> None:
    part = written(log.data, 1, 2, 3)
    states, deltas = part.sections
    assert (states.kind, states.lane, states.rows) == ("states", 1, 3)
    assert (states.log_time_ms_min, states.log_time_ms_max) == (10, 30)
    assert log.table(part, states)["n"].to_pylist() == [1, 2, 3]
    assert log.table(part, deltas)["id"].to_pylist() == ["a", "b"]
    assert part.bytes == (log.data / str(part.file)).stat().st_size


def test_the_name_follows_from_range_and_content(tmp_path: Path) -> None:
    first, same, other = (written(tmp_path, *v) for v in ((1, 2), (1, 2), (1, 3)))
    assert first == same
    assert first.file != other.file
    assert str(first.file).startswith("vectors-3-5-9-")
    assert {p.name for p in tmp_path.iterdir()} == {first.file, other.file}


def test_without_rows_there_is_no_file(tmp_path: Path) -> None:
    part = ChangeWriter(tmp_path, topic="t", partition=0).finish(first=1, last=4, counts={})
    assert part.file is None
    assert part.sections == ()
    assert list(tmp_path.iterdir()) == []


def test_rows_outlive_the_file(log: ChangeLog) -> None:
    part = written(log.data, *range(10_000))
    table = log.table(part, part.sections[0])
    (log.data / str(part.file)).unlink()
    assert table["n"].to_pylist() == list(range(10_000))


def test_a_missing_file_is_corruption(log: ChangeLog) -> None:
    part = written(log.data, 1)
    (log.data / str(part.file)).unlink()
    with pytest.raises(Corruption, match="not there"):
        log.table(part, part.sections[0])


def test_a_short_file_is_corruption(log: ChangeLog) -> None:
    part = written(log.data, *range(100))
    path = log.data / str(part.file)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(Corruption, match="not what was written"):
        log.table(part, part.sections[0])


def test_a_folder_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(StorageFailed, match="gone"):
        written(gone, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_same_fold_in_other_bytes_is_the_same_fold(log: ChangeLog) -> None:
    log.commit(0, [written(log.data, 1)])
    assert not log.commit(0, [written(log.data, 2)])
    counts = ChangeWriter(log.data, topic="vectors", partition=3).finish(first=5, last=9, counts={})
    with pytest.raises(Corruption, match="came out otherwise"):
        log.commit(0, [counts])
