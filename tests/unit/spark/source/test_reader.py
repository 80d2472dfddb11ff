"""What of a query's conditions the reader takes on itself."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from penstock.spark.source.ranges import ReadRange
from penstock.spark.source.reader import push

COLUMNS = ("topic", "partition", "sequence", "time", "namespace", "value")
RANGES = [ReadRange("a", 0, 1, 100), ReadRange("a", 1, 1, 100), ReadRange("b", 0, 50, 200)]


def left(*filters: Filter) -> list[ReadRange]:
    selection, rest = push(filters, COLUMNS)
    assert rest == []
    return selection.ranges(RANGES)


@pytest.mark.parametrize(
    ("condition", "ranges"),
    [
        (EqualTo(("topic",), "b"), [RANGES[2]]),
        (In(("topic",), ("b", "c")), [RANGES[2]]),
        (EqualTo(("partition",), 1), [RANGES[1]]),
        (In(("partition",), (1, 2)), [RANGES[1]]),
        (GreaterThan(("partition",), 0), [RANGES[1]]),
        (GreaterThan(("sequence",), 100), [ReadRange("b", 0, 101, 200)]),
        (GreaterThanOrEqual(("sequence",), 150), [ReadRange("b", 0, 150, 200)]),
        (LessThan(("sequence",), 2), [ReadRange("a", 0, 1, 1), ReadRange("a", 1, 1, 1)]),
        (LessThanOrEqual(("sequence",), 0), []),
        (EqualTo(("sequence",), 150), [ReadRange("b", 0, 150, 150)]),
        (IsNotNull(("sequence",)), RANGES),
    ],
)
def test_a_condition_on_the_log_chooses_ranges(condition: Filter, ranges: list[ReadRange]) -> None:
    assert left(condition) == ranges


def test_conditions_add_up() -> None:
    found = left(
        EqualTo(("topic",), "a"),
        In(("partition",), (0, 1)),
        EqualTo(("partition",), 1),
        GreaterThan(("sequence",), 5),
        LessThan(("sequence",), 9),
    )
    assert found == [ReadRange("a", 1, 6, 8)]
    assert left(EqualTo(("topic",), "a"), EqualTo(("topic",), "b")) == []


@pytest.mark.parametrize(
    "condition",
    [
        EqualTo(("value",), b"x"),
        StringStartsWith(("topic",), "a"),
        Not(EqualTo(("topic",), "a")),
        IsNull(("topic",)),
        EqualTo(("topic", "part"), "a"),
        EqualTo(("topic",), None),
        GreaterThan(("topic",), "a"),
        In(("sequence",), (1, 2)),
        IsNotNull(("value",)),
    ],
)
def test_every_other_condition_stays_with_spark(condition: Filter) -> None:
    selection, rest = push([condition], COLUMNS)
    assert rest == [condition]
    assert selection.ranges(RANGES) == RANGES


def test_a_time_narrows_and_is_checked_again() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678_900, tzinfo=UTC)
    after, before = GreaterThan(("time",), at), LessThan(("time",), at)
    selection, rest = push([after, before], COLUMNS)
    assert rest == [after, before]
    milliseconds = int(at.timestamp() * 1000)
    assert selection.bounds["time"] == (milliseconds, milliseconds)


def test_namespaces_are_for_the_reader() -> None:
    selection, rest = push([In(("namespace",), ("x", "y")), EqualTo(("namespace",), "y")], COLUMNS)
    assert rest == [] and selection.among["namespace"] == {"y"}


def test_a_column_that_the_mode_does_not_have_is_not_ours() -> None:
    condition = EqualTo(("namespace",), "x")
    assert push([condition], ("topic", "value"))[1] == [condition]
