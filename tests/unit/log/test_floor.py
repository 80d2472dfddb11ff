from __future__ import annotations

from penstock.log.floor import SLOT_STRIDE, Floor


def test_the_floor_only_rises(tmp_path):
    floor = Floor(tmp_path / "floor")
    floor.raise_to(sequence=10, first=1, tail=5)
    floor.raise_to(sequence=7, first=3)
    slot = Floor(tmp_path / "floor").slot
    assert (slot.sequence, slot.first, slot.tail) == (10, 3, 5)


def test_a_floor_that_a_crash_left_empty_is_written_anew(tmp_path):
    (tmp_path / "floor").write_bytes(bytes(2 * SLOT_STRIDE))
    Floor(tmp_path / "floor")
    (tmp_path / "0000000000000001.seg").touch()
    assert Floor(tmp_path / "floor").slot.generation == 1


def test_an_unchanged_floor_is_not_written(tmp_path):
    floor = Floor(tmp_path / "floor")
    floor.raise_to(sequence=10)
    generation = floor.slot.generation
    floor.raise_to(sequence=10)
    assert floor.slot.generation == generation


def test_a_torn_slot_leaves_the_one_before(tmp_path):
    path = tmp_path / "floor"
    floor = Floor(path)
    floor.raise_to(sequence=10)
    floor.raise_to(sequence=20)
    data = bytearray(path.read_bytes())
    data[floor.slot.generation % 2 * SLOT_STRIDE + 17] ^= 1
    path.write_bytes(data)
    again = Floor(path)
    assert again.slot.sequence == 10
    again.raise_to(sequence=30)
    assert Floor(path).slot.sequence == 30
