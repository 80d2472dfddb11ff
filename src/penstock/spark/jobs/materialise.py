"""The vectors as they were at a moment of the log, as Parquet files or a Delta table.

Every partition is folded by a task, up to the last batch written at or before the moment, and
written by that task: files of the living vectors, in the output's folder or object store. So for
the log's end it gives what the pipeline's lake holds, and the same log gives the same vectors.
Where the log no longer reaches back they are read from that lake.

The output is whole or not there. A folder is made under another name and renamed at the end. An
object store has no rename: there a Delta table appears with its one transaction, and of Parquet
files those count that `_SUCCESS` names, which is written last; whatever else is there, of an output
that is overwritten or of a task that was run again, goes after that.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import AlreadyExists
from penstock.propagation.options import PropagationOptions
from penstock.sinks.files import local_path, object_store
from penstock.sinks.lake import VECTORS, LakeFile, LakeTable, delta_errors, vectors_of
from penstock.sinks.protocol import Feed
from penstock.spark.jobs.lake_fold import fold_of, planned_with_lake
from penstock.spark.jobs.log_fold import (
    FoldOrder,
    FoldReport,
    PlannedFold,
    fold_tasks,
    log_ranges,
    reject_lost,
)
from penstock.spark.jobs.stores import order_of, read_progress, with_snapshots
from penstock.spark.jobs.tasks import Tasks
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import FoldRange

Format = Literal["parquet", "delta"]
FILE_ROWS: Final = 200_000
LAKE_WAIT_S: Final = 10.0  # for a lake to come to the newest trigger
SUCCESS: Final = "_SUCCESS"
# `lane` says how urgent the last trigger's changes were: nothing that a vector has.
COLUMNS: Final = [name for name in VECTORS.names if name not in ("deleted", "lane")]
SCHEMA: Final = pa.schema([VECTORS.field(name) for name in COLUMNS])


class VectorsOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Where tasks write to."""

    uri: str
    storage: dict[str, str] = {}

    def table(self) -> LakeTable:
        parent, _, name = self.uri.rpartition("/")
        storage = self.storage or None
        return LakeTable(parent, name, SCHEMA, storage=storage, compression="zstd")


# --- in the task ---


def write_vectors(
    order: FoldOrder, output: VectorsOutput, task: PlannedFold
) -> Iterator[tuple[FoldReport, list[LakeFile]]]:
    """One task: the living vectors of one log partition."""
    fold, table = fold_of(order, task), output.table()
    fold.drain()
    fold.reject_damage()
    files, held = list[LakeFile](), list[pa.Table]()
    for states in fold.states():
        held.append(_living(states))
        if sum(one.num_rows for one in held) >= FILE_ROWS:
            files += _written(table, held)
            held = []
    files += _written(table, held)
    yield fold.report(), files


def _written(table: LakeTable, held: Sequence[pa.Table]) -> list[LakeFile]:
    file = table.write(pa.concat_tables(held)) if held else None
    return [] if file is None else [file]


def _living(states: pa.Table) -> pa.Table:
    return vectors_of(states.filter(pc.invert(states["deleted"]))).select(COLUMNS)


# --- in the driver ---


def materialise(
    spark: Any,
    node: Connecting,
    topics: Sequence[str],
    output: str | Path,
    *,
    at_ms: int | None = None,
    format: Format = "parquet",
    options: PropagationOptions | None = None,
    overwrite: bool = False,
    pipeline: PipelineSettings | None = None,
) -> dict[str, Any]:
    """Write the living vectors as of `at_ms` (None: now) to `output`, whole or not at all. A
    pipeline says how it folds, where its snapshots are, and how an object store is reached."""
    ranges = log_ranges(node, topics, until_ms=at_ms)
    tasks = Tasks(spark, f"materialise {', '.join(topics)}")
    place = _place(str(output).rstrip("/"), {} if pipeline is None else pipeline.storage)

    def written(filled: VectorsOutput) -> list[tuple[FoldReport, list[LakeFile]]]:
        if pipeline is None:
            order = FoldOrder(node=node, options=options or PropagationOptions())
            planned = fold_tasks(ranges, {}, use="always")
            reject_lost(planned)
        else:
            order, planned = _planned(node, pipeline, ranges)
        return tasks.collected(tasks.make(partial(write_vectors, order, filled), planned))

    with place.filling(overwrite=overwrite) as filled:
        found = with_snapshots(partial(written, filled))
        files = [file for _, some in found for file in some]
        place.finish(filled, files, format=format)
    return {
        "path": str(output),
        "format": format,
        "vectors": sum(map(_rows, files)),
        "at_ms": at_ms,
        "partitions": [_partition(report) for report, _ in found],
    }


def _planned(
    node: Connecting, pipeline: PipelineSettings, ranges: Sequence[FoldRange]
) -> tuple[FoldOrder, list[PlannedFold]]:
    """What is folded as the pipeline does, from its snapshots or its lake where the log is lost."""
    progress = read_progress(pipeline.store.open(), ())
    planned, lake = planned_with_lake(
        fold_tasks(ranges, progress.heads, use="always"),
        pipeline,
        progress,
        feed=Feed.STATES,
        wait_s=LAKE_WAIT_S,
    )
    return msgspec.structs.replace(order_of(pipeline), node=node, lake=lake), planned


def _partition(report: FoldReport) -> dict[str, Any]:
    place = {"topic": report.topic, "partition": report.partition, "last": report.last}
    return place | {"from": report.origin} | report.counts


def _rows(file: LakeFile) -> int:
    return int(msgspec.json.decode(file.statistics)["numRecords"])


def _make_table(output: VectorsOutput, files: Sequence[LakeFile]) -> None:
    """A Delta table of files that are there, in one transaction; it replaces what there was."""
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction

    now_ms = time.time_ns() // 1_000_000
    adds = [AddAction(f.path, f.bytes, {}, now_ms, True, f.statistics) for f in files]
    with delta_errors(output.uri):
        table = DeltaTable.create(
            output.uri, SCHEMA, mode="ignore", storage_options=output.storage or None
        )
        table.create_write_transaction(list(adds), "overwrite", SCHEMA)


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    @contextmanager
    def filling(self, *, overwrite: bool) -> Iterator[VectorsOutput]:
        _reject_present(self._path.exists() and not overwrite, str(self._path))
        own = self._path.parent / f".job-{uuid.uuid4().hex}"
        own.mkdir(parents=True)
        try:
            yield VectorsOutput(uri=str(own))
        finally:
            shutil.rmtree(own, ignore_errors=True)  # it has another name if all went well

    def finish(self, made: VectorsOutput, files: Sequence[LakeFile], *, format: Format) -> None:
        named = {file.path for file in files}
        for stray in Path(made.uri).iterdir():  # of a task that was run again
            if stray.name not in named:
                stray.unlink()
        if format == "delta":
            _make_table(made, files)
        if self._path.exists():
            shutil.rmtree(self._path)
        Path(made.uri).rename(self._path)


class _Objects:
    def __init__(self, uri: str, storage: Mapping[str, str]) -> None:
        self._output = VectorsOutput(uri=uri, storage=dict(storage))
        self._store = object_store(uri, storage, field="output")

    @contextmanager
    def filling(self, *, overwrite: bool) -> Iterator[VectorsOutput]:
        _reject_present(not overwrite and bool(self._names()), self._output.uri)
        yield self._output

    def finish(self, made: VectorsOutput, files: Sequence[LakeFile], *, format: Format) -> None:
        if format == "delta":
            _make_table(made, files)
            return
        names = [file.path for file in files]
        told = {"files": names, "vectors": sum(map(_rows, files))}
        with delta_errors(made.uri):
            self._store.put(SUCCESS, msgspec.json.encode(told))
            kept = {SUCCESS, *names}
            if gone := [name for name in self._names() if name not in kept]:
                self._store.delete(gone)

    def _names(self) -> list[str]:
        with delta_errors(self._output.uri):
            return [str(one["path"]) for some in self._store.list() for one in some]


def _place(uri: str, storage: Mapping[str, str]) -> _Folder | _Objects:
    path = local_path(uri)
    return _Objects(uri, storage) if path is None else _Folder(path)


def _reject_present(present: bool, where: str) -> None:
    if present:
        raise AlreadyExists(f"{where} exists; say --overwrite to replace it", file=where)
