import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.heap.index import CHUNK, PairBuffer, Pairs, merged_pairs, rank_in, sorted_pairs

keys = st.one_of(st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1))
pairs = st.lists(st.tuples(keys, st.integers(0, 1 << 48)), max_size=60)
some = settings(max_examples=60)


def columns(rows: list[tuple[int, int]]) -> Pairs:
    return Pairs(
        np.array([k for k, _ in rows], np.int64), np.array([s for _, s in rows], np.uint64)
    )


def rows(found: Pairs) -> list[tuple[int, int]]:
    return list(zip(found.keys.tolist(), found.sequences.tolist(), strict=True))


@some
@given(pairs)
def test_sorting_orders_and_keeps_each_pair_once(given_rows: list[tuple[int, int]]) -> None:
    assert rows(sorted_pairs(columns(given_rows))) == sorted(set(given_rows))


@some
@given(pairs, pairs)
def test_merging_is_sorting_both(old: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
    if old and new:
        merged = merged_pairs(sorted_pairs(columns(old)), sorted_pairs(columns(new)))
        assert rows(merged) == sorted(set(old + new))


@some
@given(pairs, st.tuples(keys, st.integers(0, 1 << 48)), st.booleans())
def test_rank_counts_what_comes_before(
    given_rows: list[tuple[int, int]], bound: tuple[int, int], inclusive: bool
) -> None:
    ordered = sorted(set(given_rows))
    expected = sum(row <= bound if inclusive else row < bound for row in ordered)
    assert rank_in(columns(ordered), bound, inclusive=inclusive) == expected


def test_sorting_leaves_its_input_alone() -> None:
    given_rows = columns([(3, 1), (1, 2), (2, 3)])
    sorted_pairs(given_rows)
    assert rows(given_rows) == [(3, 1), (1, 2), (2, 3)]


def test_a_buffer_gives_back_everything_in_order_of_arrival() -> None:
    buffer, expected = PairBuffer(), []
    for n in (1, CHUNK - 1, 3, 2 * CHUNK, 1, 100):
        chunk = columns([(len(expected) + i, len(expected) + i) for i in range(n)])
        expected += rows(chunk)
        if n == 1:
            buffer.add_one(*rows(chunk)[0])
        else:
            buffer.add(chunk)
    assert buffer.size == len(expected)
    assert rows(buffer.take()) == expected
    assert buffer.size == 0


def test_what_came_in_no_order_is_sorted_and_kept_once() -> None:
    buffer = PairBuffer()
    buffer.add_one(5, 9)
    buffer.add_one(5, 3)
    buffer.add(columns([(5, 9), (4, 8)]))
    assert rows(sorted_pairs(buffer.take())) == [(4, 8), (5, 3), (5, 9)]
