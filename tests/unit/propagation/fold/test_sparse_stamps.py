"""Stamps of a few components, against a dict of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.propagation.world import START_MS, Luck, World, lucks, run

from penstock.model.delta import Op, encode
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.registers import Registers
from penstock.propagation.fold.snapshot import digest, dump, restore

WIDTH = 40
WHOLE = np.zeros(WIDTH, np.float32)


def named(luck: Luck, most: int) -> dict[str, Any]:
    indices = sorted(luck.sample(range(WIDTH), luck.randint(1, most)))
    values = [float(luck.randint(1, 99)) for _ in indices]
    return {"indices": np.array(indices, np.uint16), "values": np.array(values, np.float32)}


def written(luck: Luck, count: int) -> World:
    """SPARSE for the most part; most of them in the order of their stamps."""
    world = World()
    for tick in range(1, count + 1):
        at = tick if luck.maybe(0.9) else luck.randint(1, tick)
        vector, origin = luck.choice("uvw"), luck.choice("ab")
        if luck.maybe(0.9):
            world.write(origin, vector, Op.SPARSE, tick=at, **named(luck, luck.choice((3, 12, 36))))
        elif luck.maybe():
            world.write(origin, vector, Op.DENSE, tick=at, values=WHOLE + tick)
        else:
            world.write(origin, vector, Op.SCALE, tick=at, values=np.full(1, 2.0, np.float32))
    return world


def log_of(world: World, dimensions: int) -> DeltaBatch:
    count = len(world.deltas)
    return DeltaBatch.of(
        [encode(delta, dimensions=dimensions) for delta in world.deltas],
        sequences=np.arange(1, count + 1, dtype=np.uint64),
        log_times_ms=np.full(count, START_MS, np.int64),
    )


def folded(world: World, *, rows_few: int, cuts: list[int]) -> Propagator:
    fold = Propagator(WIDTH)
    fold.rows_few = rows_few
    run(fold, log_of(world, WIDTH), cuts)
    fold.validate()
    return fold


def stamps(fold: Propagator) -> dict[str, list[tuple[float, int, bytes]]]:
    """Value, time and origin of each component."""
    registers, found = fold.merge.registers, {}
    for vector, name in enumerate(fold.ledger.names.ids_of(np.arange(len(fold.ledger.vectors)))):
        times, writers = registers.stamps_of(vector)
        values = registers.table["values"][vector].tolist()
        told = zip(values, times.tolist(), writers.tolist(), strict=True)
        found[name.decode()] = [
            (v, t, fold.ledger.origin_name(w) if t else b"") for v, t, w in told
        ]
    return found


def kinds(fold: Propagator) -> tuple[int, int]:
    """How many vectors have a few stamps, and how many one for each component."""
    rows = fold.merge.registers.table.rows("stamps")
    return int((rows < 0).sum()), int((rows > 0).sum())


@settings(max_examples=80)
@given(lucks)
def test_a_few_stamps_say_what_one_for_each_component_does(luck: Luck) -> None:
    world = written(luck, luck.randint(1, 60))
    count = len(world.deltas)
    several = folded(world, rows_few=-1, cuts=luck.cuts(count))
    single = folded(world, rows_few=64, cuts=list(range(count + 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registers, "_set_few", lambda *_: pytest.fail("a few stamps"))
        patch.setattr("penstock.propagation.fold.sparse_stamps.NAMES_MAX", 1)
        patch.setattr("penstock.propagation.fold.sparse_stamps.WRITES_MAX", 0)
        whole = folded(world, rows_few=-1, cuts=[0, count])
    assert kinds(whole)[0] == 0
    assert stamps(several) == stamps(single) == stamps(whole)
    assert digest(several) == digest(single) == digest(whole)
    vectors = np.arange(len(several.ledger.vectors))
    times, _ = several.merge.registers.component_stamps(vectors)
    assert times.tolist() == [several.merge.registers.stamps_of(v)[0].tolist() for v in vectors]
    again = restore(b"".join(dump(several)))
    again.validate()
    assert kinds(again) == kinds(several) and stamps(again) == stamps(several)


@pytest.mark.parametrize("by_rows", [True, False])
def test_many_writes_in_order_become_a_stamp_for_each(by_rows: bool) -> None:
    world, wanted = World(), {}
    for tick in range(1, 16):
        index = tick % 7
        one = {"indices": np.array([index], np.uint16), "values": np.full(1, tick, np.float32)}
        made = world.write("a", "v", Op.SPARSE, tick=tick, **one)
        wanted[index] = (float(tick), made.time, b"a")
        cuts = list(range(tick + 1)) if by_rows else [0, tick]
        fold = folded(world, rows_few=64 if by_rows else -1, cuts=cuts)
        assert kinds(fold) == ((1, 0) if tick <= 10 else (0, 1))
        ((name, found),) = stamps(fold).items()
        assert name == "v"
        assert {i: told[:2] for i, told in enumerate(found) if told[1]} == {
            i: told[:2] for i, told in wanted.items()
        }


def test_a_change_of_a_few_components_takes_little() -> None:
    world = World()
    for number in range(2000):
        ten = {"indices": np.arange(10, dtype=np.uint16), "values": np.ones(10, np.float32)}
        world.write("a", f"v{number}", Op.SPARSE, tick=number + 1, **ten)
    fold = Propagator(128)
    run(fold, log_of(world, 128), [0, 2000])
    assert kinds(fold) == (2000, 0)
    assert fold.merge.nbytes / 2000 - 4 * 128 < 450
