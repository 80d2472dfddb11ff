from __future__ import annotations

import os

import pytest

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable
from penstock.log import DataFolder
from penstock.log.folder import FORMAT_DELTAS


def test_a_new_folder_gets_a_format(tmp_path):
    with DataFolder.open(tmp_path / "a" / "b") as data:
        assert (data.path / "FORMAT").read_bytes() == b'{"format":1,"product":"penstock"}'
        assert data.partition(0xABC, 7) == data.path / "topics" / "00000abc" / "0007"


def test_a_second_process_is_told_who_has_it(tmp_path):
    with DataFolder.open(tmp_path), pytest.raises(Unavailable, match=str(os.getpid())):
        DataFolder.open(tmp_path)
    DataFolder.open(tmp_path).close()


def test_a_newer_format_is_refused(tmp_path):
    DataFolder.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text('{"format": 4, "why": "later"}')
    with pytest.raises(FailedPrecondition, match="format 4"):
        DataFolder.open(tmp_path)


def test_an_older_reader_accepts_added_fields(tmp_path):
    DataFolder.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text('{"format": 1, "added": true}')
    DataFolder.open(tmp_path, create=False).close()


def test_without_create_a_missing_folder_is_not_made(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(NotFound):
            DataFolder.open(path, create=False)
    assert list(tmp_path.iterdir()) == []


def test_topics_without_a_format_are_not_taken_over(tmp_path):
    (tmp_path / "topics").mkdir()
    with pytest.raises(Corruption):
        DataFolder.open(tmp_path)


def test_an_unreadable_format_is_corruption(tmp_path):
    DataFolder.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text("{")
    with pytest.raises(Corruption):
        DataFolder.open(tmp_path)


def test_partitions_are_listed_and_topics_removed(tmp_path):
    with DataFolder.open(tmp_path) as data:
        for topic, partition in ((1, 0), (1, 1), (2, 0)):
            data.partition(topic, partition).mkdir(parents=True)
        data.remove_topic(1)
        data.remove_topic(9)
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
        data.remove_partition(1, 0)
        data.remove_partition(1, 7)
        assert [(t, p) for t, p, _ in data.partitions()] == [(1, 1)]


def test_a_format_is_raised_and_never_lowered(tmp_path):
    with DataFolder.open(tmp_path) as data:
        data.raise_format(FORMAT_DELTAS)
        data.raise_format(1)
        assert data.format == FORMAT_DELTAS
    with DataFolder.open(tmp_path) as data:
        assert data.format == FORMAT_DELTAS
