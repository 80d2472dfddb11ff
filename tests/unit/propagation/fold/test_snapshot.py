import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.propagation.world import DIMENSIONS, Luck, batch_of, run

from penstock.errors import Corruption
from penstock.propagation.fold import snapshot
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest, dump, restore


def example() -> Propagator:
    luck, fold = Luck(3), Propagator(DIMENSIONS)
    log = batch_of(luck.history(50))
    run(fold, log, [0, len(log)])
    return fold


SNAPSHOT = b"".join(dump(example()))


def test_a_snapshot_of_a_snapshot_is_the_same() -> None:
    assert b"".join(dump(restore(SNAPSHOT))) == SNAPSHOT


@settings(max_examples=60)
@given(st.integers(0, len(SNAPSHOT) - 1), st.integers(1, 255))
def test_damage_is_found(at: int, mask: int) -> None:
    damaged = bytearray(SNAPSHOT)
    damaged[at] ^= mask
    with pytest.raises(Corruption):
        restore(bytes(damaged))


@pytest.mark.parametrize("size", [0, 10, len(SNAPSHOT) - 1])
def test_a_part_is_no_snapshot(size: int) -> None:
    with pytest.raises(Corruption):
        restore(SNAPSHOT[:size])


def test_long_columns_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCK", 64)
    fold = example()
    found = restore(memoryview(b"".join(dump(fold))))
    assert digest(found) == digest(fold)
    assert np.array_equal(found.states().values, fold.states().values)


def test_more_origins_than_two_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.propagation.fold.merge.CODES_SMALL", 1)
    fold = example()
    assert fold.merge.registers.table["writers"].dtype == np.uint32
    restored = restore(b"".join(dump(fold)))
    assert digest(restored) == digest(fold) == digest(restore(SNAPSHOT))
