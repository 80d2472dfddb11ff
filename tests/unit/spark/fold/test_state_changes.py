"""The change log: commits, two drivers of one pipeline, pruning, and what damage says."""

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import Corruption, NotFound, WrongEpoch
from penstock.spark.fold.state import (
    ChangeLog,
    ChangePart,
    ChangeWriter,
    FoldHead,
    Manifest,
    TopicHeads,
    read_section,
)
from penstock.spark.store import FolderStore


def part(log: ChangeLog, *, first: int = 1, rows: int = 3, partition: int = 0) -> ChangePart:
    writer = ChangeWriter(log.store, claim=log.claim, topic="vectors", partition=partition)
    writer.add("states", pa.table({"n": list(range(rows)), "log_time_ms": [7] * rows}), lane=2)
    return writer.finish(first=first, last=first + rows - 1, counts={"read": rows})


def commit(log: ChangeLog, *parts: ChangePart, trigger: int | None = None) -> Manifest:
    number = trigger if trigger is not None else 0 if log.last is None else log.last + 1
    manifest = Manifest(trigger=number, claim=log.claim, parts=parts)
    return log.commit(manifest, check=lambda: None)


def opened(log: ChangeLog, *, claim: int = 1) -> ChangeLog:
    """The same log, by another driver or reader."""
    return ChangeLog(log.store, claim=claim)


def files(log: ChangeLog, folder: str = "changes/data") -> set[str]:
    return set(log.store.names(folder))


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    return ChangeLog(FolderStore(tmp_path), claim=1)


def test_a_committed_trigger_is_read_back_after_a_restart(log: ChangeLog) -> None:
    assert log.last is None and log.newest() is None
    written = part(log)
    made = commit(log, written)
    again = opened(log)
    assert (again.first, again.last) == (0, 0)
    assert again.after(-1, limit=10) == [made] == [again.newest()]
    assert made.parts == (written,)
    assert read_section(again.store, written, written.sections[0])["n"].to_pylist() == [0, 1, 2]


def test_a_gap_between_triggers_is_refused(log: ChangeLog) -> None:
    with pytest.raises(Corruption, match="trigger 3 follows trigger None"):
        commit(log, trigger=3)
    commit(log)
    with pytest.raises(Corruption, match="trigger 2 follows trigger 0"):
        commit(log, trigger=2)


@pytest.mark.parametrize(
    "content", [b"{", b'{"trigger":5,"claim":1}', b'{"version":9,"trigger":0,"claim":1}']
)
def test_a_file_that_is_no_such_manifest_is_corruption(log: ChangeLog, content: bytes) -> None:
    log.store.write("changes/000000000000.json", [content])
    with pytest.raises(Corruption, match=r"000000000000\.json"):
        opened(log).newest()


def test_after_gives_the_oldest_first_and_no_more_than_asked(log: ChangeLog) -> None:
    for _ in range(5):
        commit(log)
    assert [m.trigger for m in log.after(1, limit=2)] == [2, 3]
    assert [m.trigger for m in log.after(3, limit=9)] == [4]
    assert log.after(4, limit=9) == []


# --- two drivers ---


def test_of_two_drivers_the_one_with_the_lower_claim_ends(log: ChangeLog) -> None:
    later = opened(log, claim=2)
    made = commit(later, part(later, rows=5))
    with pytest.raises(WrongEpoch, match="another driver of this pipeline has taken over"):
        commit(log, part(log))
    assert opened(log).newest() == made
    assert log.last is None  # nobody here has seen it


def test_a_trigger_of_an_overtaken_driver_is_gone_on_from(log: ChangeLog) -> None:
    later = opened(log, claim=2)
    made = commit(log, part(log))
    assert commit(later, part(later, rows=5)) == made
    assert later.last == 0
    assert commit(later).trigger == 1


def test_a_commit_that_was_not_answered_is_found_when_it_is_tried_again(log: ChangeLog) -> None:
    made = commit(log, part(log))
    restarted = ChangeLog(log.store, claim=1)
    restarted.first = restarted.last = None  # it never heard of it
    assert commit(restarted, part(restarted, rows=9)) == made


def test_nobody_sees_a_trigger_whose_driver_finds_itself_overtaken(log: ChangeLog) -> None:
    def check() -> None:
        raise WrongEpoch("another driver")

    with pytest.raises(WrongEpoch):
        log.commit(Manifest(trigger=0, claim=1), check=check)
    assert log.last is None


def test_a_deleted_number_that_is_made_again_is_not_read(log: ChangeLog) -> None:
    for _ in range(4):
        commit(log)
    log.prune(2)
    log.store.write("changes/000000000001.json", [b"of a driver that slept"])
    again = opened(log, claim=2)
    assert (again.first, again.last) == (3, 3)


# --- what goes ---


def test_pruning_deletes_manifests_and_files_but_the_newest(log: ChangeLog) -> None:
    parts = [part(log, first=10 * trigger) for trigger in range(4)]
    for made in parts:
        commit(log, made)
    assert log.prune(1) == 2
    assert (log.first, log.last) == (2, 3)
    assert files(log) == {parts[2].file, parts[3].file}
    assert log.prune(99) == 1
    assert log.prune(99) == 0
    assert opened(log).last == 3
    with pytest.raises(NotFound):
        log.after(0, limit=1)


def test_sweeping_takes_what_earlier_drivers_left_once_none_of_them_can_commit(
    log: ChangeLog,
) -> None:
    kept, stray = part(log), part(log, first=50)
    commit(log, kept)
    later = opened(log, claim=2)
    own = part(later, first=60)
    assert later.sweep() == 0  # the other driver may name it yet
    assert stray.file in files(log)
    commit(later)
    assert later.sweep() == 1
    assert files(log) == {kept.file, own.file}


def test_whoever_waits_is_told_of_a_commit(log: ChangeLog) -> None:
    log.wait(-1, timeout_s=0.0)
    waiter = threading.Thread(target=lambda: log.wait(-1, timeout_s=300))
    waiter.start()
    commit(log)
    waiter.join(30)
    assert not waiter.is_alive()
    log.wait(-1, timeout_s=300)  # it is there already


def written(log: ChangeLog, *values: int) -> ChangePart:
    writer = ChangeWriter(log.store, claim=1, topic="vectors", partition=3)
    writer.add("states", pa.table({"n": values, "log_time_ms": [v * 10 for v in values]}), lane=1)
    writer.add("states", pa.table({"n": pa.array([], pa.int64())}), lane=2)
    writer.add("deltas", pa.table({"id": ["a", "b"], "log_time_ms": [1, 2]}))
    return writer.finish(first=5, last=9, counts={"read": 2})


def path_of(log: ChangeLog, part: ChangePart) -> Path:
    return Path(log.store.url) / "changes/data" / str(part.file)


def test_each_section_is_read_alone(log: ChangeLog) -> None:
    part = written(log, 1, 2, 3)
    states, deltas = part.sections
    assert (states.kind, states.lane, states.rows) == ("states", 1, 3)
    assert (states.log_time_ms_min, states.log_time_ms_max) == (10, 30)
    assert read_section(log.store, part, states)["n"].to_pylist() == [1, 2, 3]
    assert read_section(log.store, part, deltas)["id"].to_pylist() == ["a", "b"]
    assert part.bytes == path_of(log, part).stat().st_size


def test_the_name_follows_from_range_and_content(log: ChangeLog) -> None:
    first, same, other = (written(log, *v) for v in ((1, 2), (1, 2), (1, 3)))
    assert first == same
    assert first.file != other.file
    assert str(first.file).startswith("00000001-vectors-3-5-9-")
    assert files(log) == {first.file, other.file}


def test_without_rows_there_is_no_file(log: ChangeLog) -> None:
    writer = ChangeWriter(log.store, claim=1, topic="t", partition=0)
    part = writer.finish(first=1, last=4, counts={})
    assert part.file is None
    assert part.sections == ()
    assert files(log) == set()


def test_rows_outlive_the_file(log: ChangeLog) -> None:
    part = written(log, *range(10_000))
    table = read_section(log.store, part, part.sections[0])
    path_of(log, part).unlink()
    assert table["n"].to_pylist() == list(range(10_000))


def test_a_missing_file_is_corruption(log: ChangeLog) -> None:
    part = written(log, 1)
    path_of(log, part).unlink()
    with pytest.raises(Corruption, match="not there"):
        read_section(log.store, part, part.sections[0])


def test_a_short_file_is_corruption(log: ChangeLog) -> None:
    part = written(log, *range(100))
    path = path_of(log, part)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(Corruption, match="not what was written"):
        read_section(log.store, part, part.sections[0])


def test_a_file_for_one_sink_is_nobody_elses(tmp_path: Path) -> None:
    """Three files of the same rows, two of them for sinks that are filled."""
    store = FolderStore(tmp_path)
    names = set()
    for sink in (None, "index", "lake"):
        writer = ChangeWriter(store, claim=1, topic="vectors", partition=0, sink=sink)
        writer.add("deltas", pa.table({"log_time_ms": [1, 2]}))
        names.add(writer.finish(first=1, last=2, counts={}).file)
    assert len(names) == 3


def test_pinned_snapshots_are_named_until_the_reader_is_done(tmp_path: Path) -> None:
    log = ChangeLog(FolderStore(tmp_path), claim=1)
    assert log.pin("index") is None
    head = FoldHead(start=1, sequence=9, snapshots=("a", "b"), snapshot_sequence=9)
    heads = {"vectors": TopicHeads(id=1, dimensions=2, partitions={0: head})}
    log.commit(Manifest(trigger=0, claim=1, heads=heads), check=lambda: None)
    log.pin("index")
    log.commit(Manifest(trigger=1, claim=1), check=lambda: None)
    assert log.pinned() == {"a", "b"}
    log.unpin("index")
    assert log.pinned() == set()
