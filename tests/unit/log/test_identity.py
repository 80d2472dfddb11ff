from __future__ import annotations

import pytest

from penstock.errors import Corruption
from penstock.log.folder import DataFolder
from penstock.log.identity import ReplicaFile, asides, remove_asides, set_aside
from penstock.log.partition import PartitionLog


def test_a_missing_file_is_made_and_kept(folder):
    made = ReplicaFile(folder, uuid="given")
    assert (made.uuid, made.promised) == ("given", 0)
    assert ReplicaFile(folder, uuid="another").uuid == "given"


def test_without_a_given_one_each_replica_has_its_own_uuid(tmp_path):
    uuids = {ReplicaFile(tmp_path / name).uuid for name in "abc"}
    assert len(uuids) == 3 and all(uuids)


def test_a_promise_is_kept_and_never_falls(folder):
    ReplicaFile(folder).promise(7)
    again = ReplicaFile(folder)
    again.promise(7)
    with pytest.raises(ValueError, match="below"):
        again.promise(6)
    assert ReplicaFile(folder).promised == 7


@pytest.mark.parametrize("at", [0, 512])
def test_damage_to_one_record_forgets_no_promise_and_is_repaired(folder, at):
    ReplicaFile(folder, uuid="u").promise(3)
    path = folder / "replica"
    whole = path.read_bytes()
    for offset in range(at, at + 128):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 8]) + whole[offset + 1 :])
        found = ReplicaFile(folder)
        assert (found.uuid, found.promised) == ("u", 3)
        assert path.read_bytes()[:128] == path.read_bytes()[512:640]


def test_damage_to_both_records_is_refused(folder):
    ReplicaFile(folder).promise(3)
    path = folder / "replica"
    whole = path.read_bytes()
    both = bytearray(whole)
    both[20] ^= 1
    both[512 + 70] ^= 1
    for damaged in (b"", whole[:-1], whole[:512], bytes(1024), bytes(both)):
        path.write_bytes(damaged)
        with pytest.raises(Corruption):
            ReplicaFile(folder)


def test_the_newer_of_two_records_counts(folder):
    replica = ReplicaFile(folder, uuid="u")
    path = folder / "replica"
    before = path.read_bytes()
    replica.promise(9)
    path.write_bytes(path.read_bytes()[:512] + before[512:])  # a crash between the two
    assert ReplicaFile(folder).promised == 9


def test_a_uuid_that_does_not_fit_is_refused(folder):
    with pytest.raises(ValueError, match="uuid"):
        ReplicaFile(folder, uuid="x" * 65)


def test_opening_the_log_does_not_disturb_the_making_of_the_file(folder, open_log):
    ReplicaFile(folder)
    half_written = folder / "replica.tmp"
    half_written.write_bytes(b"by another thread")
    open_log()
    assert half_written.exists()


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
        data.remove(1, 0)
        assert asides(data.partition(1, 0)) == [] and len(asides(data.partition(1, 1))) == 1
