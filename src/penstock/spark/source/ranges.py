"""Ranges of a log: where a read begins and ends, on the node's word (`LogBounds`), how much of
several topics one trigger takes, and how it is cut into what Spark's tasks get.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition

from penstock.errors import InvalidArgument, NotFound
from penstock.model.topic import TopicKind
from penstock.spark.source.access import UNBOUNDED, LogStatus, NodeAccess, RangeExtent, Wanted
from penstock.spark.source.options import Place, ReadOptions

Offsets = dict[str, dict[int, int]]
Measure = Callable[[str, Sequence[Wanted]], Sequence[RangeExtent]]


@dataclass(frozen=True)
class ReadRange(InputPartition):
    """The sequences `[first, last]` of a partition: what one task reads."""

    topic: str
    partition: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} [{self.first}, {self.last}]"


@dataclass(frozen=True)
class Ranges(InputPartition):
    """All ranges of a trigger, with their bytes: a task that only tells what is to be read."""

    rows: tuple[tuple[ReadRange, int], ...]


def between(start: Offsets, end: Offsets) -> Iterator[ReadRange]:
    """What lies between two offsets; a partition that is new in `end` from its beginning."""
    for topic, partitions in end.items():
        for partition, limit in partitions.items():
            first = start.get(topic, {}).get(partition, 1)
            if first < limit:
                yield ReadRange(topic, partition, first, limit - 1)


def split(access: NodeAccess, ranges: Iterable[ReadRange], rows: int) -> Iterator[ReadRange]:
    """Ranges of about `rows` sequences each, cut between batches."""
    for whole in ranges:
        first = whole.first
        while whole.last - first >= rows:
            wanted = Wanted(whole.partition, first, whole.last, rows)
            (extent,) = access.extents(whole.topic, [wanted])
            yield ReadRange(whole.topic, whole.partition, first, extent.last)
            first = extent.last + 1
        if first <= whole.last:
            yield ReadRange(whole.topic, whole.partition, first, whole.last)


def measured(access: NodeAccess, ranges: Iterable[ReadRange]) -> Ranges:
    by_topic: dict[str, list[ReadRange]] = {}
    for found in ranges:
        by_topic.setdefault(found.topic, []).append(found)
    rows: list[tuple[ReadRange, int]] = []
    for topic, group in by_topic.items():
        wanted = [Wanted(r.partition, r.first, r.last) for r in group]
        sizes = [extent.bytes for extent in access.extents(topic, wanted)]
        rows += zip(group, sizes, strict=True)
    return Ranges(tuple(rows))


def planned(
    access: NodeAccess, ranges: Iterable[ReadRange], options: ReadOptions
) -> list[InputPartition]:
    if options.mode == "ranges":
        return [measured(access, ranges)]
    return list(split(access, ranges, options.split_rows))


class LogBounds:
    """The logs of a query's topics as they are now."""

    def __init__(self, access: NodeAccess, options: ReadOptions) -> None:
        self._access, self._options = access, options
        for topic in options.topics if options.mode == "deltas" else ():
            if access.config(topic).kind is not TopicKind.DELTA:
                raise InvalidArgument(f"{topic} is no delta topic: read its messages", field="mode")
        self.status: dict[str, list[LogStatus]] = {t: access.log_status(t) for t in options.topics}

    def earliest(self) -> Offsets:
        return {t: {s.partition: s.sequence_first for s in all_} for t, all_ in self.status.items()}

    def latest(self) -> Offsets:
        return {t: {s.partition: s.readable + 1 for s in all_} for t, all_ in self.status.items()}

    def start(self) -> Offsets:
        options = self._options
        if options.starting_ms is not None:
            return self._at(options.starting_ms)
        return self._place(options.starting, self.earliest(), field="startingOffsets")

    def end(self) -> Offsets:
        """Of a batch read; never beyond what is final."""
        options = self._options
        if options.ending_ms is not None:
            wanted = self._at(options.ending_ms)
        else:
            wanted = self._place(options.ending, self.latest(), field="endingOffsets")
        latest = self.latest()
        return {t: {p: min(n, latest[t][p]) for p, n in all_.items()} for t, all_ in wanted.items()}

    def held(self, start: Offsets) -> Offsets:
        """`start` for every partition there is, none before what the node still has.

        A partition that `start` does not know is new, and read from its beginning.
        """
        found = self.earliest()
        for topic, partitions in found.items():
            for partition, first in partitions.items():
                sequence = start.get(topic, {}).get(partition, first)
                if sequence < first and self._options.fail_on_data_loss:
                    raise _lost(topic, partition, sequence=sequence, first=first)
                partitions[partition] = max(sequence, first)
        return found

    def _place(self, place: Place, bounds: Offsets, *, field: str) -> Offsets:
        if place == "earliest":
            return self.earliest()
        if place == "latest":
            return self.latest()
        return chosen(place, bounds, field=field)

    def _at(self, time_ms: int) -> Offsets:
        find = self._access.find_time
        return {
            t: {s.partition: find(t, s.partition, time_ms) for s in all_}
            for t, all_ in self.status.items()
        }


def _lost(topic: str, partition: int, *, sequence: int, first: int) -> NotFound:
    return NotFound(
        f"{topic}/{partition}: retention dropped the sequences {sequence} to {first - 1};"
        f" the first that can be read is {first} (failOnDataLoss=false goes on from there)",
        sequence_first=first,
    )


def to_json(offsets: Offsets, topics: Sequence[str]) -> dict[str, dict[str, int]]:
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
    for left, i in zip(range(len(waiting), 0, -1), waiting, strict=True):
        shares[i] = min(available[i], budget // left)
        budget -= shares[i]
    return shares


class TriggerBudget:
    """What is left of a trigger's rows and bytes; None: no bound."""

    def __init__(self, rows: int | None, size: int | None) -> None:
        self.rows = UNBOUNDED if rows is None else rows
        self.bytes = UNBOUNDED if size is None else size
        self.bounded = rows is not None or size is not None
        self.touched = False

    @property
    def spent(self) -> bool:
        return self.rows <= 0 or self.bytes <= 0

    def take(self, rows: int, size: int) -> bool:
        """Whether a range still fits; the first one always does."""
        if self.touched and (rows > self.rows or size > self.bytes):
            return False
        self.touched = True
        self.rows -= rows
        self.bytes -= size
        return True


def advance(
    start: Offsets, end: Offsets, *, topics: Sequence[str], budget: TriggerBudget, measure: Measure
) -> Offsets:
    """Where a trigger that begins at `start` ends: at most at `end`, within the budget."""
    found = {topic: dict(start[topic]) for topic in topics}
    for topic in topics:
        if budget.spent:
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
    rows = share(available, budget.rows)
    each = max(1, budget.bytes // sum(n > 0 for n in rows))
    wanted = [
        Wanted(p, start[p], end[p] - 1, n, each) for p, n in zip(behind, rows, strict=True) if n > 0
    ]
    moved: dict[int, int] = {}
    for ask, extent in zip(wanted, measure(topic, wanted), strict=True):
        if budget.take(extent.last - ask.first + 1, extent.bytes):
            moved[ask.partition] = extent.last + 1
    return moved
