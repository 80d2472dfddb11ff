"""The vectors as they were at a moment of the log, as a folder of Parquet files or a Delta table.

Every partition is folded by a task of Spark up to the last batch written at or before the moment,
with the same kernels as the pipeline. So for the log's end it gives what the pipeline's lake holds,
and the same log gives the same files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import AlreadyExists, Corruption, FailedPrecondition
from penstock.propagation.options import PropagationOptions
from penstock.sinks.lake import VECTORS, vectors_of
from penstock.spark.jobs.fold import FoldTask, PartitionFold, fold_partitions, open_table
from penstock.spark.jobs.ranges import LogRange, log_until, whole_log
from penstock.spark.jobs.scratch import scratch
from penstock.spark.source.options import Connecting

Output = Literal["parquet", "delta"]
OUTPUTS: Final[tuple[str, ...]] = get_args(Output)
# `lane` says how urgent the last trigger's changes were: nothing that a vector has.
COLUMNS: Final = [name for name in VECTORS.names if name not in ("deleted", "lane")]
SCHEMA: Final = pa.schema([VECTORS.field(name) for name in COLUMNS])


def materialise(
    spark: Any,
    node: Connecting,
    topics: Sequence[str],
    output: Path,
    *,
    at_ms: int | None = None,
    format: Output = "parquet",
    options: PropagationOptions | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the living vectors as of `at_ms` (None: now) to `output`, whole or not at all."""
    if output.exists() and not overwrite:
        raise AlreadyExists(f"{output} exists; say --overwrite to replace it", file=str(output))
    ranges = whole_log(node, topics) if at_ms is None else log_until(node, topics, time_ms=at_ms)
    _reject_cut_log(ranges)
    output.parent.mkdir(parents=True, exist_ok=True)
    with scratch(output.parent) as folder:
        bounds = options or PropagationOptions()
        tasks = [FoldTask(node=node, range=one, folder=folder, options=bounds) for one in ranges]
        folds = fold_partitions(spark, tasks)
        _reject_damage(folds)
        made = folder / "made"
        rows = _WRITERS[format](made, folds, folder)
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
    return {
        "path": str(output),
        "format": format,
        "vectors": rows,
        "at_ms": at_ms,
        "partitions": [
            {"topic": f.topic, "partition": f.partition, "last": f.last, **f.counts} for f in folds
        ],
    }


def living(folder: Path, fold: PartitionFold) -> pa.Table:
    """The living vectors of one partition."""
    assert fold.states is not None
    table = open_table(folder, fold.states)
    return vectors_of(table.filter(pc.invert(table["deleted"]))).select(COLUMNS)


def _parquet(made: Path, folds: Sequence[PartitionFold], folder: Path) -> int:
    """One file per partition."""
    made.mkdir()
    rows = 0
    for fold in folds:
        table = living(folder, fold)
        pq.write_table(table, made / f"{fold.name}.parquet", compression="zstd")
        rows += table.num_rows
    return rows


def _delta(made: Path, folds: Sequence[PartitionFold], folder: Path) -> int:
    from deltalake import write_deltalake

    rows = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for fold in folds:
            table = living(folder, fold)
            rows += table.num_rows
            yield from table.to_batches()

    write_deltalake(str(made), pa.RecordBatchReader.from_batches(SCHEMA, batches()))
    return rows


_WRITERS: Final = {"parquet": _parquet, "delta": _delta}


def _reject_cut_log(ranges: Sequence[LogRange]) -> None:
    for one in ranges:
        if not one.complete:
            raise FailedPrecondition(
                f"{one.topic}/{one.partition} begins at sequence {one.first}: retention has deleted"
                " what the vectors were made of",
                sequence_first=one.first,
            )


def _reject_damage(folds: Sequence[PartitionFold]) -> None:
    for fold in folds:
        if fold.damage is not None:
            raise Corruption(f"{fold.topic}/{fold.partition}: {fold.damage['reason']}")
