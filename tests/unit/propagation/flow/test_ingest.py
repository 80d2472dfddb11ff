from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.propagation.world import Luck, lucks

from penstock.errors import InvalidArgument
from penstock.model.delta import PriorityClass
from penstock.propagation.flow.lanes import RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN, IngestQueue

CRITICAL, HIGH, NORMAL, LOW = PriorityClass


def offer(queue: IngestQueue[Any], item: Any, *, count: int, **more: Any) -> bool:
    """Put an item if it fits, as a node does."""
    if not queue.fits(count):
        return False
    queue.put(item, count=count, **more)
    return True


def offered(queue: IngestQueue[str], *items: tuple[str, int, int], now_ms: float = 0) -> list[bool]:
    return [
        offer(queue, item, priority=priority, count=count, now_ms=now_ms)
        for item, priority, count in items
    ]


@settings(max_examples=100)
@given(lucks, st.integers(1, 80))
def test_order_bound_and_depth_are_exact(luck: Luck, steps: int) -> None:
    queue: IngestQueue[int] = IngestQueue(20, 0.5, ageing_ms=10)
    waiting: list[tuple[float, int, int, int]] = []  # (due, class, number, count)
    now_ms, refused = 0.0, 0
    for number in range(steps):
        now_ms += luck.choice((0, 0, 4, 30))
        if luck.maybe(0.7):
            priority, count = luck.randrange(4), luck.choice((1, 3, 7, 25))
            fits = sum(row[3] for row in waiting) + count <= 20 or not waiting
            assert offer(queue, number, priority=priority, count=count, now_ms=now_ms) == fits
            refused += 0 if fits else count
            waiting += [(now_ms + 10 * priority, priority, number, count)] if fits else []
        else:
            count_max = luck.randint(1, 12)
            assert queue.take(count_max, now_ms) == taken_of(waiting, count_max)
        queue.validate()
        assert queue.depth <= 20 or len(waiting) == 1
        assert (queue.depth, queue.rejected) == (sum(row[3] for row in waiting), refused)


def taken_of(waiting: list[tuple[float, int, int, int]], count_max: int) -> list[int]:
    """The same by sorting all that waits."""
    found: list[int] = []
    waiting.sort()
    while waiting and (waiting[0][3] <= count_max or not found):
        *_, number, count = waiting.pop(0)
        found.append(number)
        count_max -= count
    return found


@settings(max_examples=60)
@given(lucks, st.integers(2, 40))
def test_items_with_a_key_in_common_stay_in_order(luck: Luck, size: int) -> None:
    queue: IngestQueue[int] = IngestQueue(1000, ageing_ms=10)
    keys = [set(luck.choices(b"abcdefgh", k=luck.randint(0, 3))) for _ in range(size)]
    now_ms, out = 0.0, []
    for number, own in enumerate(keys):
        now_ms += luck.choice((0, 1, 15))
        names = [bytes([key]) for key in own]
        offer(queue, number, priority=luck.randrange(4), count=luck.randint(1, 3), now_ms=now_ms,
                    keys=lambda names=names: names)  # fmt: skip
        queue.validate()
        if luck.maybe(0.3):
            out += queue.take(luck.randint(1, 6), now_ms)
    while queue.depth:
        out += queue.take(2, now_ms)
        queue.validate()
    assert sorted(out) == list(range(size))
    for at, later in enumerate(out):
        assert not [early for early in out[at:] if early < later and keys[early] & keys[later]]


def test_an_item_takes_along_only_what_it_must_not_overtake() -> None:
    queue: IngestQueue[str] = IngestQueue(1000)
    for item, keys in (("a", b"x"), ("b", b"xy"), ("c", b"z"), ("d", b"y"), ("e", b"u")):
        names = [bytes([key]) for key in keys]
        offer(queue, item, priority=LOW, count=1, now_ms=0, keys=lambda names=names: names)
    offer(queue, "urgent", priority=CRITICAL, count=1, now_ms=1, keys=lambda: [b"y"])
    assert queue.depth_by_class == [4, 0, 0, 2]
    assert queue.take(99, 1) == ["a", "b", "d", "urgent", "c", "e"]


def test_groups_share_the_bound_and_nothing_else() -> None:
    queue: IngestQueue[str] = IngestQueue(10)
    assert offer(queue, "a", priority=LOW, count=6, now_ms=0, group=1)
    assert offer(queue, "b", priority=CRITICAL, count=3, now_ms=0, group=2)
    assert not offer(queue, "c", priority=LOW, count=2, now_ms=0, group=2)
    assert queue.depths == {1: 6, 2: 3}
    assert queue.take(99, 0, group=1) == ["a"]
    assert queue.take(99, 0, group=1) == []
    assert queue.remove(2) == ["b"]
    assert (queue.depth, queue.depths, queue.rejected) == (0, {}, 2)
    queue.validate()


def test_an_urgent_item_is_taken_before_all_that_waits() -> None:
    queue: IngestQueue[str] = IngestQueue(100)
    offered(queue, ("low", LOW, 50), ("normal", NORMAL, 10), ("critical", CRITICAL, 1))
    assert queue.depth_by_class == [1, 0, 10, 50]
    assert queue.take(11, 1) == ["critical", "normal"]
    assert queue.take(1, 1) == ["low"]  # larger, but first
    assert queue.take(1, 1) == []


def test_what_does_not_fit_is_refused_as_a_whole() -> None:
    queue: IngestQueue[str] = IngestQueue(10)
    items = [("a", LOW, 6), ("b", CRITICAL, 5), ("c", LOW, 4)]
    assert offered(queue, *items) == [True, False, True]
    assert (queue.depth, queue.rejected) == (10, 5)
    assert queue.take(0, 0) == []
    assert queue.take(99, 0) == ["a", "c"]
    assert offered(queue, ("huge", LOW, 99)) == [True]  # alone in an empty queue


def test_the_mark_is_crossed_once_per_rise() -> None:
    queue: IngestQueue[str] = IngestQueue(10, 0.8)
    offered(queue, ("a", LOW, 7))
    assert not queue.high
    offered(queue, ("b", LOW, 1), ("c", LOW, 1))
    assert (queue.high, queue.crossings) == (True, 1)
    queue.take(7, 0)
    offered(queue, ("d", LOW, 8))
    assert (queue.high, queue.crossings) == (True, 2)


def test_who_is_refused_is_told_when_to_come_back() -> None:
    queue: IngestQueue[str] = IngestQueue(1000, 0.5)
    assert queue.retry_after_s(0) == RETRY_AFTER_S_MAX  # nothing ever drained
    for now_ms in range(0, 10_000, 10):
        offered(queue, ("a", LOW, 10), now_ms=now_ms)
        queue.take(10, now_ms)
    assert queue.drain_rate(9_990) == pytest.approx(1000, rel=0.01)
    assert queue.retry_after_s(9_990) == RETRY_AFTER_S_MIN
    offered(queue, ("b", LOW, 1000), now_ms=9_990)
    assert queue.retry_after_s(9_990) == pytest.approx(0.5, rel=0.01)
    assert queue.retry_after_s(12_000) > 2
    assert queue.retry_after_s(60_000) == RETRY_AFTER_S_MAX  # it stands still


def test_settings_and_items_have_bounds() -> None:
    for bad in ((0, 0.8), (1, 0), (1, 1.5)):
        with pytest.raises(InvalidArgument):
            IngestQueue(*bad)
    for priority, count in ((0, 0), (4, 1), (-1, 1)):
        with pytest.raises(InvalidArgument):
            IngestQueue[str]().put("a", priority=priority, count=count, now_ms=0)
