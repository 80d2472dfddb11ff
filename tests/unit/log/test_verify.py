from __future__ import annotations

import random

import pytest

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable
from penstock.log.flush import LogOptions
from penstock.log.folder import DataFolder
from penstock.log.identity import ReplicaFile
from penstock.log.partition import PartitionLog
from penstock.log.verify import verify_folder
from penstock.model.batch import SCHEMAS, Codec, Kind, compress, seal

TINY = LogOptions(segment_bytes=1024, allocate_bytes=1024, reserve_bytes=0)


@pytest.fixture
def data(tmp_path, pen_on):
    """A data folder with two partitions, closed cleanly."""
    with DataFolder.open(tmp_path / "data") as data:
        (data.meta / "store.bin").touch()
        for partition in (0, 1):
            data.inventory.add(5, partition, name="jobs", uuid="")
            pen = pen_on(open_partition(data, partition))
            pen.fill(2)
            pen.put(b"a", b"b", kind=Kind.ACK)
            pen.log.save_snapshot(sequence=2, chain=0, epoch=1, parts=[b"state"])
            pen.log.close()
    return data


def open_partition(data, partition):
    path = data.partition(5, partition)
    return PartitionLog.open(path, topic=5, partition=partition, options=TINY)


def test_a_sound_folder_is_ok(data):
    report = verify_folder(data.path)
    assert report.ok and report.first_bad is None and report.notes == []
    logs = [open_partition(data, partition) for partition in (0, 1)]
    batches = [batch for log in logs for batch in log.reader.scan(1)]
    assert (report.partitions, report.batches) == (2, len(batches))
    assert report.messages == sum(b.entries for b in batches if b.kind is Kind.ENQ)


def test_a_flipped_bit_anywhere_in_a_sealed_segment_is_found(data):
    path = min(data.partition(5, 1).glob("*.seg"))
    whole = path.read_bytes()
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << random.Random(offset).randrange(8)
        path.write_bytes(damaged)
        report = verify_folder(data.path)
        assert not report.ok and report.bad == 1, offset
        assert report.first_bad["file"] == str(path)
        assert (report.first_bad["topic"], report.first_bad["partition"]) == (5, 1)
        assert report.first_bad["offset"] <= offset


def test_a_bit_in_the_padding_behind_a_compressed_body_is_found(data, pen_on):
    pen = pen_on(open_partition(data, 0))
    raw = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"z" * 300]})
    body = compress(Codec.LZ4, raw)
    body += bytes(1 - len(body) % 2)  # an odd length, whatever the compressor does
    batch = seal(
        Kind.ENQ, body, topic=5, partition=0, epoch=1, epoch_previous=1,
        first=pen.log.sequence_last + 1, count=1, time_ms=1, chain_previous=pen.log.chain_last,
        codec=Codec.LZ4, raw_length=len(raw),
    )  # fmt: skip
    pen.log.grow(batch.size)
    pen.log.stage(batch)
    pen.flush()
    pen.log.close()
    assert verify_folder(data.path).ok
    path = max(data.partition(5, 0).glob("*.seg"))
    whole = bytearray(path.read_bytes())
    whole[pen.log.segments()[-1].bytes - 1] ^= 1
    path.write_bytes(whole)
    assert "padding" in verify_folder(data.path).first_bad["reason"]


def test_sampled_bits_of_every_other_file_are_found(data):
    folder = data.partition(5, 0)
    for path in [*sorted(folder.glob("*.snap")), *sorted(folder.glob("*.seg"))[1:2]]:
        whole = path.read_bytes()
        for offset in range(0, len(whole), 7):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :])
            assert verify_folder(data.path).first_bad["file"] == str(path)
        path.write_bytes(whole)


def test_rot_in_the_newest_segment_is_found_after_a_clean_close(data):
    path = max(data.partition(5, 0).glob("*.seg"))
    whole = path.read_bytes()
    used = len(whole.rstrip(b"\x00"))
    for offset in range(used):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert not verify_folder(data.path).ok, offset


def test_every_bit_of_a_replica_file_counts(data):
    folder = data.partition(5, 1)
    ReplicaFile(folder).promise(3)
    assert verify_folder(data.path).notes == []
    path = folder / "replica"
    whole = path.read_bytes()
    for offset in (*range(0, 128, 3), *range(512, 640, 3)):
        once = whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :]
        path.write_bytes(once)
        report = verify_folder(data.path)
        assert report.ok and str(path) in report.notes[0]
        other = (offset + 512) % 1024
        path.write_bytes(once[:other] + bytes([once[other] ^ 0x10]) + once[other + 1 :])
        found = verify_folder(data.path).first_bad
        assert (found["file"], found["partition"]) == (str(path), 1)


def test_a_damaged_slot_of_the_floor_is_noted(data):
    path = data.partition(5, 0) / "floor"
    whole = path.read_bytes()
    for offset in (3, 20, 40, 50, 62):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :])
        report = verify_folder(data.path)
        assert report.ok and "slot is torn" in report.notes[0]
    path.write_bytes(bytes(64) + whole[64:512] + bytes(64) + whole[576:])
    assert "floor" in verify_folder(data.path).first_bad["reason"]


def test_missing_and_swapped_files_are_found(data):
    first, second, *_ = sorted(data.partition(5, 0).glob("*.seg"))
    whole = second.read_bytes()
    second.unlink()
    assert verify_folder(data.path).first_bad["partition"] == 0
    second.write_bytes(first.read_bytes())
    assert "another segment" in verify_folder(data.path).first_bad["reason"]
    second.write_bytes(whole)
    (data.partition(5, 0) / "floor").unlink()
    assert "floor" in verify_folder(data.path).first_bad["reason"]


def test_what_a_restart_repairs_is_noted_not_bad(data):
    folder = data.partition(5, 0)
    newest = max(folder.glob("*.seg"))
    with newest.open("r+b") as file:
        file.seek(len(newest.read_bytes().rstrip(b"\x00")) + 16)
        file.write(b"half a batch")
    min(folder.glob("*.idx")).unlink()
    report = verify_folder(data.path)
    assert report.ok
    assert [("torn" in note, "rebuilt" in note) for note in report.notes] == [
        (False, True), (True, False),
    ]  # fmt: skip


def test_verification_changes_nothing(data):
    files = {path: path.read_bytes() for path in data.path.rglob("*") if path.is_file()}
    verify_folder(data.path)
    assert files == {path: path.read_bytes() for path in data.path.rglob("*") if path.is_file()}


def test_a_folder_in_use_or_of_a_newer_format_is_refused(data, tmp_path):
    with DataFolder.open(data.path), pytest.raises(Unavailable):
        verify_folder(data.path)
    (data.path / "FORMAT").write_text('{"format": 5}')
    with pytest.raises(FailedPrecondition):
        verify_folder(data.path)
    with pytest.raises(NotFound):
        verify_folder(tmp_path / "nothing")


def test_progress_ends_at_the_total(data):
    seen = []
    verify_folder(data.path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def test_a_scrub_finds_damage_while_the_log_is_open(data):
    log = open_partition(data, 0)
    sealed = [info for info in log.segments() if info.sealed]
    assert sum(log.reader.scrub()) == sum(info.bytes for info in sealed)
    path = min(data.partition(5, 0).glob("*.seg"))
    whole = path.read_bytes()
    for offset in (5, 200, len(whole) - 3):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with pytest.raises(Corruption):
            list(log.reader.scrub())
