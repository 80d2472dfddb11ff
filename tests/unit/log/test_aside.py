"""Damaged copies are kept under another name."""

from penstock.log import DataFolder, PartitionLog
from penstock.log.aside import asides, remove_asides, set_aside
from penstock.log.replica import ReplicaFile


def test_a_folder_is_kept_whole_and_another_replica_begun(tmp_path):
    folder = tmp_path / "0001"
    before = ReplicaFile(folder)
    before.promise(7)
    (folder / "x.seg").write_bytes(b"rot")
    kept = set_aside(folder)
    assert (kept / "x.seg").read_bytes() == b"rot" and ReplicaFile(kept).uuid == before.uuid
    after = ReplicaFile(folder)
    assert after.uuid != before.uuid and after.promised == 7
    assert [path.name for path in folder.iterdir()] == ["replica"]


def test_a_promise_that_cannot_be_read_is_forgotten(tmp_path):
    folder = tmp_path / "0001"
    ReplicaFile(folder).promise(7)
    (folder / "replica").write_bytes(b"rot")
    set_aside(folder)
    assert ReplicaFile(folder).promised == 0


def test_one_that_is_damaged_before_it_counts_has_a_name_too(tmp_path):
    folder = tmp_path / "0001"
    for _ in range(3):
        ReplicaFile(folder)
        set_aside(folder)
    assert [path.name for path in asides(folder)] == ["0001.rot", "0001.rot2", "0001.rot3"]
    remove_asides(folder)
    assert asides(folder) == [] and folder.exists()


def test_what_is_aside_is_no_partition_and_goes_with_its_own(tmp_path):
    with DataFolder.open(tmp_path / "data") as data:
        for index in (0, 1):
            PartitionLog.open(data.partition(1, index), topic=1, partition=index).close()
            set_aside(data.partition(1, index))
        assert [index for _, index, _ in data.partitions()] == [0, 1]
        data.remove_partition(1, 0)
        assert asides(data.partition(1, 0)) == [] and len(asides(data.partition(1, 1))) == 1
