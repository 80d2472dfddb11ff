from __future__ import annotations

from penstock.log.recovery import SLOT_STRIDE, Floor, FloorFlag


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


def test_what_was_before_the_log_belongs_to_its_first_sequence(tmp_path):
    floor = Floor(tmp_path / "floor")
    floor.change(floor.slot._replace(first=5, chain=77, epoch=3))
    floor.raise_to(sequence=6, first=5)
    assert Floor(tmp_path / "floor").slot[4:] == (0, 0, 77, 3)
    floor.raise_to(first=9)
    assert Floor(tmp_path / "floor").slot[4:] == (0, 0, 0, 0)


def test_a_slot_has_version_2_only_where_it_needs_it(tmp_path):
    floor = Floor(tmp_path / "floor")
    floor.raise_to(sequence=6, first=1, tail=1)
    assert floor.slot.encode()[4] == 1
    assert floor.slot._replace(flags=FloorFlag.CUT).encode()[4] == 2
    assert floor.slot._replace(epoch=1).encode()[4] == 2


def test_a_settled_floor_cannot_fall_back_to_an_intent(tmp_path):
    path = tmp_path / "floor"
    floor = Floor(path)
    floor.change(floor.slot._replace(flags=FloorFlag.CUT, cut=4))
    floor.settle(floor.slot._replace(flags=FloorFlag.NONE, cut=0))
    whole = path.read_bytes()
    for at in (17, SLOT_STRIDE + 17):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert Floor(path).slot.flags is FloorFlag.NONE
