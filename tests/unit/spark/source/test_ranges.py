"""Offsets of a query, and how much of several topics one trigger takes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.spark.source.access import RangeExtent, Wanted
from penstock.spark.source.ranges import (
    TriggerBudget,
    advance,
    chosen,
    from_json,
    share,
    to_json,
)

BATCH = 10  # sequences of every batch, of ten bytes each


def measure(_: str, wanted: Sequence[Wanted]) -> list[RangeExtent]:
    """A log in batches of ten: 1-10, 11-20 …"""
    found = []
    for w in wanted:
        last = w.first + BATCH - 1 - (w.first - 1) % BATCH
        while (
            last < w.last
            and (w.rows_max is None or last + BATCH - w.first < w.rows_max)
            and (w.bytes_max is None or (last + BATCH - w.first + 1) * 10 <= w.bytes_max)
        ):
            last += BATCH
        last = min(last, w.last)
        found.append(RangeExtent(last, (last - w.first + 1) * 10))
    return found


def rows(start: dict[str, dict[int, int]], end: dict[str, dict[int, int]]) -> dict[str, int]:
    return {t: sum(end[t][p] - n for p, n in start[t].items()) for t in start}


def test_offsets_are_written_in_one_order() -> None:
    offsets = {"b": {10: 7, 2: 5}, "a": {0: 1}}
    text = json.dumps(to_json(offsets, {"a": 3, "b": 4}))
    assert text == '{"a": {"id": 3, "0": 1}, "b": {"id": 4, "2": 5, "10": 7}}'
    assert from_json(json.loads(text)) == (offsets, {"a": 3, "b": 4})


def test_offsets_of_the_former_form_are_understood() -> None:
    assert from_json({"a": {"0": 1, "10": 7}}) == ({"a": {0: 1, 10: 7}}, {})


def test_without_a_bound_everything_is_taken() -> None:
    start, end = {"a": {0: 1, 1: 5}}, {"a": {0: 100, 1: 5}}
    assert (
        advance(start, end, topics=["a"], budget=TriggerBudget(None, None), measure=measure) == end
    )


def test_a_lower_topic_gets_what_the_higher_left() -> None:
    start = {"urgent": {0: 1}, "bulk": {0: 1, 1: 1}}
    end = {"urgent": {0: 31}, "bulk": {0: 1001, 1: 1001}}
    found = advance(
        start, end, topics=["urgent", "bulk"], budget=TriggerBudget(100, None), measure=measure
    )
    assert rows(start, found) == {"urgent": 30, "bulk": 60}


def test_a_spent_budget_leaves_lower_topics_alone() -> None:
    start, end = {"urgent": {0: 1}, "bulk": {0: 1}}, {"urgent": {0: 1001}, "bulk": {0: 1001}}
    found = advance(
        start, end, topics=["urgent", "bulk"], budget=TriggerBudget(40, None), measure=measure
    )
    assert rows(start, found) == {"urgent": 40, "bulk": 0}


def test_a_batch_larger_than_the_budget_is_taken_alone() -> None:
    start, end = {"a": {0: 1, 1: 1}}, {"a": {0: 101, 1: 201}}
    found = advance(start, end, topics=["a"], budget=TriggerBudget(2, None), measure=measure)
    assert found == {"a": {0: 1, 1: 11}}


def test_bytes_bound_as_rows_do() -> None:
    start, end = {"a": {0: 1, 1: 1}}, {"a": {0: 1001, 1: 1001}}
    found = advance(start, end, topics=["a"], budget=TriggerBudget(None, 800), measure=measure)
    assert rows(start, found) == {"a": 80}


@given(ends=st.lists(st.integers(1, 500), min_size=1, max_size=6), budget=st.integers(1, 300))
def test_triggers_reach_the_end_within_the_budget(ends: list[int], budget: int) -> None:
    at, end = {"a": dict.fromkeys(range(len(ends)), 1)}, {"a": dict(enumerate(ends))}
    for _ in range(10_000):
        found = advance(at, end, topics=["a"], budget=TriggerBudget(budget, None), measure=measure)
        if found == at:
            break
        moved = [p for p in at["a"] if found["a"][p] > at["a"][p]]
        assert rows(at, found)["a"] <= budget or len(moved) == 1
        at = found
    assert at == end


@given(available=st.lists(st.integers(0, 100), max_size=8), budget=st.integers(0, 500))
def test_a_share_is_fair_and_complete(available: list[int], budget: int) -> None:
    shares = share(available, budget)
    assert sum(shares) == min(sum(available), budget)
    assert all(0 <= s <= a for s, a in zip(shares, available, strict=True))
    wanting = [s for s, a in zip(shares, available, strict=True) if s < a]
    assert not wanting or max(shares) - min(wanting) <= len(available) or budget < len(available)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"b": {0: 1}}, "which is not read"),
        ({"a": {9: 1}}, "no partition 9"),
        ({"a": {0: 0}}, "at 1"),
    ],
)
def test_offsets_of_a_user_are_checked(given_: dict[str, dict[int, int]], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        chosen(given_, {"a": {0: 1, 1: 1}}, field="startingOffsets")
    assert refused.value.field == "startingOffsets"


def test_partitions_that_a_user_leaves_out_begin_at_the_bound() -> None:
    assert chosen({"a": {0: 7}}, {"a": {0: 1, 1: 3}}, field="x") == {"a": {0: 7, 1: 3}}
