"""Work in executors, and tables that move between tasks.

A job is tasks that make tables (a fold, the scan of a piece of a sink), tasks that take them (a
comparison, a write), and between the two, where rows of many makers belong together, Spark's
shuffle. A table travels as a *parcel*: the number of the share that it belongs to, and its rows as
a stream of Arrow. The driver sees neither; what is collected are the answers of those who take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.spark.executors import causes

if TYPE_CHECKING:
    from pyspark import SparkContext

T = TypeVar("T")
Parcel = tuple[int, bytes]
Parcels = Any  # an RDD of them
SHARES_MAX: Final = 4096
GIVEN_MAX: Final = 1000  # parcels that the driver hands over at once


def parcel(table: pa.Table, share: int = 0) -> Parcel:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return share, sink.getvalue().to_pybytes()


def table_of(packed: Parcel) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(packed[1])).read_all()


def shared_out(table: pa.Table, owners: NDArray[np.int64]) -> Iterator[Parcel]:
    """The rows of a table in a parcel for each share that has some of them."""
    order = np.argsort(owners, kind="stable")
    ends = np.flatnonzero(np.diff(owners[order], append=-1)) + 1
    rows, start = table.take(pa.array(order)), 0
    for end in ends.tolist():
        yield parcel(rows.slice(start, end - start), int(owners[order[start]]))
        start = end


def shares_for(rows: int, *, each: int, least: int) -> int:
    """Into how many shares so many rows go, if one is to have about `each` of them."""
    return max(1, min(SHARES_MAX, max(least, -(-rows // each))))


class Tasks:
    """Jobs of one kind on one Spark."""

    def __init__(self, spark: Any, description: str) -> None:
        self.context: SparkContext = spark.sparkContext
        self._description = description

    @property
    def parallelism(self) -> int:
        return self.context.defaultParallelism

    def make(self, work: Callable[[T], Iterable[Any]], items: Sequence[T]) -> Parcels:
        """What `work` makes of each item, an item to a task; nothing runs yet."""
        return self.context.parallelize(items, max(1, len(items))).flatMap(work)

    def given(self, parcels: Iterable[Parcel]) -> Parcels:
        """Parcels that only the driver can make; a few are in its memory at a time."""
        found = [self.context.parallelize(some, 1) for some in _batched(parcels)]
        return self.context.union(found) if found else self.context.parallelize([], 1)

    def together(self, *parcels: Parcels) -> Parcels:
        return self.context.union(list(parcels))

    def by_share(self, parcels: Parcels, shares: int) -> Parcels:
        """The parcels of each share in one place."""
        return parcels.partitionBy(shares, _same)

    def answers(self, take: Callable[[Iterator[Any]], Iterator[T]], parcels: Parcels) -> list[T]:
        """What is said of each place's parcels. Raises the error that ended a task."""
        return self.collected(parcels.mapPartitions(take))

    def collected(self, answers: Any) -> list[Any]:
        self.context.setJobDescription(self._description)
        with causes():
            return list(answers.collect())

    def stream(self, parcels: Parcels) -> Iterator[Any]:
        """The parcels one after the other in the driver, for what can only be done there."""
        self.context.setJobDescription(self._description)
        with causes():
            yield from parcels.toLocalIterator()


def _batched(parcels: Iterable[Parcel]) -> Iterator[list[Parcel]]:
    rest = iter(parcels)
    while some := list(islice(rest, GIVEN_MAX)):
        yield some


def _same(share: int) -> int:
    return share
