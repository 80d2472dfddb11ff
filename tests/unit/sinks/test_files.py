"""Which files have to be synced."""

from pathlib import Path

import pytest

from penstock.sinks import files as durable
from penstock.sinks.files import NewFiles, local_path


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("data/lake", Path("data/lake")),
        ("/a b", Path("/a b")),
        ("file:///a%20b", Path("/a b")),
        ("s3://bucket/lake", None),
    ],
)
def test_only_paths_of_this_machine_are_local(uri: str, path: Path | None) -> None:
    assert local_path(uri) == path


def test_a_file_is_synced_once_with_the_folders_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync", lambda paths: synced.extend(paths))
    (tmp_path / "old").touch()
    files = NewFiles(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "new").touch()

    files.sync()
    assert synced == [tmp_path / "data" / "new", tmp_path, tmp_path / "data"]
    files.sync()
    assert len(synced) == 3


def test_a_file_that_is_gone_needs_no_sync(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    durable.sync([tmp_path / "gone", tmp_path / "here", tmp_path])
