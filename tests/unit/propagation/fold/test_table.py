import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.propagation.fold import table
from penstock.propagation.fold.row_fold import KeyView
from penstock.propagation.fold.table import (
    KeyTable,
    Table,
    Texts,
    VectorNames,
    distinct,
    spread,
    stable_order,
)

few = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=40)


def halves(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, np.uint64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


@settings(max_examples=50)
@given(st.lists(few, max_size=5), few)
def test_keys_are_numbered_as_a_dictionary_would(batches: list, asked: list) -> None:
    keys, known = KeyTable({}), {}
    for pairs in batches:
        for pair, number in zip(pairs, keys.add(*halves(pairs)).tolist(), strict=True):
            assert known.setdefault(pair, number) == number
        keys.validate()
    assert sorted(known.values()) == list(range(len(keys)))
    assert keys.find(*halves(asked)).tolist() == [known.get(pair, -1) for pair in asked]


def test_keys_survive_growth_and_sweeping() -> None:
    keys = KeyTable({"x": np.int64})
    low = np.arange(50_000, dtype=np.uint64) * np.uint64(1 << 40)  # differ in high bits only
    rows = keys.add(low, low)
    keys.table["x"][rows] = np.arange(len(low))
    keys.keep(rows[::7])
    keys.validate()
    found = keys.find(low, low)
    assert (found[::7] == np.arange(len(keys))).all() and (found >= 0).sum() == len(keys)
    assert (keys.table["x"][found[::7]] == np.arange(0, 50_000, 7)).all()


def test_a_handful_of_keys_never_waits_for_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, place = [], table._place

    def counting(*args: Any, first: int, end: int, **how: Any) -> None:
        placed.append(end - first)
        place(*args, first=first, end=end, **how)

    monkeypatch.setattr(table, "_place", counting)
    keys = KeyTable({})
    for first in range(0, 50_000, 10):
        keys.reserve(10)
        one = KeyView(keys)
        for number in range(first, first + 10):
            assert one.find(number, number << 40) == -1
            assert one.put(number, number << 40) == number
    assert len(placed) > 100 and max(placed) <= table.PLACED_PER_KEY * table.STEP_KEYS
    keys.validate()


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_found_at_every_stage_of_growth(seed: int) -> None:
    dice, keys, known = random.Random(seed), KeyTable({}), dict[tuple[int, int], int]()
    for turn in range(60):
        pairs = [(dice.randrange(1 << 64), dice.randrange(9)) for _ in range(dice.choice((5, 300)))]
        pairs += dice.sample(list(known), min(len(known), 20))
        if dice.randrange(2):
            rows = keys.add(*halves(pairs)).tolist()
        else:
            keys.reserve(len(pairs))
            one, rows = KeyView(keys), []
            for pair in pairs:
                row = one.find(*pair)
                rows.append(row if row >= 0 else one.put(*pair))
        for pair, row in zip(pairs, rows, strict=True):
            assert known.setdefault(pair, row) == row
        if turn == 40:
            keys.keep(np.arange(0, len(keys), 2))
            known = {pair: row // 2 for pair, row in known.items() if row % 2 == 0}
        keys.validate()
    assert keys.find(*halves(list(known))).tolist() == list(known.values())


def test_a_table_keeps_its_rows_when_it_grows() -> None:
    rows = Table({"a": np.int32, "b": (np.float32, 3)})
    for number in range(5):
        first = rows.extend(700)
        rows["a"][first : rows.count] = number
        rows["b"][first : rows.count, 1] = number
    assert rows.rows("a").tolist() == [n for n in range(5) for _ in range(700)]
    assert rows.rows("b")[:, 1].sum() == 7000 and not rows.rows("b")[:, 2].any()


@given(st.lists(st.integers(0, 5) | st.integers(1 << 61, 1 << 62)))
def test_stable_order_is_a_stable_argsort(keys: list[int]) -> None:
    found = stable_order(np.array(keys, np.int64))
    assert found.tolist() == np.argsort(np.array(keys), kind="stable").tolist()


texts = st.lists(st.binary(max_size=9), max_size=20)


@given(texts, texts, st.data())
def test_texts_are_picked_by_number(
    one: list[bytes], two: list[bytes], data: st.DataObject
) -> None:
    kept, everything = Texts(), one + two
    kept.extend(one)
    kept.extend(two)
    numbers = data.draw(st.lists(st.sampled_from(range(len(everything))))) if everything else []
    assert kept.take(np.array(numbers, np.int64)).tolist() == [everything[n] for n in numbers]
    assert [kept[n] for n in range(len(kept))] == everything
    assert kept.arena.joined().tobytes() == b"".join(everything)


def test_the_arena_grows() -> None:
    kept = Texts()
    for i in range(20):
        kept.extend([bytes([i]) * 10_000])
    assert kept[19] == bytes([19]) * 10_000 and kept[0] == bytes(10_000)


def test_namespaces_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "NAMESPACES_SMALL", 3)
    names = VectorNames()
    for number in range(9):
        names.extend([b"n%d" % (number % 5)] * 2, [b"a%d" % number, b"b%d" % number])
    names.add(b"n4", b"c")
    assert names.table["namespace"].dtype == np.uint32 and len(names.namespaces) == 5
    some = np.array([18, 0, 3])
    assert names.namespaces_of(some).tolist() == [b"n4", b"n0", b"n1"]
    assert names.ids_of(some).tolist() == [b"c", b"a0", b"b1"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3))), st.booleans())
def test_rows_are_spread_by_their_counts(pairs: list[tuple[int, int]], equal: bool) -> None:
    column = np.array([value for value, _ in pairs], np.int64)
    counts = np.array([2 if equal else count for _, count in pairs], np.int64)
    found = spread(column, counts)
    found += 1  # it is the caller's own
    assert found.tolist() == (np.repeat(column, counts) + 1).tolist()


@pytest.mark.parametrize("column", [[], [3], [3, 1, 3, 2, 1]])
def test_distinct_numbers_ascend(column: list[int]) -> None:
    assert distinct(np.array(column, np.int64)).tolist() == sorted(set(column))
    assert spread(np.array(column, np.int64), np.ones(len(column), np.int64)).flags.writeable
