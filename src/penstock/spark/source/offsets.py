"""Offsets of a query, and how much of several topics one trigger takes.

An offset is, per topic and partition, the *next* sequence to read: ranges begin at one and end
before another. Spark keeps offsets as JSON text and compares the texts, so they are written in one
order: topics as the query names them, partitions ascending.

A trigger has a budget of rows, of bytes, or of both. Topics take from it in turn, the most urgent
first. Within a topic the budget is shared evenly; what a partition does not need goes to the
others. Ranges are whole batches: the first range taken may exceed the budget by part of a batch,
since otherwise a batch larger than the budget would stop the query; none that is taken after it
may. The partition that is furthest behind comes first, so none is left behind for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import InvalidArgument

Offsets = dict[str, dict[int, int]]


class Wanted(NamedTuple):
    """A range of a partition, and how much of it would be welcome."""

    partition: int
    first: int
    last: int
    rows_max: int | None = None
    bytes_max: int | None = None


class RangeExtent(NamedTuple):
    """How far whole batches reach within a wanted range."""

    last: int
    bytes: int


Measure = Callable[[str, Sequence[Wanted]], Sequence[RangeExtent]]


def to_json(offsets: Offsets, topics: Sequence[str]) -> dict[str, dict[str, int]]:
    """Offsets as Spark keeps them."""
    return {t: {str(p): n for p, n in sorted(offsets.get(t, {}).items())} for t in topics}


def from_json(data: Mapping[str, Mapping[str, Any]]) -> Offsets:
    return {t: {int(p): int(n) for p, n in found.items()} for t, found in data.items()}


def chosen(given: Offsets, bounds: Offsets, *, field: str) -> Offsets:
    """A user's offsets; partitions that they leave out begin where `bounds` says."""
    for topic, partitions in given.items():
        if topic not in bounds:
            raise InvalidArgument(f"{field} names {topic}, which is not read", field=field)
        for partition, sequence in partitions.items():
            if partition not in bounds[topic]:
                raise InvalidArgument(
                    f"{field}: {topic} has no partition {partition}",
                    field=field,
                    limit=len(bounds[topic]) - 1,
                )
            if sequence < 1:
                raise InvalidArgument(f"{field}: sequences begin at 1", field=field, limit=1)
    return {t: bounds[t] | given.get(t, {}) for t in bounds}


def share(available: Sequence[int], budget: int) -> list[int]:
    """Split `budget` evenly over those who can use it; the rest goes to the largest."""
    shares = [0] * len(available)
    waiting = sorted(range(len(available)), key=lambda i: available[i])
    while waiting and budget > 0:
        each = max(1, budget // len(waiting))
        smallest = waiting[0]
        if available[smallest] <= each:
            taken = min(available[smallest], budget)
            shares[smallest] = taken
            budget -= taken
            waiting.pop(0)
            continue
        for i in reversed(waiting):
            shares[i] = min(each, budget)
            budget -= shares[i]
        if budget > 0:
            shares[waiting[-1]] += budget
        break
    return shares


class TriggerBudget:
    """What is left of a trigger's rows and bytes; None: no bound."""

    def __init__(self, rows: int | None, size: int | None) -> None:
        self.rows, self.bytes = rows, size
        self.touched = False

    @property
    def bounded(self) -> bool:
        return self.rows is not None or self.bytes is not None

    @property
    def spent(self) -> bool:
        return (self.rows is not None and self.rows <= 0) or (
            self.bytes is not None and self.bytes <= 0
        )

    def take(self, rows: int, size: int) -> bool:
        """Whether a range still fits; the first one always does."""
        over = (self.rows is not None and rows > self.rows) or (
            self.bytes is not None and size > self.bytes
        )
        if over and self.touched:
            return False
        self.touched = True
        if self.rows is not None:
            self.rows -= rows
        if self.bytes is not None:
            self.bytes -= size
        return True


def advance(
    start: Offsets, end: Offsets, *, topics: Sequence[str], budget: TriggerBudget, measure: Measure
) -> Offsets:
    """Where a trigger that begins at `start` ends: at most at `end`, within the budget."""
    found = {topic: dict(start[topic]) for topic in topics}
    for topic in topics:
        if budget.bounded and budget.spent:
            break
        behind = [p for p, n in found[topic].items() if n < end[topic].get(p, n)]
        if not budget.bounded:
            found[topic].update({p: end[topic][p] for p in behind})
        elif behind:
            moved = _advance_topic(
                topic, behind, start=found[topic], end=end[topic], budget=budget, measure=measure
            )
            found[topic].update(moved)
    return found


def _advance_topic(
    topic: str,
    behind: list[int],
    *,
    start: dict[int, int],
    end: dict[int, int],
    budget: TriggerBudget,
    measure: Measure,
) -> dict[int, int]:
    behind.sort(key=lambda p: start[p] - end[p])  # the furthest behind first
    available = [end[p] - start[p] for p in behind]
    rows = available if budget.rows is None else share(available, budget.rows)
    using = sum(n > 0 for n in rows)
    each = None if budget.bytes is None else max(1, budget.bytes // using)
    wanted = [
        Wanted(p, start[p], end[p] - 1, n, each) for p, n in zip(behind, rows, strict=True) if n > 0
    ]
    moved: dict[int, int] = {}
    for ask, extent in zip(wanted, measure(topic, wanted), strict=True):
        if budget.take(extent.last - ask.first + 1, extent.bytes):
            moved[ask.partition] = extent.last + 1
    return moved
