import errno
from pathlib import Path

import pytest
from tests.unit.log.mounts import tmpfs

from penstock.cluster.reserve import Reserve


class Disk:
    """A disk that is full until the reserve is given up."""

    def __init__(self, path: Path, code: int = errno.ENOSPC) -> None:
        self.path, self.code, self.tries = path, code, 0

    def write(self) -> None:
        self.tries += 1
        if self.path.exists() or self.code != errno.ENOSPC:
            raise OSError(self.code, "no")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reserve"


def test_the_space_is_really_taken(path: Path) -> None:
    Reserve(path, 64 << 10).hold()
    assert path.stat().st_blocks * 512 >= 64 << 10


def test_a_full_disk_gets_the_reserve(path: Path) -> None:
    reserve, disk = Reserve(path, 4096), Disk(path)
    reserve.hold()
    reserve.write(disk.write)
    assert disk.tries == 2 and not path.exists()
    reserve.hold()
    assert path.exists()


def test_without_a_reserve_it_stays_full(path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space"):
        Reserve(path, 4096).write(full)


def test_other_failures_are_not_repeated(path: Path) -> None:
    reserve, disk = Reserve(path, 4096), Disk(path, errno.EIO)
    reserve.hold()
    with pytest.raises(OSError, match="no"):
        reserve.write(disk.write)
    assert disk.tries == 1 and path.exists()


def test_having_no_space_to_hold_is_no_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("penstock.cluster.reserve.os.posix_fallocate", full)
    Reserve(path, 4096).hold()
    assert not path.exists()


def test_of_a_nearly_full_disk_it_holds_what_there_is(tmp_path: Path) -> None:
    """Before, it held nothing where there was no room for all of it."""
    with tmpfs(tmp_path / "disk", size=256 << 10) as disk:
        (disk / "other").write_bytes(bytes(200 << 10))
        reserve = Reserve(disk / "reserve", 64 << 10)
        reserve.hold()
        assert (disk / "reserve").stat().st_size == 32 << 10
        (disk / "other").unlink()
        reserve.hold()
        assert (disk / "reserve").stat().st_size == 64 << 10
