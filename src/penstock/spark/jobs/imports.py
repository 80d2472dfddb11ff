"""Vectors from files into a delta topic: each row becomes a CREATE, once, however often it is run.

Files are cut into units of work, always the same way for the same files. A unit is a part of a file
that one task reads in one go: row groups of a Parquet file, a file of a Delta table at one version,
a stretch of a file with JSON lines (the lines that *begin* in it). Units are numbered over all
files; a row is known by its unit and its place in it. Every row of a unit is checked before one of
them is sent: a unit goes as a whole or not at all.

An import has an id, made of its topic and its files as they are now. From the id and its place
follow, for each row:

- the producer key under which it is sent, so that the node takes a row once;
- the delta id, so that the pipeline would take it once even if the node has forgotten the key;
- the origin, one per unit. A vector that a unit has twice gets two deltas, the second the child of
  the first. Two units are two writers that do not know each other: the later unit wins by time.

A journal in the cache folder remembers the import's time and the units that are done, so that an
interrupted import goes on where it stopped. Without it all is sent again, and nothing is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray
from pyspark.accumulators import Accumulator, AccumulatorParam

from penstock.client.delta.writer import Causes, DeltaColumns, Names, encode_columns
from penstock.errors import InvalidArgument, NotFound, PenstockError, from_wire
from penstock.log.files import write_whole
from penstock.model.delta import Op, PriorityClass, Source
from penstock.sinks import arrays
from penstock.sinks.protocol import Items
from penstock.spark.source.access import NodeTopicWriter
from penstock.spark.source.options import Connecting

Format = Literal["parquet", "delta", "jsonl"]
FORMATS: Final[tuple[str, ...]] = get_args(Format)
UNIT_ROWS: Final = 100_000  # of a Parquet unit, unless a row group is larger
UNIT_BYTES: Final = 32 << 20  # of a JSON unit
UNITS_MAX: Final = 1 << 16
_SUFFIXES: Final[dict[str, Format]] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
# Where a unit begins and ends, its rows if the file says so, and the version of a Delta table.
Span = tuple[int, int, int | None, int | None]
IDS: Final = ("vector_id", "id", "key")
VECTORS: Final = ("vector", "values", "embedding")
POLL_S: Final = 0.25
UNIT_TIMES: Final = 1 << 20  # hybrid times that a unit has to itself: 16 ms
Progress = Callable[[float, float | None], None]
EPOCH: Final = 1  # of the producers


@dataclass(frozen=True)
class Unit:
    """Part of a file. `first` to `last`: row groups, bytes, or the number of the table's file."""

    number: int
    format: Format
    path: str
    first: int
    last: int
    rows: int | None  # if the file says so
    version: int | None  # of a Delta table


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    units: tuple[Unit, ...]
    fingerprint: str  # of the files: their names, sizes and times

    @property
    def rows(self) -> int | None:
        known = [unit.rows for unit in self.units if unit.rows is not None]
        return sum(known) if len(known) == len(self.units) else None


def plan(paths: Sequence[Path], *, format: Format | None = None) -> ImportPlan:
    content = xxhash.xxh3_128()
    units: list[Unit] = []
    for path, kind in _files(paths, format):
        place, stat, version = str(path.absolute()), path.stat(), None
        for span in _SPANS[kind](path):
            units.append(Unit(len(units), kind, place, *span))
            version = units[-1].version
        seen = f"{place}\0{stat.st_size}\0{stat.st_mtime_ns}\0{version}\0"
        content.update(seen.encode())
    if not units:
        raise InvalidArgument("there is nothing to import", field="files")
    if len(units) > UNITS_MAX:
        raise InvalidArgument(
            f"the files make {len(units)} units, at most {UNITS_MAX}: import them in parts",
            field="files",
            limit=UNITS_MAX,
        )
    return ImportPlan(units=tuple(units), fingerprint=content.hexdigest())


def _files(paths: Sequence[Path], format: Format | None) -> Iterator[tuple[Path, Format]]:
    for path in paths:
        if not path.exists():
            raise NotFound(f"no file {path}", file=str(path))
        if path.is_file():
            yield path, format or _format_of(path)
        elif format == "delta" or (format is None and (path / "_delta_log").is_dir()):
            yield path, "delta"
        else:
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in _SUFFIXES)
            yield from ((file, format or _format_of(file)) for file in inside)


def _format_of(path: Path) -> Format:
    found = _SUFFIXES.get(path.suffix)
    if found is None:
        raise InvalidArgument(
            f"{path}: the name does not say what it is; give --format {'|'.join(FORMATS)}",
            field="format",
        )
    return found


def _parquet(path: Path) -> Iterator[Span]:
    try:
        metadata = pq.read_metadata(path)
    except pa.ArrowException as error:
        raise InvalidArgument(f"{path} is not a Parquet file: {error}", field="files") from error
    first = rows = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        if rows >= UNIT_ROWS or group == metadata.num_row_groups - 1:
            yield first, group, rows, None
            first, rows = group + 1, 0


def _delta(path: Path) -> Iterator[Span]:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        table = DeltaTable(str(path))
        fragments = list(table.to_pyarrow_dataset().get_fragments())
    except DeltaError as error:
        raise InvalidArgument(
            f"{path} cannot be read as a Delta table: {error}", field="files"
        ) from error
    for at, fragment in enumerate(fragments):
        yield at, at, fragment.count_rows(), table.version()


def _jsonl(path: Path) -> Iterator[Span]:
    size = path.stat().st_size
    for start in range(0, size, UNIT_BYTES):
        yield start, min(size, start + UNIT_BYTES) - 1, None, None


_SPANS: Final = {"parquet": _parquet, "delta": _delta, "jsonl": _jsonl}


@dataclass(frozen=True, kw_only=True)
class Named:
    """Which columns of the files mean what; None: the usual names."""

    vector_id: str | None = None
    vector: str | None = None
    namespace: str | None = None
    metadata: str | None = None
    namespace_default: str = "default"


@dataclass(frozen=True)
class ImportedRows:
    vector_ids: list[str]
    values: NDArray[np.float32]  # (rows, dimensions)
    namespaces: list[str]
    metadata: list[bytes]  # msgpack maps, empty: none

    def __len__(self) -> int:
        return len(self.vector_ids)


def read_rows(unit: Unit, named: Named, *, dimensions: int) -> ImportedRows:
    """All rows of a unit; `InvalidArgument` names the file, the row and the column."""
    columns = _json_columns(unit) if unit.format == "jsonl" else _arrow_columns(unit)
    ids_name = _column(columns, named.vector_id, IDS, unit)
    vector_name = _column(columns, named.vector, VECTORS, unit)
    ids = [_text(value, unit, row, ids_name) for row, value in enumerate(columns[ids_name])]
    values = _matrix(columns[vector_name], unit, name=vector_name, dimensions=dimensions)
    for name in filter(None, (named.namespace, named.metadata)):
        _column(columns, name, (), unit)
    absent, default = [None] * len(ids), named.namespace_default
    spaces = columns.get(named.namespace or "namespace", absent)
    described = columns.get(named.metadata or "metadata", absent)
    return ImportedRows(
        ids,
        values,
        [str(space) if space else default for space in spaces],
        [_metadata(value, unit, row) for row, value in enumerate(described)],
    )


def _arrow_columns(unit: Unit) -> dict[str, Any]:
    if unit.format == "parquet":
        groups = list(range(unit.first, unit.last + 1))
        table = pq.ParquetFile(unit.path).read_row_groups(groups)
    else:
        from deltalake import DeltaTable

        dataset = DeltaTable(unit.path, version=unit.version).to_pyarrow_dataset()
        fragment = list(dataset.get_fragments())[unit.first]
        table = fragment.to_table(schema=dataset.schema)
    return {name: _plain(table[name]) for name in table.column_names}


def _plain(column: Any) -> Any:
    """Vectors stay in Arrow; everything else is read value by value."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return column.combine_chunks()
    return column.to_pylist()


def _json_columns(unit: Unit) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for line in _lines(unit):
        try:
            rows.append(decode(line))
        except msgspec.DecodeError as error:
            raise _refused(f"not a JSON object: {error}", unit, len(rows), "line") from error
    names = {name for row in rows for name in row}
    return {name: [row.get(name) for row in rows] for name in sorted(names)}


def _lines(unit: Unit) -> Iterator[bytes]:
    """The lines that begin within the unit; empty ones are left out."""
    with Path(unit.path).open("rb") as file:
        file.seek(max(0, unit.first - 1))
        if unit.first:
            file.readline()  # the rest of a line that began before
        while file.tell() <= unit.last and (line := file.readline()):
            if line.strip():
                yield line


def _column(columns: dict[str, Any], given: str | None, usual: Sequence[str], unit: Unit) -> str:
    for name in (given,) if given else usual:
        if name in columns:
            return name
    wanted = given or " or ".join(usual)
    raise InvalidArgument(
        f"{unit.path} has no column {wanted}, only {', '.join(columns)}", field="columns"
    )


def _matrix(column: Any, unit: Unit, *, name: str, dimensions: int) -> NDArray[np.float32]:
    """One row per vector, all of them finite."""
    if isinstance(column, list):
        lengths = np.array([len(v) if isinstance(v, list) else -1 for v in column], np.int64)
    else:
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy().astype(np.int64)
    wrong = np.flatnonzero(lengths != dimensions)
    if len(wrong):
        row = int(wrong[0])
        told = f"{name} has {lengths[row]} components, the topic {dimensions}"
        raise _refused(told if lengths[row] >= 0 else f"{name} is no list", unit, row, name)
    flat = [x for v in column for x in v] if isinstance(column, list) else column.flatten()
    try:
        values = np.asarray(flat, np.float32).reshape(-1, dimensions)
    except (TypeError, ValueError) as error:
        raise _refused(f"{name} holds something that is no number", unit, None, name) from error
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise _refused(f"{name} holds a value that is not finite", unit, int(bad[0]), name)
    return values


def _text(value: Any, unit: Unit, row: int, name: str) -> str:
    if value is None or isinstance(value, bytes | float | dict | list) or value == "":
        raise _refused(f"{name} must be a text or an integer", unit, row, name)
    return str(value)


def _metadata(value: Any, unit: Unit, row: int) -> bytes:
    """Maps and structs, JSON text, or msgpack as it is."""
    if value is None:
        return b""
    try:
        if isinstance(value, bytes):
            msgspec.msgpack.decode(value, type=dict[str, Any])
            return value
        if isinstance(value, str):
            value = msgspec.json.decode(value, type=dict[str, Any])
        pairs = dict(value)
        return msgspec.msgpack.encode(pairs) if pairs else b""
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise _refused(f"metadata is not a map: {error}", unit, row, "metadata") from error


def _refused(what: str, unit: Unit, row: int | None, field: str) -> InvalidArgument:
    where = "" if row is None else f", row {row} of unit {unit.number}"
    return InvalidArgument(f"{unit.path}{where}: {what}", field=field, file=unit.path)


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
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Send every unit that is not done yet; what became of it."""
    dimensions = node.access().delta_config(options.topic, field="topic").dimensions
    # The last row's time is now: nothing is ahead of the clock, and order within is kept.
    time = (now_ms << 16) - len(plan.units) * UNIT_TIMES
    told = [plan.fingerprint, options.topic, options.salt, asdict(options.named)]
    id = xxhash.xxh3_128_hexdigest(msgspec.json.encode([*told, int(options.priority)]))
    journal = ImportJournal.load(options.journal, id=id, time=time)
    skipped = sum(journal.done.values())
    job = ImportJob(node=node, options=options, dimensions=dimensions, id=id, time=journal.time)

    def look(ended: dict[int, int]) -> None:
        if ended.items() - journal.done.items():
            journal.done |= ended
            journal.save(options.journal)
        done = sum(journal.done.values()) if plan.rows else len(journal.done)
        progress(done, plan.rows or len(plan.units))

    look({})
    _run(spark, job, [unit for unit in plan.units if unit.number not in journal.done], look)
    rows = sum(journal.done.values())
    return {
        "import": id,
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

    watcher = threading.Thread(target=watch, name="penstock-import", daemon=True)
    watcher.start()
    try:
        units = spark.sparkContext.parallelize(todo, len(todo))
        errors = units.map(partial(_refusal, job=job, ended=ended)).collect()
    finally:
        over.set()
        watcher.join()
        look(dict(ended.value))
    for error in filter(None, errors):
        raise from_wire(error)


def _refusal(
    unit: Unit, *, job: ImportJob, ended: Accumulator[dict[int, int]]
) -> dict[str, Any] | None:
    """Import a unit. An error of ours that would come again is the answer: Spark would try again
    and wrap it."""
    try:
        ended.add({unit.number: import_unit(job, unit)})
    except PenstockError as error:
        if error.retryable:
            raise
        return error.to_wire()
    return None


class _Ended(AccumulatorParam[dict[int, int]]):
    """Units that have ended, with their rows: each task adds its own when it succeeds."""

    def zero(self, value: dict[int, int]) -> dict[int, int]:
        return {}

    def addInPlace(  # noqa: N802 (Spark's name)
        self, value1: dict[int, int], value2: dict[int, int]
    ) -> dict[int, int]:
        return value1 | value2


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
    spaces, writer = np.array(rows.namespaces, object), NodeTopicWriter(job.node.access)
    for namespace in dict.fromkeys(rows.namespaces):
        mine = np.flatnonzero(spaces == namespace)
        columns = DeltaColumns(
            vector_ids=[rows.vector_ids[row] for row in mine],
            values=rows.values[mine],
            namespace=namespace,
            op=Op.CREATE,
            priority=job.options.priority,
            source=Source.IMPORT,
            metadata=[rows.metadata[row] for row in mine],
        ).checked()
        items = _items(job, unit, columns, mine, ids=ids[mine], times=times[mine])
        producer = f"import-{job.id}-{unit.number}"
        writer.append(job.options.topic, producer=producer, epoch=EPOCH, items=items, partition=0)
    return len(rows)


def _items(
    job: ImportJob,
    unit: Unit,
    columns: DeltaColumns,
    mine: NDArray[np.int64],
    *,
    ids: NDArray[np.uint8],
    times: NDArray[np.int64],
) -> Items:
    """The deltas of one namespace as messages, numbered by their place in the unit."""
    names = Names.of(columns.namespace, columns.vector_ids)
    causes = _causes(names, ids, times)
    origin = f"i{job.id[:8]}.{unit.number:x}".encode()
    every = np.arange(len(mine), dtype=np.int64)
    payloads = encode_columns(columns, names, causes, origin=origin, rows=every)
    return Items(
        sequences=mine + 1,
        payloads=arrays.ragged(payloads.offsets, payloads.blob, pa.binary()),
        priorities=np.full(len(mine), int(job.options.priority), np.int64),
    )


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
