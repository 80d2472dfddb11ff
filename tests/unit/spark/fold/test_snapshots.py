"""Snapshots of folds: verified on reading, pruned down to what Spark may fall back to."""

from pathlib import Path

import pytest

from penstock.errors import Corruption, NotFound
from penstock.spark.fold.snapshots import FoldSnapshots


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_snapshot_is_read_back(tmp_path: Path) -> None:
    snapshots = FoldSnapshots(tmp_path)
    stored = snapshots.write([b"abc", memoryview(b"def")], topic="a-b", partition=3, sequence=17)
    assert stored == ("a-b-3-17.snapshot", 6)
    assert bytes(snapshots.read(stored.name)) == b"abcdef"


def test_an_empty_content_is_a_content(tmp_path: Path) -> None:
    snapshots = FoldSnapshots(tmp_path)
    stored = snapshots.write([], topic="t", partition=0, sequence=1)
    assert bytes(snapshots.read(stored.name)) == b""


@pytest.mark.parametrize("at", [0, 9, 17, 25, 40])
def test_any_changed_byte_is_noticed(tmp_path: Path, at: int) -> None:
    snapshots = FoldSnapshots(tmp_path)
    stored = snapshots.write([bytes(64)], topic="t", partition=0, sequence=1)
    data = bytearray((tmp_path / stored.name).read_bytes())
    data[at] ^= 1
    (tmp_path / stored.name).write_bytes(data)
    with pytest.raises(Corruption):
        snapshots.read(stored.name)


@pytest.mark.parametrize("length", [0, 10, 50])
def test_a_short_file_is_noticed(tmp_path: Path, length: int) -> None:
    snapshots = FoldSnapshots(tmp_path)
    stored = snapshots.write([bytes(64)], topic="t", partition=0, sequence=1)
    path = tmp_path / stored.name
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(Corruption):
        snapshots.read(stored.name)


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
    stored = snapshots.write([b"x"], topic="t", partition=0, sequence=1)
    (tmp_path / ".t-0-2.snapshot.abc").write_bytes(b"half")
    assert snapshots.sweep() == 1
    assert names(tmp_path) == {stored.name}
