from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.propagation.world import DIMENSIONS, Luck, World, batch_of, lucks

from penstock.errors import InvalidArgument
from penstock.model.delta import Op, PriorityClass
from penstock.propagation.flow.outbox import DeltaOutbox, bytes_of
from penstock.propagation.fold.releases import ReleasedRows

CRITICAL, HIGH, NORMAL, LOW = PriorityClass
PLENTY = 1 << 30


def rows_of(classes: list[int], *, vectors: str = "", first: int = 1) -> ReleasedRows:
    """A delta per class, of vectors of their own unless they are named."""
    world = World()
    deltas = [
        world.write(
            "a", vectors[i] if vectors else f"v{first + i}", Op.DELETE, tick=1,
            priority=PriorityClass(priority),
        )
        for i, priority in enumerate(classes)
    ]  # fmt: skip
    numbers = np.arange(first, first + len(classes), dtype=np.uint64)
    return ReleasedRows(batch_of(deltas, first), numbers, numbers)


def taken(outbox: DeltaOutbox, count: int, now_ms: float = 0) -> list[int]:
    rows = outbox.take(count, PLENTY)
    outbox.validate()
    return [] if rows is None else rows.ordinals.tolist()


@settings(max_examples=70)
@given(lucks, st.integers(1, 60), st.booleans())
def test_nothing_is_lost_nor_overtakes_within_a_vector(luck: Luck, size: int, few: bool) -> None:
    names = "vw" if few else "abcdefghijklmnop"
    classes = [luck.choice(list(PriorityClass)) for _ in range(size)]
    rows = rows_of(classes, vectors=luck.choices(names, k=size))
    outbox = DeltaOutbox(luck.randint(5, 80), luck.randint(400, 20_000), ageing_ms=10)
    outbox.held_slack = luck.choice((0, outbox.held_slack))
    at, now_ms, out = 0, 0.0, []
    while len(out) < size:
        now_ms += luck.choice((0, 0, 3, 25))
        part = rows.cut(at, at + luck.randint(1, 4))
        if len(part) and luck.maybe() and outbox.add(part, now_ms):
            at += len(part)
        outbox.validate()
        if luck.maybe() or at == size or outbox.entries > 2:
            found = outbox.take(luck.randint(1, 5), luck.choice((1, 300, 5000)))
            out += [] if found is None else list(zip(found.ordinals.tolist(),
                    found.batch.payloads, strict=True))  # fmt: skip
        waiting = set(range(1, at + 1)) - {ordinal for ordinal, _ in out}
        assert outbox.settled_position == (min(waiting) - 1 if waiting else at)
        assert outbox.entries == len(waiting)
    assert sorted(out) == list(zip(range(1, size + 1), rows.batch.payloads, strict=True))
    for name in set(names):
        own = [o for o, _ in out if rows.batch.names()[o - 1][1] == name.encode()]
        assert own == sorted(own)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.sampled_from(list(PriorityClass)), st.integers(0, 40)), max_size=30))
def test_lanes_age_as_the_rule_says(story: list[tuple[PriorityClass, int]]) -> None:
    outbox, now_ms, waiting = DeltaOutbox(1000, PLENTY, ageing_ms=20), 0, []
    for ordinal, (priority, pause_ms) in enumerate(story, 1):
        now_ms += pause_ms
        outbox.add(rows_of([priority], first=ordinal), now_ms)
        waiting.append((now_ms + 20 * priority, priority, ordinal))
    found = [taken(outbox, 1, now_ms)[0] for _ in story[1:]]
    assert found == [ordinal for *_, ordinal in sorted(waiting)[: len(found)]]


def test_what_is_taken_at_once_goes_as_it_was_added() -> None:
    outbox, rows = DeltaOutbox(10, PLENTY), rows_of([LOW, CRITICAL, NORMAL])
    assert outbox.add(rows, 5)
    assert (outbox.entries, outbox.bytes, outbox.oldest_ms) == (3, bytes_of(rows), 5)
    assert outbox.take(3, PLENTY) is rows
    assert (outbox.entries, outbox.oldest_ms, outbox.settled_position) == (0, None, 3)


def test_urgent_deltas_go_before_what_waits() -> None:
    outbox = DeltaOutbox(100, PLENTY)
    outbox.add(rows_of([LOW] * 5), 0)
    assert taken(outbox, 2) == [1, 2]
    outbox.add(rows_of([NORMAL, CRITICAL], first=6), 1)
    assert taken(outbox, 3) == [7, 6, 3]


def test_an_urgent_delta_takes_those_of_its_vector_along() -> None:
    outbox = DeltaOutbox(100, PLENTY)
    outbox.add(rows_of([LOW, LOW, NORMAL, LOW], vectors="xvvw"), 0)
    outbox.add(rows_of([CRITICAL], vectors="v", first=5), 1)
    outbox.add(rows_of([LOW], vectors="v", first=6), 2)
    assert taken(outbox, 3) == [2, 3, 5]
    assert taken(outbox, 1) == [1]
    outbox.add(rows_of([HIGH, HIGH], vectors="wu", first=7), 3)
    assert taken(outbox, 2) == [4, 7]
    assert taken(outbox, 9) == [6, 8]


def test_bounds_hold() -> None:
    one = rows_of([LOW])
    outbox = DeltaOutbox(3, 10 * bytes_of(one))
    assert not outbox.add(rows_of([LOW] * 4), 0)
    assert outbox.add(rows_of([LOW] * 3), 0)
    assert not outbox.add(rows_of([CRITICAL], first=4), 0)
    assert taken(outbox, 9) == [1, 2, 3]
    narrow = DeltaOutbox(100, 2 * bytes_of(one))
    assert narrow.add(rows_of([LOW] * 2), 0)
    assert not narrow.add(rows_of([LOW], first=3), 0)
    narrow.clear()
    assert narrow.entries == narrow.bytes == 0
    assert narrow.add(rows_of([LOW], first=3), 0)
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(InvalidArgument):
            DeltaOutbox(*bad)


def test_credit_bounds_what_is_taken() -> None:
    outbox, rows = DeltaOutbox(9, PLENTY), rows_of([LOW] * 4)
    outbox.add(rows, 0)
    assert outbox.take(0, PLENTY) is None
    assert outbox.take(1, 0) is None
    sizes: list[Any] = []
    for bytes_max in (1, bytes_of(rows) // 2, PLENTY):
        found = outbox.take(9, bytes_max)
        sizes.append(len(found or ()))
    assert sizes == [1, 2, 1]  # a first one goes even if it is larger


def test_a_few_rows_do_not_hold_on_to_large_buffers() -> None:
    world = World()
    values = np.zeros(DIMENSIONS, np.float32)
    deltas = [world.write("a", f"v{i}", Op.DENSE, tick=1, values=values) for i in range(3000)]
    numbers = np.arange(1, 3001, dtype=np.uint64)
    many = ReleasedRows(batch_of(deltas), numbers, numbers)
    outbox = DeltaOutbox(10_000, PLENTY)
    outbox.add(many.take(np.array([5])), 0)
    outbox.add(many.take(np.array([7])), 0)
    outbox.add(many.cut(8, 3000), 0)
    assert len(outbox.take(2900, PLENTY) or ()) == 2900
    outbox.validate()
    held = [chunk.rows.batch.blob for chunk in outbox._chunks]
    assert sum(map(len, held)) <= 3 * outbox.bytes
    assert taken(outbox, 9999) == list(range(2907, 3001))
