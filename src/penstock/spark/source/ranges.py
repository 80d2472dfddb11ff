"""Ranges of a log: where a read begins and ends, on the node's word (`LogBounds`), and how it is
cut into what Spark's tasks get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from penstock.errors import InvalidArgument, NotFound
from penstock.model.topic import TopicKind
from penstock.spark.source.access import LogStatus, NodeAccess
from penstock.spark.source.offsets import Offsets, Wanted, chosen
from penstock.spark.source.options import Place, ReadOptions


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
    """The ranges with their size in the log."""
    by_topic: dict[str, list[ReadRange]] = {}
    for found in ranges:
        by_topic.setdefault(found.topic, []).append(found)
    rows: list[tuple[ReadRange, int]] = []
    for topic, group in by_topic.items():
        wanted = [Wanted(r.partition, r.first, r.last) for r in group]
        sizes = [extent.bytes for extent in access.extents(topic, wanted)]
        rows += zip(group, sizes, strict=True)
    return Ranges(tuple(rows))


class LogBounds:
    """The logs of a query's topics as they are now."""

    def __init__(self, access: NodeAccess, options: ReadOptions) -> None:
        self._access, self._options = access, options
        if options.mode == "deltas":
            _check_kinds(access, options.topics)
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


def _check_kinds(access: NodeAccess, topics: Sequence[str]) -> None:
    for topic in topics:
        if access.config(topic).kind is not TopicKind.DELTA:
            raise InvalidArgument(f"{topic} is no delta topic: read its messages", field="mode")


def _lost(topic: str, partition: int, *, sequence: int, first: int) -> NotFound:
    return NotFound(
        f"{topic}/{partition}: retention dropped the sequences {sequence} to {first - 1};"
        f" the first that can be read is {first} (failOnDataLoss=false goes on from there)",
        sequence_first=first,
    )
