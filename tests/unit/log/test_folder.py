from __future__ import annotations

import os

import pytest

from penstock.errors import Corruption, FailedPrecondition, Unavailable
from penstock.log.folder import FORMAT_DELTAS, DataFolder


def test_a_new_folder_gets_a_format(tmp_path):
    with DataFolder.open(tmp_path / "a" / "b") as data:
        assert (data.path / "FORMAT").read_bytes() == (
            b'{"format":1,"product":"penstock","inventory":true}'
        )
        assert data.partition(0xABC, 7) == data.path / "topics" / "00000abc" / "0007"


def test_a_second_process_is_told_who_has_it(tmp_path):
    with DataFolder.open(tmp_path), pytest.raises(Unavailable, match=str(os.getpid())):
        DataFolder.open(tmp_path)
    DataFolder.open(tmp_path).close()


def test_a_newer_format_is_refused(tmp_path):
    DataFolder.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text('{"format": 5, "why": "later"}')
    with pytest.raises(FailedPrecondition, match="format 5"):
        DataFolder.open(tmp_path)


def test_an_older_reader_accepts_added_fields(tmp_path):
    DataFolder.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text('{"format": 1, "added": true}')
    DataFolder.open(tmp_path).close()


def test_topics_without_a_format_are_not_taken_over(tmp_path):
    (tmp_path / "topics").mkdir()
    with pytest.raises(Corruption):
        DataFolder.open(tmp_path)


def test_an_unreadable_format_is_corruption(tmp_path):
    DataFolder.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text("{")
    with pytest.raises(Corruption):
        DataFolder.open(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"format": 0}', b'{"format": 1, "product": "\xff\xff"}']
)
def test_a_damaged_format_is_corruption_that_names_the_file(tmp_path, content):
    """Before, bytes that are no text ended in a traceback, and format 0 was accepted."""
    DataFolder.open(tmp_path).close()
    (tmp_path / "FORMAT").write_bytes(content)
    with pytest.raises(Corruption) as refused:
        DataFolder.open(tmp_path)
    assert refused.value.details["file"] == str(tmp_path / "FORMAT")


def test_a_folder_of_another_product_is_refused(tmp_path):
    """Before, the product's name was not looked at, and the folder was taken over."""
    (tmp_path / "FORMAT").write_text('{"format": 1, "product": "kafka"}')
    with pytest.raises(FailedPrecondition, match="a folder of kafka"):
        DataFolder.open(tmp_path)


@pytest.mark.parametrize("left", ["topics", "meta", "node.json"])
def test_a_folder_that_lost_its_format_is_not_begun_anew(tmp_path, left):
    """Before, only `topics` was looked for: a folder with metadata was taken for a new one."""
    (tmp_path / left).mkdir()
    with pytest.raises(Corruption, match="no FORMAT file"):
        DataFolder.open(tmp_path)


def test_a_folder_that_others_can_read_is_closed(tmp_path):
    """Before, the rights of a folder stayed as they were found: often 0755, with files of 0644."""
    path = tmp_path / "data"
    DataFolder.open(path).close()
    (path / "meta" / "store.bin").touch()
    inside = path / "topics" / "00000001" / "0000"
    inside.mkdir(parents=True)
    (inside / "floor").write_bytes(b"")
    (inside / "elsewhere").symlink_to(tmp_path / "target")
    (tmp_path / "target").touch(0o644)
    for each in (path, path / "FORMAT", path / "topics", inside, inside / "floor"):
        each.chmod(0o777)
    DataFolder.open(path).close()
    assert [each for each in (path, *path.rglob("*")) if each.lstat().st_mode & 0o077] == [
        inside / "elsewhere"
    ]
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_all_share_is_left_as_it_is(tmp_path, caplog):
    """As `/tmp`: whoever puts data there did not mean to close it to the others."""
    tmp_path.chmod(0o1777)
    DataFolder.open(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    assert "is open to others" in caplog.text


def test_partitions_are_listed_and_topics_removed(tmp_path):
    with DataFolder.open(tmp_path) as data:
        for topic, partition in ((1, 0), (1, 1), (2, 0)):
            data.partition(topic, partition).mkdir(parents=True)
        data.remove(1)
        data.remove(9)
        assert [(t, p) for t, p, _ in data.partitions()] == [(2, 0)]


def test_a_removal_that_a_crash_cut_short_is_finished(tmp_path):
    with DataFolder.open(tmp_path) as data:
        data.topics.joinpath("00000001.deleted", "0000").mkdir(parents=True)
        data.topic(2).joinpath("0000.deleted").mkdir(parents=True)
    with DataFolder.open(tmp_path) as data:
        assert [list(folder.iterdir()) for folder in data.topics.iterdir()] == [[]]


def test_one_partition_is_removed(tmp_path):
    with DataFolder.open(tmp_path) as data:
        for partition in (0, 1):
            data.partition(1, partition).mkdir(parents=True)
        data.remove(1, 0)
        data.remove(1, 7)
        assert [(t, p) for t, p, _ in data.partitions()] == [(1, 1)]


def test_a_format_is_raised_and_never_lowered(tmp_path):
    with DataFolder.open(tmp_path) as data:
        data.raise_format(FORMAT_DELTAS)
        data.raise_format(1)
        assert data.format == FORMAT_DELTAS
    with DataFolder.open(tmp_path) as data:
        assert data.format == FORMAT_DELTAS
