"""The vectors as they were at a moment of the log, as a folder of Parquet files or a Delta table.

Every partition is folded by a task of Spark up to the last batch written at or before the moment,
with the same kernels as the pipeline. So for the log's end it gives what the pipeline's lake holds,
and the same log gives the same files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import AlreadyExists
from penstock.propagation.options import PropagationOptions
from penstock.sinks.lake import VECTORS, vectors_of
from penstock.spark.jobs.log_fold import PartitionFold, fold_whole, log_ranges, scratch
from penstock.spark.source.options import Connecting

Output = Literal["parquet", "delta"]
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
    ranges = log_ranges(node, topics, until_ms=at_ms)
    output.parent.mkdir(parents=True, exist_ok=True)
    with scratch(output.parent) as folder:
        bounds = options or PropagationOptions()
        folds = fold_whole(spark, ranges, node=node, folder=folder, options=bounds)
        made = folder / "made"
        rows = _WRITERS[format](made, folds)
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
    return {
        "path": str(output),
        "format": format,
        "vectors": rows,
        "at_ms": at_ms,
        "partitions": [
            {"topic": r.topic, "partition": r.partition, "last": r.last, **fold.counts}
            for fold, r in zip(folds, ranges, strict=True)
        ],
    }


def living(fold: PartitionFold) -> pa.Table:
    table = fold.states()
    return vectors_of(table.filter(pc.invert(table["deleted"]))).select(COLUMNS)


def _parquet(made: Path, folds: Sequence[PartitionFold]) -> int:
    made.mkdir()
    rows = 0
    for fold in folds:
        table = living(fold)
        pq.write_table(table, made / f"{fold.name}.parquet", compression="zstd")
        rows += table.num_rows
    return rows


def _delta(made: Path, folds: Sequence[PartitionFold]) -> int:
    from deltalake import write_deltalake

    rows = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for fold in folds:
            table = living(fold)
            rows += table.num_rows
            yield from table.to_batches()

    write_deltalake(str(made), pa.RecordBatchReader.from_batches(SCHEMA, batches()))
    return rows


_WRITERS: Final = {"parquet": _parquet, "delta": _delta}
