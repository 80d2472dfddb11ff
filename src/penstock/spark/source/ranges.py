"""Ranges of a log: where a read begins and ends, on the node's word (`LogBounds`), how much of
several topics one trigger takes, and how it is cut into what Spark's tasks get.

An offset is, per topic and partition, the *next* sequence to read: ranges begin at one and end
before another. Spark keeps offsets as JSON text and compares the texts, so they are written in one
order: topics as the query names them, partitions ascending. The id of each topic stands beside its
partitions, for a topic that was deleted and made again counts its sequences anew. Offsets that were
written before ids were are taken for those of the topic that there is.

A trigger has a budget of rows, of bytes, or of both. Topics take from it in turn, the most urgent
first. Within a topic the budget is shared evenly; what a partition does not need goes to the
others. Ranges are whole batches: the first range taken may exceed the budget by part of a batch,
since otherwise a batch larger than the budget would stop the query; none that is taken after it
may. The partition that is furthest behind comes first, so none is left behind for good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter

from pyspark.sql.datasource import InputPartition

from penstock.errors import InvalidArgument, NotFound
from penstock.model.topic import TopicKind
from penstock.spark.source.access import UNBOUNDED, LogStatus, NodeAccess, RangeExtent, Wanted
from penstock.spark.source.options import FOLDED, Place, ReadOptions

Offsets = dict[str, dict[int, int]]
TopicIds = dict[str, int]
Json = dict[str, dict[str, int]]
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
class FoldRange(ReadRange):
    """The sequences of a partition that one task folds."""

    topic_id: int


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
    for rest in ranges:
        while rest.last - rest.first >= rows:
            wanted = Wanted(rest.partition, rest.first, rest.last, rows)
            (extent,) = access.extents(rest.topic, [wanted])
            yield replace(rest, last=extent.last)
            rest = replace(rest, first=extent.last + 1)
        if rest.first <= rest.last:
            yield rest


def measured(access: NodeAccess, ranges: Iterable[ReadRange]) -> Ranges:
    """`ranges` are those of one topic after the other."""
    rows: list[tuple[ReadRange, int]] = []
    for topic, group in groupby(ranges, key=attrgetter("topic")):
        found = list(group)
        wanted = [Wanted(r.partition, r.first, r.last) for r in found]
        rows += zip(found, (e.bytes for e in access.extents(topic, wanted)), strict=True)
    return Ranges(tuple(rows))


def planned(
    access: NodeAccess, ranges: Sequence[ReadRange], options: ReadOptions, *, ids: TopicIds
) -> list[InputPartition]:
    if options.mode == "ranges":
        return [measured(access, ranges)]
    if options.mode in FOLDED:  # what follows in a partition depends on what went before
        return [FoldRange(r.topic, r.partition, r.first, r.last, ids[r.topic]) for r in ranges]
    total = sum(found.last - found.first + 1 for found in ranges)
    even = max(1, -(-total // options.partitions_min))
    return list(split(access, ranges, min(options.split_rows, even)))


class LogBounds:
    """The logs of a query's topics as they are now."""

    def __init__(self, access: NodeAccess, options: ReadOptions) -> None:
        self._access, self._options = access, options
        topics: Sequence[str] = options.topics
        if options.pattern is not None:
            topics = list(filter(self._named, access.topics()))
        for topic in topics if options.mode in (*FOLDED, "deltas") else ():
            if access.config(topic).kind is not TopicKind.DELTA:
                raise InvalidArgument(f"{topic} is no delta topic: read its messages", field="mode")
        self.status: dict[str, list[LogStatus]] = {t: self._assigned(t) for t in topics}
        self.ids: TopicIds = {t: all_[0].topic_id for t, all_ in self.status.items()}

    def _named(self, topic: str) -> bool:
        return re.fullmatch(self._options.pattern or "", topic) is not None

    def _assigned(self, topic: str) -> list[LogStatus]:
        found = {status.partition: status for status in self._access.log_status(topic)}
        wanted = self._options.assigned.get(topic, found)
        for partition in wanted:
            if partition not in found:
                raise InvalidArgument(f"{topic} has no partition {partition}", field="assign")
        return [status for partition, status in found.items() if partition in wanted]

    def earliest(self) -> Offsets:
        return {t: {s.partition: s.sequence_first for s in all_} for t, all_ in self.status.items()}

    def latest(self) -> Offsets:
        return {t: {s.partition: s.readable + 1 for s in all_} for t, all_ in self.status.items()}

    def start(self) -> Offsets:
        options, earliest = self._options, self.earliest()
        return self._place(options.starting, options.starting_ms, earliest, "startingOffsets")

    def end(self) -> Offsets:
        """Of a batch read; never beyond what is final."""
        options, latest = self._options, self.latest()
        wanted = self._place(options.ending, options.ending_ms, latest, "endingOffsets")
        return {t: {p: min(n, latest[t][p]) for p, n in all_.items()} for t, all_ in wanted.items()}

    def held(self, start: Offsets, ids: TopicIds | None = None) -> Offsets:
        """`start` for every partition there is, none before what the node still has.

        A partition that `start` does not know is new, and read from its beginning.
        """
        found, start = self.earliest(), self.still(start, ids or {})
        for topic, partitions in found.items():
            for partition, first in partitions.items():
                sequence = start.get(topic, {}).get(partition, first)
                if sequence < first and self._options.fail_on_data_loss:
                    raise _lost(topic, partition, sequence=sequence, first=first)
                partitions[partition] = max(sequence, first)
        return found

    def still(self, offsets: Offsets, ids: TopicIds) -> Offsets:
        """`offsets` without those of topics that were deleted since; some were made again."""
        deleted = [
            t for t, id_ in ids.items() if self.ids.get(t, 0 if self._named(t) else id_) != id_
        ]
        if deleted and self._options.fail_on_data_loss:
            again = " and made again" if deleted[0] in self.ids else ""
            raise NotFound(
                f"{deleted[0]} was deleted{again}, so what it held before cannot be read any more"
                " (failOnDataLoss=false goes on, and reads a new topic from its beginning)"
            )
        return {t: found for t, found in offsets.items() if t not in deleted}

    def _place(
        self, place: Place, time_ms: int | Offsets | None, bounds: Offsets, field: str
    ) -> Offsets:
        """The offsets of a time, if there is one, else of a place; `bounds` where it has none."""
        find, times = self._access.find_time, time_ms
        if isinstance(times, int):
            times = {t: dict.fromkeys(all_, times) for t, all_ in bounds.items()}
        if times is not None:
            place = {t: {p: find(t, p, ms) for p, ms in all_.items()} for t, all_ in times.items()}
        if isinstance(place, dict):
            return chosen(place, bounds, field=field)
        return self.earliest() if place == "earliest" else self.latest()


def _lost(topic: str, partition: int, *, sequence: int, first: int) -> NotFound:
    return NotFound(
        f"{topic}/{partition}: retention dropped the sequences {sequence} to {first - 1};"
        f" the first that can be read is {first} (failOnDataLoss=false goes on from there)",
        sequence_first=first,
    )


def to_json(offsets: Offsets, ids: TopicIds) -> Json:
    return {
        t: {"id": id_} | {str(p): n for p, n in sorted(offsets[t].items())}
        for t, id_ in ids.items()
    }


def from_json(data: Json) -> tuple[Offsets, TopicIds]:
    offsets = {t: {int(p): n for p, n in found.items() if p != "id"} for t, found in data.items()}
    return offsets, {t: found["id"] for t, found in data.items() if "id" in found}


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
        self,
        start: dict[int, int],
        end: dict[int, int],
        behind: list[int],
        measure: Callable[[Sequence[Wanted]], Sequence[RangeExtent]],
    ) -> dict[int, int]:
        """How far the partitions of a topic that are `behind` move."""
        behind.sort(key=lambda p: start[p] - end[p])  # the furthest behind first
        rows = share([end[p] - start[p] for p in behind], self.rows)
        each = max(1, self.bytes // sum(n > 0 for n in rows))
        shares = zip(behind, rows, strict=True)
        wanted = [Wanted(p, start[p], end[p] - 1, n, each) for p, n in shares if n > 0]
        moved: dict[int, int] = {}
        for ask, extent in zip(wanted, measure(wanted), strict=True):
            if self.take(extent.last - ask.first + 1, extent.bytes):
                moved[ask.partition] = extent.last + 1
        return moved


def advance(
    start: Offsets, end: Offsets, *, topics: Sequence[str], budget: TriggerBudget, measure: Measure
) -> Offsets:
    """Where a trigger that begins at `start` ends: at most at `end`, within the budget."""
    found = {topic: dict(start[topic]) for topic in topics}
    for topic in topics:
        at, goal = found[topic], end[topic]
        behind = [p for p, n in at.items() if n < goal.get(p, n)]
        if not budget.bounded:
            at.update({p: goal[p] for p in behind})
        elif behind and not budget.spent:
            at.update(budget.advance(at, goal, behind, partial(measure, topic)))
    return found
