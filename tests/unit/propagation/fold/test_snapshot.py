from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.propagation.world import (
    DIMENSIONS,
    START_MS,
    Luck,
    World,
    batch_of,
    lucks,
    options,
    plain,
    run,
    sizes,
    story,
)

from penstock.errors import Corruption
from penstock.model.delta import Op
from penstock.propagation.fold import snapshot
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest, dump, restore

ONE = np.ones(1, np.float32)


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
    monkeypatch.setattr("penstock.propagation.fold.registers.CODES_SMALL", 1)
    fold = example()
    assert fold.merge.registers.table["writer"].dtype == np.uint32
    restored = restore(b"".join(dump(fold)))
    assert digest(restored) == digest(fold) == digest(restore(SNAPSHOT))


# --- increments ---


@settings(max_examples=60)
@given(lucks, sizes)
def test_a_base_and_its_increments_have_the_same_future(luck: Luck, size: int) -> None:
    arrivals = luck.arrivals(luck.history(size))
    times_ms = START_MS + np.cumsum([luck.randrange(40) for _ in arrivals])
    log = batch_of(arrivals, headers=True, times_ms=times_ms.tolist())
    bounds = options(
        operations_max=3, pending_max=luck.randint(1, 5), pending_ms=luck.choice((50, 30_000)),
        dedup_ms=luck.choice((60, 10**6)),
    )  # fmt: skip
    straight, chain = Propagator(DIMENSIONS, bounds), list[bytes]()
    other = Propagator(DIMENSIONS, bounds)
    for a, b in pairwise(luck.cuts(len(log))):
        expected = run(straight, log, [a, b])
        # Whoever writes an increment may have cut the log otherwise than whoever wrote the base.
        between = sorted({a, b, luck.randint(a, b)})
        assert story(run(other, log, between)) == story(expected)
        chain.append(b"".join(dump(other, increment=bool(chain))))
        if luck.maybe(0.7):
            other = restore(*chain, options=bounds)
            other.validate()
        else:
            other.on_saved()
        assert digest(other) == digest(straight)
        assert plain(other.states()) == plain(straight.states())
    assert digest(restore(*chain, options=bounds)) == digest(straight)


def test_an_increment_has_only_what_changed() -> None:
    luck, fold = Luck(5), Propagator(DIMENSIONS)
    log = batch_of(luck.history(60))
    run(fold, log, [0, 60])
    fold.on_saved()
    _, columns = snapshot._load(b"".join(dump(fold, increment=True)))
    assert len(columns["registers.values"]) == len(columns["ids.low"]) == 0
    other = World().write("z", "v", Op.SCALE, tick=99, values=ONE)
    run(fold, batch_of([msgspec.structs.replace(other, delta_id=b"z" * 16)], first=61), [0, 1])
    _, columns = snapshot._load(b"".join(dump(fold, increment=True)))
    assert len(columns["registers.values"]) == len(columns["ids.low"]) == 1


def test_an_increment_since_an_earlier_snapshot_fits_as_well() -> None:
    fold = Propagator(DIMENSIONS)
    log = batch_of(Luck(7).history(60))
    run(fold, log, [0, 20])
    first = b"".join(dump(fold))
    fold.on_saved()
    run(fold, log, [20, 40])
    second = b"".join(dump(fold, increment=True))
    run(fold, log, [40, 60])
    third = b"".join(dump(fold, increment=True))  # of all since the first
    assert digest(restore(first, second, third)) == digest(restore(first, third)) == digest(fold)


def test_what_does_not_follow_is_refused() -> None:
    fold = Propagator(DIMENSIONS)
    log = batch_of(Luck(7).history(60))
    pieces = []
    for a in (0, 20, 40):
        run(fold, log, [a, a + 20])
        pieces.append(b"".join(dump(fold, increment=a > 0)))
        fold.on_saved()
    with pytest.raises(Corruption, match="after sequence 40 does not follow one of 20"):
        restore(pieces[0], pieces[2])
    with pytest.raises(Corruption, match="restored from a base"):
        restore(pieces[1])
    with pytest.raises(Corruption, match="does not follow"):
        restore(pieces[0], pieces[0])
    with pytest.raises(Corruption, match="restored from a base"):
        restore()
