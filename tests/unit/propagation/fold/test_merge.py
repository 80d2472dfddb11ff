from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.propagation.world import (
    DIMENSIONS,
    Luck,
    World,
    batch_of,
    lucks,
    plain,
    reference,
    run,
)

from penstock.model.delta import Delta, Op, encode
from penstock.model.delta_batch import FIXED, DeltaBatch
from penstock.propagation.fold import registers
from penstock.propagation.fold.merge import ascending
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.registers import Registers
from penstock.propagation.fold.snapshot import digest

WHOLE = np.arange(DIMENSIONS, dtype=np.float32)
ONE: dict[str, Any] = {"indices": np.array([1], np.uint16), "values": np.array([9.0], np.float32)}
rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=30)


@given(rows, st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_times_ascend_within_a_chain(pairs: list[tuple[int, int]], last: list[int]) -> None:
    chains = np.array([chain for chain, _ in pairs], np.int64)
    times = np.array([time for _, time in pairs], np.int64)
    kept, expected = np.array(last, np.int64), []
    for chain, time in pairs:
        last[chain] = max(time, last[chain] + 1)
        expected.append(last[chain])
    assert ascending(times, chains, kept).tolist() == expected
    assert kept.tolist() == last


# --- one stamp for a vector, or one for each component ---


def folded(deltas: list[Delta], *, by_rows: bool) -> Propagator:
    fold = Propagator(DIMENSIONS)
    log = batch_of(deltas)
    fold.rows_few = 64 if by_rows else -1
    run(fold, log, list(range(len(log) + 1)) if by_rows else [0, len(log)])
    return fold


def stamped(found: Registers) -> list[int]:
    """Vectors that have a stamp for each component."""
    return np.flatnonzero(found.table.rows("stamps")).tolist()


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_vector_set_whole_has_one_stamp(by_rows: bool) -> None:
    world = World()
    for tick, op in enumerate((Op.CREATE, Op.DENSE, Op.DENSE)):
        world.write("a", "v", op, tick=tick, values=WHOLE + tick)
    found = folded(world.deltas, by_rows=by_rows).merge.registers
    assert found.stamps.count == 0 and found.table["values"][0].tolist()[0] == 2


@pytest.mark.parametrize("by_rows", [True, False])
def test_stamps_of_components_vanish_under_a_later_whole_write(by_rows: bool) -> None:
    world = World()
    world.write("a", "v", Op.CREATE, tick=1, values=WHOLE)
    world.write("a", "v", Op.SPARSE, tick=2, **ONE)
    assert stamped(folded(world.deltas, by_rows=by_rows).merge.registers) == [0]
    world.write("a", "v", Op.DENSE, tick=3, values=WHOLE)
    world.write("b", "w", Op.SPARSE, tick=4, **ONE)
    found = folded(world.deltas, by_rows=True).merge.registers
    assert stamped(found) == [1] and found.sparse.table.count == 1  # the row was used again
    assert found.table["values"][0].tolist() == WHOLE.tolist()


def test_a_whole_write_that_comes_late_leaves_what_is_newer() -> None:
    world = World()
    late = world.write("b", "v", Op.DENSE, tick=2, values=WHOLE)
    world.write("a", "v", Op.CREATE, tick=1, values=WHOLE + 5)
    world.write("a", "v", Op.SPARSE, tick=3, **ONE)
    fold = folded([*world.deltas[1:], late], by_rows=False)
    assert fold.states().values[0].tolist() == [0, 9, 2, 3, 4, 5]
    assert stamped(fold.merge.registers) == [0]


def test_metadata_keep_their_stamp_when_components_are_set_without_any() -> None:
    world = World()
    late = world.write("b", "v", Op.METADATA, tick=2, metadata={"m": 1})
    world.write("a", "v", Op.CREATE, tick=3, values=WHOLE)
    world.write("a", "v", Op.DENSE, tick=9, values=WHOLE)
    soon = world.write("c", "v", Op.METADATA, tick=5, metadata={"m": 2})
    for by_rows in (True, False):
        fold = folded([*world.deltas[1:3], late, soon], by_rows=by_rows)
        assert fold.states().metadata[0] == b"\x81\xa1m\x02"


def test_who_was_deleted_is_alive_again_by_a_later_write_only() -> None:
    world = World()
    late = world.write("b", "v", Op.DENSE, tick=4, values=WHOLE)
    world.write("a", "v", Op.CREATE, tick=1, values=WHOLE)
    world.write("a", "v", Op.DELETE, tick=5)
    assert folded([*world.deltas[1:], late], by_rows=False).states().deleted[0]
    world.write("a", "v", Op.DENSE, tick=6, values=WHOLE)
    for by_rows in (True, False):
        assert not folded(world.deltas, by_rows=by_rows).states().deleted[0]


def creations(count: int, dimensions: int) -> Propagator:
    fold = Propagator(dimensions)
    template = World().write("a", "v", Op.CREATE, tick=1, values=np.ones(dimensions, np.float32))

    payload = encode(template, dimensions=dimensions)
    blob = np.frombuffer(payload * count, np.uint8).reshape(count, len(payload)).copy()
    fixed = np.ndarray((count,), FIXED, blob.data, strides=(len(payload),))
    fixed["vector"][:, 0] = fixed["delta_id"][:, 0] = np.arange(1, count + 1)
    fold.feed(DeltaBatch.of([row.tobytes() for row in blob]), through=count)
    return fold


def test_a_state_takes_little_more_than_its_values() -> None:
    fold = creations(20_000, 128)
    assert len(fold.ledger.vectors) == 20_000
    assert fold.nbytes / 20_000 - 4 * 128 < 180


def test_bytes_that_were_given_up_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers, "PACK_MIN", 64)
    for by_rows in (True, False):
        world = World()
        for tick in range(60):
            world.write("a", "vw"[tick % 2], Op.METADATA, tick=tick, metadata={"m": "x" * tick})
        fold = Propagator(DIMENSIONS)
        fold.rows_few = 64 if by_rows else -1
        fold.merge.registers._pack_at = 64
        log = batch_of(world.deltas)
        run(fold, log, list(range(0, 61, 5)))
        assert fold.merge.registers.words.end < 400
        assert [len(text) for text in fold.states().metadata] == [63, 64]


@settings(max_examples=30)
@given(lucks, st.integers(1, 40))
def test_by_rows_and_by_columns_are_as_the_plain_fold(luck: Luck, size: int) -> None:
    deltas = luck.history(size)
    both = [folded(luck.arrivals(deltas), by_rows=by_rows) for by_rows in (True, False)]
    wanted = {v: (values, gone) for v, (values, _, gone, _, _) in reference(deltas).items()}
    for fold in both:
        found = plain(fold.states(), log=False)
        assert {v: (values, gone) for v, (values, _, gone, *_) in found.items()} == wanted


def test_equal_histories_have_equal_digests_whatever_has_stamps() -> None:
    world = World()
    world.write("a", "v", Op.SPARSE, tick=1, **ONE)
    world.write("a", "v", Op.DENSE, tick=2, values=WHOLE)
    assert digest(folded(world.deltas, by_rows=True)) == digest(folded(world.deltas, by_rows=False))
