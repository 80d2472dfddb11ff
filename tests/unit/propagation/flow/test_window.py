from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.propagation.world import (
    DIMENSIONS,
    Luck,
    World,
    batch_of,
    lucks,
    plain,
    reference,
    run,
    sizes,
)

from penstock.errors import InvalidArgument
from penstock.model.delta import Delta, Op, PriorityClass
from penstock.model.delta_checks import validate
from penstock.propagation.flow.outbox import CoalesceWindow, DeltaOutbox, coalesced
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.releases import ReleasedRows


def rows_of(deltas: list[Delta], *, headers: bool = False) -> ReleasedRows:
    numbers = np.arange(1, len(deltas) + 1, dtype=np.uint64)
    return ReleasedRows(batch_of(deltas, headers=headers), numbers, numbers)


def sparse(world: World, vector: str, tick: int, index: int, **more: Any) -> Delta:
    named, values = np.array([index], np.uint16), np.array([tick], np.float32)
    return world.write("a", vector, Op.SPARSE, tick=tick, indices=named, values=values, **more)


def applied(deltas: list[Delta]) -> dict[str, tuple[Any, ...]]:
    """Each delta on top of the one before it, as one does who knows no stamps."""
    world = World()
    ordered = [
        world.write(
            "o", d.vector_id, d.op, tick=tick, indices=d.indices, values=d.values,
            metadata=d.metadata,
        )
        for tick, d in enumerate(deltas)
    ]  # fmt: skip
    return {vector: row[:3] for vector, row in reference(ordered).items()}


@settings(max_examples=60)
@given(lucks, sizes)
def test_applied_in_order_the_merged_give_what_all_give(luck: Luck, size: int) -> None:
    rows = rows_of(luck.history(size), headers=luck.maybe())
    found = coalesced(rows)
    assert found.folded == len(rows) - len(found)
    assert applied(found.batch.decoded()) == applied(rows.batch.decoded())
    assert found.ordinals.tolist() == found.batch.sequences.tolist() == sorted(found.ordinals)
    last = {d.vector_id: d.delta_id for d in rows.batch.decoded()}
    assert {d.vector_id: d.delta_id for d in found.batch.decoded()} == last
    validate(found.batch, dimensions=DIMENSIONS, now_ms=1 << 46)


@settings(max_examples=80)
@given(lucks, sizes)
def test_folded_by_the_kernel_they_give_the_same_vectors(luck: Luck, size: int) -> None:
    world = World()
    for tick in range(size):
        op = luck.choice([*Op, Op.SPARSE, Op.SPARSE, Op.DENSE])
        vector = luck.choice("vw")
        world.write(f"of-{vector}", vector, op, tick=tick, **luck.content(op))
    kernel, again, counts = Propagator(DIMENSIONS), Propagator(DIMENSIONS), dict[str, int]()
    (outcome,) = run(kernel, batch_of(world.deltas), [0, size])
    rows = ReleasedRows(outcome.released, outcome.positions, outcome.ordinals)
    merged = coalesced(rows).batch.decoded()
    renumbered, heads = [], dict[str, bytes]()
    for delta in merged:
        assert delta.parent == heads.get(delta.vector_id)
        heads[delta.vector_id] = delta.delta_id
        counts[delta.origin] = counts.get(delta.origin, 0) + 1
        renumbered.append(
            msgspec.structs.replace(delta, clock={delta.origin: counts[delta.origin]})
        )
    run(again, batch_of(renumbered), [0, len(renumbered)])
    ours, theirs = plain(again.states(), log=False), plain(kernel.states(), log=False)
    # All but the revision, which counts deltas.
    assert {v: (*r[:3], r[4]) for v, r in ours.items()} == {
        v: (*r[:3], r[4]) for v, r in theirs.items()
    }


@settings(max_examples=60)
@given(lucks, sizes)
def test_who_reads_on_from_the_settled_position_misses_nothing(luck: Luck, size: int) -> None:
    world = World()
    for tick in range(size):
        op, vector = luck.choice([*Op, *[Op.SPARSE] * 9]), luck.choice("vwxy")
        urgent = luck.choice(list(PriorityClass))
        world.write("a", vector, op, tick=tick, priority=urgent, **luck.content(op))
    rows, wanted = rows_of(world.deltas), applied(world.deltas)
    window, outbox = CoalesceWindow(5), DeltaOutbox(10_000, 1 << 30, ageing_ms=10)
    outbox.held_slack = luck.choice((0, outbox.held_slack))
    at, now_ms, found = 0, 0, list[ReleasedRows]()
    while at < size or outbox.entries:
        now_ms += luck.choice((0, 2, 7))
        part = rows.cut(at, at + luck.randint(1, 4))
        window.add(part, now_ms)
        at += len(part)
        flushed = window.flush() if at == size else window.due(now_ms)
        outbox.add(flushed or ReleasedRows.empty(), now_ms)
        taken = outbox.take(luck.randint(1, 3), 1 << 30)
        if taken is not None:
            found.append(taken)
            sent = ReleasedRows.concat(found)
            settled = min(outbox.settled_position, (window.first_position or at + 1) - 1)
            assert applied(sent.batch.decoded() + _unsent(rows, sent, settled)) == wanted
    assert sum(len(part) + part.folded for part in found) == size


def _unsent(rows: ReleasedRows, sent: ReleasedRows, settled: int) -> list[Delta]:
    """Behind a position, what is not behind the last that was sent of its vector."""
    names = [delta.vector_id for delta in sent.batch.decoded()]
    last = dict(zip(names, sent.ordinals.tolist(), strict=True))
    deltas = enumerate(rows.batch.decoded(), 1)
    return [d for ordinal, d in deltas if ordinal > max(settled, last.get(d.vector_id, 0))]


def test_a_run_becomes_one_delta() -> None:
    world = World()
    deltas = [sparse(world, "v", 1, 3), sparse(world, "w", 2, 0), sparse(world, "v", 3, 1),
              sparse(world, "v", 4, 3, priority=PriorityClass.HIGH)]  # fmt: skip
    found = coalesced(rows_of(deltas, headers=True))
    assert found.positions.tolist() == [2, 4]
    one = found.batch.decoded()[1]
    assert (one.indices.tolist(), one.values.tolist()) == ([1, 3], [3, 4])
    assert (one.delta_id, one.parent) == (deltas[3].delta_id, deltas[0].parent)
    assert (one.clock, one.priority) == (deltas[3].clock, PriorityClass.HIGH)
    assert list(found.batch.headers or ()) == [b"h2", b"h4"]
    assert found.folded == 2
    assert found.merged is not None
    assert found.merged.firsts.tolist() == [2, 1]
    assert found.take(np.array([1])).folded == 2
    assert ReleasedRows.gathered([(found, np.array([0])), (found, np.array([1]))]).folded == 2


def test_what_does_not_merge_closes_the_run() -> None:
    world = World()
    deltas = [sparse(world, "v", 1, 0), world.write("a", "v", Op.DELETE, tick=2),
              sparse(world, "v", 3, 0)]  # fmt: skip
    rows = rows_of(deltas)
    assert coalesced(rows) is rows
    other = World()
    sparse(other, "v", 5, 0)
    other.show("a", "b", "v")
    other.write("b", "v", Op.DENSE, tick=6, values=np.ones(DIMENSIONS, np.float32))
    sparse(other, "v", 4, 0)  # a clock that steps back
    assert len(coalesced(rows_of(other.deltas))) == 3


def test_a_window_ends_after_its_time_or_when_it_is_full() -> None:
    world = World()
    rows = rows_of([sparse(world, "v", tick, 0) for tick in range(1, 7)])
    window = CoalesceWindow(20, entries_max=4)
    assert window.due_ms is window.due(0) is window.first_position is None
    window.add(rows.cut(0, 1), 100)
    window.add(rows.cut(1, 3), 110)
    assert (window.due_ms, window.first_position, window.due(119)) == (120, 1, None)
    found = window.due(120)
    assert found is not None
    assert (found.positions.tolist(), found.folded, window.entries) == ([3], 2, 0)
    window.add(rows.cut(2, 6), 200)
    assert len(window.due(200) or ()) == 1
    for bad in ({"ms": 0}, {"ms": 1, "entries_max": 0}):
        with pytest.raises(InvalidArgument):
            CoalesceWindow(**bad)
