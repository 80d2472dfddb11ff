"""A pipeline's folder: identity, lock and slots; snapshots are verified on reading and pruned."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable
from penstock.model.topic import TopicConfig, TopicKind
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold.state_folder import (
    FoldSnapshots,
    PipelineIdentity,
    StateFolder,
    read_identity,
    running_pid,
)

CANDIDATES = [(slot, (slot * 7 + slot // 3) % 4) for slot in range(400)]  # as a hash would


def topic(name: str = "vectors", *, id: int = 1, partitions: int = 8) -> TopicConfig:
    return TopicConfig(name=name, id=id, kind=TopicKind.DELTA, dimensions=16, partitions=partitions)


def identity() -> PipelineIdentity:
    return PipelineIdentity(id="p-1", name="p", tasks=4)


def opened(folder: StateFolder, *, name: str = "p", tasks: int = 1) -> PipelineIdentity:
    return folder.identity(name=name, tasks=tasks, propagation=PropagationOptions())


def test_a_new_folder_gets_an_id_that_it_keeps(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    made = opened(folder, tasks=3)
    folder.save(made)
    folder.close()
    again = StateFolder(tmp_path / "state")
    assert opened(again, tasks=7) == made
    assert made.tasks == 3
    other = StateFolder(tmp_path / "other")
    assert opened(other, tasks=3).id != made.id


def test_a_second_user_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first = StateFolder(tmp_path)
    pid = running_pid(tmp_path)
    assert pid is not None
    with pytest.raises(Unavailable, match=f"in use by the pipeline of process {pid}"):
        StateFolder(tmp_path)
    first.close()
    assert running_pid(tmp_path) is None
    StateFolder(tmp_path).close()


def test_the_folder_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.save(opened(folder))
    with pytest.raises(FailedPrecondition, match="state of the pipeline p, not of q"):
        opened(folder, name="q")


def test_a_folder_that_was_folded_otherwise_is_refused(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.save(opened(folder))
    other = PropagationOptions(pending_ms=1)
    with pytest.raises(FailedPrecondition, match="cannot be changed"):
        folder.identity(name="p", tasks=1, propagation=other)


def test_triggers_without_an_identity_are_refused(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    (folder.changes / "000000000000.json").write_text("{}")
    with pytest.raises(Corruption, match=r"no pipeline\.json"):
        opened(folder)


@pytest.mark.parametrize("content", ["{", '{"id":1}'])
def test_a_damaged_identity_is_corruption(tmp_path: Path, content: str) -> None:
    (tmp_path / "pipeline.json").write_text(content)
    with pytest.raises(Corruption, match="cannot be read"):
        read_identity(tmp_path)


def test_an_identity_of_a_later_version_is_refused(tmp_path: Path) -> None:
    later = msgspec.structs.replace(identity(), version=2)
    (tmp_path / "pipeline.json").write_bytes(msgspec.json.encode(later))
    with pytest.raises(FailedPrecondition, match="version 2"):
        read_identity(tmp_path)


def test_slots_spread_partitions_evenly_over_the_tasks() -> None:
    made = identity().with_topics([topic(partitions=10)], candidates=CANDIDATES)
    slots = made.topics["vectors"].slots
    assert len(set(slots)) == 10
    load = Counter(dict(CANDIDATES)[slot] for slot in slots)
    assert sorted(load.values()) == [2, 2, 3, 3]


def test_a_further_topic_gets_slots_of_its_own_and_moves_none() -> None:
    one = identity().with_topics([topic()], candidates=CANDIDATES)
    two = one.with_topics([topic("more", id=2), topic()], candidates=CANDIDATES)
    assert two.topics["vectors"] == one.topics["vectors"]
    assert not set(two.topics["more"].slots) & set(two.topics["vectors"].slots)
    assert two.with_topics([topic()], candidates=CANDIDATES) == two


@pytest.mark.parametrize("other", [topic(id=2), topic(partitions=4)])
def test_a_topic_that_is_not_the_same_any_more_is_refused(other: TopicConfig) -> None:
    known = identity().with_topics([topic()], candidates=CANDIDATES)
    with pytest.raises(FailedPrecondition, match="not the topic this pipeline has read"):
        known.with_topics([other], candidates=CANDIDATES)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_snapshot_is_read_back(tmp_path: Path) -> None:
    snapshots = FoldSnapshots(tmp_path)
    name, size = snapshots.write(
        [b"abc", memoryview(b"def")], topic="a-b", partition=3, sequence=17
    )
    assert (name, size) == ("a-b-3-17.snapshot", 6)
    assert bytes(snapshots.read(name)) == b"abcdef"


def test_an_empty_content_is_a_content(tmp_path: Path) -> None:
    snapshots = FoldSnapshots(tmp_path)
    name, _ = snapshots.write([], topic="t", partition=0, sequence=1)
    assert bytes(snapshots.read(name)) == b""


@pytest.mark.parametrize("at", [0, 9, 17, 25, 40])
def test_any_changed_byte_is_noticed(tmp_path: Path, at: int) -> None:
    snapshots = FoldSnapshots(tmp_path)
    name, _ = snapshots.write([bytes(64)], topic="t", partition=0, sequence=1)
    data = bytearray((tmp_path / name).read_bytes())
    data[at] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Corruption):
        snapshots.read(name)


@pytest.mark.parametrize("length", [0, 10, 50])
def test_a_short_file_is_noticed(tmp_path: Path, length: int) -> None:
    snapshots = FoldSnapshots(tmp_path)
    name, _ = snapshots.write([bytes(64)], topic="t", partition=0, sequence=1)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(Corruption):
        snapshots.read(name)


def test_a_missing_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"t-0-9\.snapshot"):
        FoldSnapshots(tmp_path).read("t-0-9.snapshot")


def test_the_two_newest_of_each_partition_are_kept(tmp_path: Path) -> None:
    snapshots = FoldSnapshots(tmp_path)
    for partition, sequences in ((0, (9, 10, 100)), (1, (5,)), (10, (1, 2, 3))):
        for sequence in sequences:
            snapshots.write([b"x"], topic="t", partition=partition, sequence=sequence)
    assert snapshots.prune() == 2
    kept = {"t-0-10", "t-0-100", "t-1-5", "t-10-2", "t-10-3"}
    assert names(tmp_path) == {f"{name}.snapshot" for name in kept}
    assert snapshots.prune() == 0


def test_sweeping_takes_only_half_written_files(tmp_path: Path) -> None:
    snapshots = FoldSnapshots(tmp_path)
    name, _ = snapshots.write([b"x"], topic="t", partition=0, sequence=1)
    (tmp_path / ".t-0-2.snapshot.abc").write_bytes(b"half")
    assert snapshots.sweep() == 1
    assert names(tmp_path) == {name}
