"""Change files: sections, names, and damage."""

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import Corruption, StorageFailed
from penstock.spark.fold.change_file import ChangeWriter, Part, read_section


def written(folder: Path, *values: int) -> Part:
    writer = ChangeWriter(folder, topic="vectors", partition=3)
    writer.add("states", pa.table({"n": values, "log_time_ms": [v * 10 for v in values]}), lane=1)
    writer.add("states", pa.table({"n": pa.array([], pa.int64())}), lane=2)
    writer.add("deltas", pa.table({"id": ["a", "b"]}))
    return writer.finish(first=5, last=9, counts={"read": 2})


def test_each_section_is_read_alone(tmp_path: Path) -> None:
    part = written(tmp_path, 1, 2, 3)
    states, deltas = part.sections
    assert (states.kind, states.lane, states.rows) == ("states", 1, 3)
    assert (states.log_time_ms_min, states.log_time_ms_max) == (10, 30)
    assert read_section(tmp_path, part, states)["n"].to_pylist() == [1, 2, 3]
    assert read_section(tmp_path, part, deltas)["id"].to_pylist() == ["a", "b"]
    assert part.bytes == (tmp_path / str(part.file)).stat().st_size


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


def test_rows_outlive_the_file(tmp_path: Path) -> None:
    part = written(tmp_path, *range(10_000))
    table = read_section(tmp_path, part, part.sections[0])
    (tmp_path / str(part.file)).unlink()
    assert table["n"].to_pylist() == list(range(10_000))


def test_a_missing_file_is_corruption(tmp_path: Path) -> None:
    part = written(tmp_path, 1)
    (tmp_path / str(part.file)).unlink()
    with pytest.raises(Corruption, match="not there"):
        read_section(tmp_path, part, part.sections[0])


def test_a_short_file_is_corruption(tmp_path: Path) -> None:
    part = written(tmp_path, *range(100))
    path = tmp_path / str(part.file)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(Corruption, match="not what was written"):
        read_section(tmp_path, part, part.sections[0])


def test_a_folder_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(StorageFailed, match="gone"):
        written(gone, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_same_fold_in_other_bytes_is_the_same_fold(tmp_path: Path) -> None:
    first, other = written(tmp_path, 1), written(tmp_path, 2)
    assert first.same_fold(other)
    counts = ChangeWriter(tmp_path, topic="vectors", partition=3).finish(first=5, last=9, counts={})
    assert not first.same_fold(counts)
