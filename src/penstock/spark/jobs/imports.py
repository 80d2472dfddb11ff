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
from penstock.spark.jobs.import_units import ImportedRows, ImportPlan, Named, Unit, read_rows
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
    """What an import remembers of itself."""

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
    config = node.access().delta_config(options.topic, field="topic")
    id = import_id(plan, options)
    # The last row's time is now: nothing is ahead of the clock, and order within is kept.
    time = (now_ms << 16) - len(plan.units) * UNIT_TIMES
    journal = ImportJournal.load(options.journal, id=id, time=time)
    skipped = sum(journal.done.values())
    todo = [unit for unit in plan.units if unit.number not in journal.done]
    done = _run(spark, _tasks(todo, node, options, journal, config.dimensions),
                _Follower(journal, options.journal, plan, progress))  # fmt: skip
    for one in done:
        if one.error is not None:
            raise from_wire(one.error)
    sent = sum(one.rows for one in done)
    return {
        "import": id,
        "topic": options.topic,
        "units": len(plan.units),
        "rows": sent + skipped,
        "sent": sent,
        "skipped": skipped,  # done before, by the journal
        "dimensions": config.dimensions,
    }


def import_id(plan: ImportPlan, options: ImportOptions) -> str:
    told = [plan.fingerprint, options.topic, options.salt, asdict(options.named)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([*told, int(options.priority)]))


def _tasks(
    todo: Sequence[Unit],
    node: Connecting,
    options: ImportOptions,
    journal: ImportJournal,
    dimensions: int,
) -> list[UnitTask]:
    return [
        UnitTask(
            node=node,
            topic=options.topic,
            dimensions=dimensions,
            import_id=journal.id,
            unit=unit,
            named=options.named,
            priority=options.priority,
            time=journal.time + unit.number * UNIT_TIMES,
        )
        for unit in todo
    ]


class _Follower:
    """Keeps the journal and the progress bar up with the tasks that have ended."""

    def __init__(
        self,
        journal: ImportJournal,
        folder: Path | None,
        plan: ImportPlan,
        progress: Progress | None,
    ) -> None:
        self.journal, self._folder, self._plan, self._progress = journal, folder, plan, progress

    def look(self, ended: dict[int, int]) -> None:
        if ended.items() - self.journal.done.items():
            self.journal.done |= ended
            self.journal.save(self._folder)
        if self._progress is not None:
            total = self._plan.rows
            rows = sum(self.journal.done.values())
            self._progress(rows if total else len(self.journal.done), total or self._units)

    @property
    def _units(self) -> int:
        return len(self._plan.units)


def _run(spark: Any, tasks: list[UnitTask], follower: _Follower) -> list[UnitDone]:
    """One Spark task per unit; the follower looks on from a thread of its own."""
    if not tasks:
        follower.look({})
        return []
    ended = spark.sparkContext.accumulator({}, _Ended())
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            follower.look(dict(ended.value))

    def work(task: UnitTask) -> UnitDone:
        found = import_unit(task)
        if found.error is None:
            ended.add({found.unit: found.rows})
        return found

    watcher = threading.Thread(target=watch, name="penstock-import", daemon=True)
    watcher.start()
    try:
        return list(spark.sparkContext.parallelize(tasks, len(tasks)).map(work).collect())
    finally:
        over.set()
        watcher.join()
        follower.look(dict(ended.value))


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
class UnitTask:
    node: Connecting
    topic: str
    dimensions: int
    import_id: str
    unit: Unit
    named: Named
    priority: PriorityClass
    time: int  # hybrid, of the first row; the others follow in order

    @property
    def producer(self) -> str:
        return f"import-{self.import_id}-{self.unit.number}"

    @property
    def origin(self) -> bytes:
        return f"i{self.import_id[:8]}.{self.unit.number:x}".encode()


@dataclass(frozen=True, kw_only=True)
class UnitDone:
    unit: int
    rows: int = 0
    error: dict[str, Any] | None = None


def import_unit(task: UnitTask) -> UnitDone:
    """Send a unit. An error of ours is part of the answer: Spark would try again and wrap it."""
    try:
        rows = read_rows(task.unit, task.named, dimensions=task.dimensions)
        _send(task, rows)
    except PenstockError as error:
        if error.retryable:
            raise
        return UnitDone(unit=task.unit.number, error=error.to_wire())
    return UnitDone(unit=task.unit.number, rows=len(rows))


def _send(task: UnitTask, rows: ImportedRows) -> None:
    """All rows of a unit, a namespace at a time."""
    ids = _delta_ids(task, len(rows))
    times = task.time + np.arange(len(rows), dtype=np.int64)
    spaces = np.array(rows.namespaces, object)
    writer = NodeTopicWriter(task.node.access)
    for namespace in dict.fromkeys(rows.namespaces):
        mine = np.flatnonzero(spaces == namespace)
        columns = DeltaColumns(
            vector_ids=[rows.vector_ids[row] for row in mine],
            values=rows.values[mine],
            namespace=namespace,
            op=Op.CREATE,
            priority=task.priority,
            source=Source.IMPORT,
            metadata=[rows.metadata[row] for row in mine],
        ).checked()
        names = Names.of(namespace, columns.vector_ids)
        causes = _causes(names, ids[mine], times[mine])
        every = np.arange(len(mine), dtype=np.int64)
        payloads = encode_columns(columns, names, causes, origin=task.origin, rows=every)
        items = Items(
            sequences=mine + 1,
            payloads=arrays.ragged(payloads.offsets, payloads.blob, pa.binary()),
            priorities=np.full(len(mine), int(task.priority), np.int64),
        )
        writer.append(task.topic, producer=task.producer, epoch=EPOCH, items=items, partition=0)


def _delta_ids(task: UnitTask, count: int) -> NDArray[np.uint8]:
    """An id per row: a hash of the import and the unit, and the row's number."""
    head = xxhash.xxh3_64_intdigest(f"{task.import_id}/{task.unit.number}".encode())
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
