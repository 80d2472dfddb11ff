"""What waits in the change log, in numbers; and which triggers make the next write."""

from pathlib import Path

import pytest
from tests.unit.spark.delivery.delivering import Triggers

from penstock.spark.delivery.backlog import (
    DELTAS,
    QUARANTINE,
    STATES,
    Backlog,
    Planner,
    SinkCursor,
    TriggerSpan,
)
from penstock.spark.settings import DeliveryOptions

BIG = 1 << 40


@pytest.fixture
def triggers(tmp_path: Path) -> Triggers:
    found = Triggers(tmp_path)
    found.commit(("a", 1, 0), ("b", 1, 3), log_time_ms=1000)
    found.commit(log_time_ms=2000)
    found.commit(("a", 2, 3), quarantine=["x"], log_time_ms=3000)
    found.commit(("c", 1, 0), ("d", 1, 0), ("e", 1, 0), log_time_ms=4000)
    return found


def test_the_lag_counts_rows_bytes_and_the_oldest_time(triggers: Triggers) -> None:
    backlog = Backlog(triggers.log)
    assert backlog.follow() == 3
    whole = backlog.lag(dict.fromkeys(STATES, -1))
    assert (whole.triggers, whole.rows, whole.oldest_ms) == (4, 6, 1000)
    assert 0 < whole.bytes < backlog.bytes_after(-1)
    assert backlog.lag({3: 1})[:2] == (2, 1)
    assert backlog.lag({DELTAS: 1}).oldest_ms == 3000
    assert backlog.lag({QUARANTINE: 2}).rows == 0
    assert backlog.lag(dict.fromkeys(STATES, 3)) == (0, 0, 0, None)


@pytest.mark.parametrize(
    ("position", "columns", "rows_max", "expected"),
    [
        (-1, STATES, BIG, TriggerSpan(0, 3)),
        (-1, STATES, 3, TriggerSpan(0, 2)),
        (-1, STATES, 1, TriggerSpan(0, 0)),  # one trigger at least
        (0, STATES, 2, TriggerSpan(2, 2)),  # begins and ends with rows
        (-1, (3,), BIG, TriggerSpan(0, 2)),
        (0, (0,), BIG, TriggerSpan(3, 3)),
        (2, (QUARANTINE,), BIG, None),
        (3, STATES, BIG, None),
    ],
)
def test_the_next_range_is_the_longest_within_the_bound(
    triggers: Triggers,
    position: int,
    columns: tuple[int, ...],
    rows_max: int,
    expected: TriggerSpan | None,
) -> None:
    backlog = Backlog(triggers.log)
    backlog.follow()
    found = backlog.ahead(position, columns, rows_max=rows_max, bytes_max=BIG)
    assert found == expected


def test_bytes_bound_a_range_too(triggers: Triggers) -> None:
    backlog = Backlog(triggers.log)
    backlog.follow()
    assert backlog.ahead(-1, STATES, rows_max=BIG, bytes_max=1) == TriggerSpan(0, 0)


def test_what_lies_before_a_cursor_is_counted_in_bytes(triggers: Triggers) -> None:
    backlog = Backlog(triggers.log)
    backlog.follow()
    sizes = [sum(p.bytes for p in triggers.log.manifest(n).parts) for n in range(4)]
    assert [backlog.bytes_after(n) for n in (-1, 1, 3)] == [sum(sizes), sum(sizes[2:]), 0]


def test_pruned_triggers_are_forgotten_and_the_rest_still_counts(triggers: Triggers) -> None:
    backlog = Backlog(triggers.log)
    backlog.follow()
    for revision in range(200):
        triggers.commit(("a", revision + 3))
    backlog.follow()
    triggers.log.prune(190)
    backlog.forget(190)
    assert backlog.follow() == 203
    assert backlog.lag(dict.fromkeys(STATES, 190))[:2] == (13, 13)
    late = Backlog(triggers.log)
    assert late.follow() == 203
    assert late.lag(dict.fromkeys(STATES, -1))[:2] == (13, 13)


def test_what_was_folded_is_counted_once_it_is_new(triggers: Triggers) -> None:
    backlog = Backlog(triggers.log)
    backlog.follow()
    triggers.commit(("z", 1))
    backlog.follow()
    (partition,) = backlog.partitions()
    assert partition == {"topic": "vectors", "partition": 0, "sequence": 500, "read": 1}


def planned(triggers: Triggers, cursor: SinkCursor, *, now_ms: int) -> list[int]:
    """The lanes in the order in which they are written."""
    options = DeliveryOptions(rows_together_max=1)
    planner = Planner(backlog=Backlog(triggers.log), columns=STATES, options=options, laned=True)
    found: list[int] = []
    while (plan := planner.plan(cursor, now_ms=now_ms)) is not None:
        found += plan.spans
        cursor = cursor.advanced(plan.moves)
    return found


def test_the_urgent_lane_goes_first_unless_another_has_waited_too_long(
    triggers: Triggers,
) -> None:
    triggers.commit(("late", 1, 3), log_time_ms=4000)
    start = SinkCursor.before(0, lanes=4)
    assert planned(triggers, start, now_ms=4001) == [0, 3]
    behind = SinkCursor(position=(2, 2, 2, -1))  # LOW waits since 1000, CRITICAL since 4000
    assert planned(triggers, behind, now_ms=4001) == [0, 3]
    triggers.commit(("now", 1, 0), log_time_ms=60_000)
    assert planned(triggers, SinkCursor(position=(4, 4, 4, -1)), now_ms=60_001) == [3, 0]
