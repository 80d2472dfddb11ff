"""Ranges of a log, as the planner cuts them and as Spark's tasks get them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from penstock.spark.source.access import NodeAccess
from penstock.spark.source.offsets import Offsets, Wanted


@dataclass(frozen=True)
class Range(InputPartition):
    """The sequences `[first, last]` of a partition: what one task reads."""

    topic: str
    partition: int
    first: int
    last: int


@dataclass(frozen=True)
class Ranges(InputPartition):
    """All ranges of a trigger, with their bytes: a task that only tells what is to be read."""

    rows: tuple[tuple[Range, int], ...]


def between(start: Offsets, end: Offsets) -> Iterator[Range]:
    """What lies between two offsets; a partition that is new in `end` from its beginning."""
    for topic, partitions in end.items():
        for partition, limit in partitions.items():
            first = start.get(topic, {}).get(partition, 1)
            if first < limit:
                yield Range(topic, partition, first, limit - 1)


def split(access: NodeAccess, ranges: Iterable[Range], rows: int) -> Iterator[Range]:
    """Ranges of about `rows` sequences each, cut between batches."""
    for whole in ranges:
        first = whole.first
        while whole.last - first >= rows:
            wanted = Wanted(whole.partition, first, whole.last, rows)
            (extent,) = access.extents(whole.topic, [wanted])
            yield Range(whole.topic, whole.partition, first, extent.last)
            first = extent.last + 1
        if first <= whole.last:
            yield Range(whole.topic, whole.partition, first, whole.last)


def measured(access: NodeAccess, ranges: Iterable[Range]) -> Ranges:
    """The ranges with their size in the log."""
    by_topic: dict[str, list[Range]] = {}
    for found in ranges:
        by_topic.setdefault(found.topic, []).append(found)
    rows: list[tuple[Range, int]] = []
    for topic, group in by_topic.items():
        wanted = [Wanted(r.partition, r.first, r.last) for r in group]
        sizes = [extent.bytes for extent in access.extents(topic, wanted)]
        rows += zip(group, sizes, strict=True)
    return Ranges(tuple(rows))
