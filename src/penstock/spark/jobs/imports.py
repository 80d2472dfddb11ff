"""Vectors from files into a delta topic: each row becomes a CREATE, once, however often it is run.

An import has an id, made of its topic and its files as they are now. From the id follow, for a row
known by its unit and its place in it:

- the producer key under which it is sent, so that the node takes a row once;
- the delta id, so that the pipeline would take it once even if the node has forgotten the key;
- the origin, one per unit. A vector that a unit has twice gets two deltas, the second the child of
  the first. Two units are two writers that do not know each other: the later unit wins by time.

A journal in the cache folder remembers the import's time and the units that are done, so that an
interrupted import goes on where it stopped. Without it all is sent again, and nothing is written.

Each unit is read and sent by one task of Spark.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from pyspark.accumulators import AccumulatorParam

from penstock.client.delta.columns import Causes, DeltaColumns, Names, encode_columns
from penstock.errors import PenstockError, from_wire
from penstock.log.files import write_whole
from penstock.model.delta import Op, PriorityClass, Source
from penstock.sinks import arrays
from penstock.sinks.protocol import Items
from penstock.spark.jobs.import_units import ImportPlan, Named, Unit, read_rows
from penstock.spark.source.access import NodeTopicWriter
from penstock.spark.source.options import Connecting

POLL_S: Final = 0.25
UNIT_TIMES: Final = 1 << 20  # hybrid times that a unit has to itself: 16 ms
Progress = Callable[[float, float | None], None]


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    topic: str
    named: Named = field(default_factory=Named)
    priority: PriorityClass = PriorityClass.LOW
    journal: Path | None = None  # a folder; None: no journal
    salt: str = ""  # another one makes it another import of the same files


class ImportJournal(msgspec.Struct, kw_only=True):
    id: str
    time: int  # hybrid, of the first row
    done: dict[int, int] = {}  # unit → rows

    @staticmethod
    def load(folder: Path | None, *, id: str, time: int) -> ImportJournal:
        if folder is not None and (file := folder / f"{id}.json").exists():
            return msgspec.json.decode(file.read_bytes(), type=ImportJournal)
        return ImportJournal(id=id, time=time)

    def save(self, folder: Path | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / f"{self.id}.json", [msgspec.json.encode(self)])


def import_files(
    spark: Any,
    node: Connecting,
    plan: ImportPlan,
    options: ImportOptions,
    *,
    now_ms: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Send every unit that is not done yet; what became of it."""
    dimensions = node.access().delta_config(options.topic, field="topic").dimensions
    # The last row's time is now: nothing is ahead of the clock, and order within is kept.
    time = (now_ms << 16) - len(plan.units) * UNIT_TIMES
    told = [plan.fingerprint, options.topic, options.salt, asdict(options.named)]
    id = xxhash.xxh3_128_hexdigest(msgspec.json.encode([*told, int(options.priority)]))
    journal = ImportJournal.load(options.journal, id=id, time=time)
    skipped = sum(journal.done.values())
    job = ImportJob(
        node=node, options=options, dimensions=dimensions, id=journal.id, time=journal.time
    )

    def look(ended: dict[int, int]) -> None:
        if ended.items() - journal.done.items():
            journal.done |= ended
            journal.save(options.journal)
        if progress is not None:
            done = sum(journal.done.values()) if plan.rows else len(journal.done)
            progress(done, plan.rows or len(plan.units))

    look({})
    _run(spark, job, [unit for unit in plan.units if unit.number not in journal.done], look)
    rows = sum(journal.done.values())
    return {
        "import": journal.id,
        "topic": options.topic,
        "units": len(plan.units),
        "rows": rows,
        "sent": rows - skipped,
        "skipped": skipped,  # done before, by the journal
        "dimensions": dimensions,
    }


def _run(
    spark: Any, job: ImportJob, todo: Sequence[Unit], look: Callable[[dict[int, int]], None]
) -> None:
    """One Spark task per unit. Units that have ended are looked at from a thread of its own, so
    that the journal and the progress bar keep up with them."""
    if not todo:
        return
    ended = spark.sparkContext.accumulator({}, _Ended())
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            look(dict(ended.value))

    def work(unit: Unit) -> dict[str, Any] | None:
        # An error of ours is part of the answer: Spark would try again and wrap it.
        try:
            ended.add({unit.number: import_unit(job, unit)})
        except PenstockError as error:
            if error.retryable:
                raise
            return error.to_wire()
        return None

    watcher = threading.Thread(target=watch, name="penstock-import", daemon=True)
    watcher.start()
    try:
        errors = spark.sparkContext.parallelize(todo, len(todo)).map(work).collect()
    finally:
        over.set()
        watcher.join()
        look(dict(ended.value))
    for error in filter(None, errors):
        raise from_wire(error)


class _Ended(AccumulatorParam[dict[int, int]]):
    """Units that have ended, with their rows: each task adds its own when it succeeds."""

    def zero(self, value: dict[int, int]) -> dict[int, int]:
        return {}

    def addInPlace(  # noqa: N802 (Spark's name)
        self, value1: dict[int, int], value2: dict[int, int]
    ) -> dict[int, int]:
        return value1 | value2


EPOCH: Final = 1


@dataclass(frozen=True, kw_only=True)
class ImportJob:
    node: Connecting
    options: ImportOptions
    dimensions: int
    id: str
    time: int  # hybrid, of the first row of the first unit; the others follow in order


def import_unit(job: ImportJob, unit: Unit) -> int:
    """Send all rows of a unit, a namespace at a time; how many there were."""
    rows = read_rows(unit, job.options.named, dimensions=job.dimensions)
    ids = _delta_ids(job, unit, len(rows))
    times = job.time + unit.number * UNIT_TIMES + np.arange(len(rows), dtype=np.int64)
    spaces, priority = np.array(rows.namespaces, object), job.options.priority
    writer = NodeTopicWriter(job.node.access)
    for namespace in dict.fromkeys(rows.namespaces):
        mine = np.flatnonzero(spaces == namespace)
        columns = DeltaColumns(
            vector_ids=[rows.vector_ids[row] for row in mine],
            values=rows.values[mine],
            namespace=namespace,
            op=Op.CREATE,
            priority=priority,
            source=Source.IMPORT,
            metadata=[rows.metadata[row] for row in mine],
        ).checked()
        names = Names.of(namespace, columns.vector_ids)
        causes = _causes(names, ids[mine], times[mine])
        origin = f"i{job.id[:8]}.{unit.number:x}".encode()
        every = np.arange(len(mine), dtype=np.int64)
        payloads = encode_columns(columns, names, causes, origin=origin, rows=every)
        items = Items(
            sequences=mine + 1,
            payloads=arrays.ragged(payloads.offsets, payloads.blob, pa.binary()),
            priorities=np.full(len(mine), int(priority), np.int64),
        )
        producer = f"import-{job.id}-{unit.number}"
        writer.append(job.options.topic, producer=producer, epoch=EPOCH, items=items, partition=0)
    return len(rows)


def _delta_ids(job: ImportJob, unit: Unit, count: int) -> NDArray[np.uint8]:
    """An id per row: a hash of the import and the unit, and the row's number."""
    head = xxhash.xxh3_64_intdigest(f"{job.id}/{unit.number}".encode())
    ids = np.empty((count, 2), "<u8")
    ids[:, 0] = head
    ids[:, 1] = np.arange(1, count + 1)
    return ids.view(np.uint8).reshape(count, 16)


def _causes(names: Names, ids: NDArray[np.uint8], times: NDArray[np.int64]) -> Causes:
    """Rows of one vector follow each other: counters 1, 2, 3 …, each the parent of the next."""
    count = len(ids)
    keys = np.frombuffer(b"".join(names.digests), "<u8").reshape(count, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: rows of a vector stay in order
    begins = np.ones(count, np.bool_)
    begins[1:] = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    at = np.arange(count)
    counters = np.empty(count, np.uint64)
    counters[order] = at - np.maximum.accumulate(np.where(begins, at, 0)) + 1
    parents = np.zeros((count, 16), np.uint8)
    parents[order[~begins]] = ids[order[np.flatnonzero(~begins) - 1]]
    return Causes(delta_ids=ids, parents=parents, counters=counters, times=times)
