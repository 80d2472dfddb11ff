from pathlib import Path

import pytest

from penstock.cluster.image import FILE, read_image, write_image
from penstock.cluster.store import Versioned
from penstock.errors import Corruption, FailedPrecondition, StorageFailed

ENTRIES = [Versioned("a", b"\x00\x01", 3, 1), Versioned("b/c", b"", 2, 2)]


def test_an_image_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    image = read_image(tmp_path)
    assert image.revision == 3
    assert list(image.entries.values()) == ENTRIES


def test_no_image_is_an_empty_one(tmp_path: Path) -> None:
    assert read_image(tmp_path) == (0, {})


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    path = tmp_path / FILE
    good = path.read_bytes()
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises((Corruption, FailedPrecondition)):
            read_image(tmp_path)


@pytest.mark.parametrize("cut", [0, 10, 24, 30])
def test_a_short_image_is_found(tmp_path: Path, cut: int) -> None:
    write_image(tmp_path, 3, ENTRIES)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(Corruption):
        read_image(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[11] = 2
    path.write_bytes(data)
    with pytest.raises(FailedPrecondition, match="format 2"):
        read_image(tmp_path)


def test_half_a_new_image_does_not_touch_the_old_one(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    (tmp_path / (FILE + ".new")).write_bytes(b"PSTK")
    assert read_image(tmp_path).revision == 3
    write_image(tmp_path, 4, ENTRIES)
    assert read_image(tmp_path).revision == 4


def test_a_folder_that_is_gone_is_a_storage_failure(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed):
        write_image(tmp_path / "gone", 1, ENTRIES)
