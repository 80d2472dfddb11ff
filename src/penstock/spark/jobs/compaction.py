"""Making a lake small again, in tasks, while the pipeline may go on writing.

`vectors` has a row for each change of a vector and trigger. Its rows go by the hashes of their
names to tasks that keep the newest of each vector and write them to new files. One transaction then
puts those in the place of exactly the files that were read: what was appended meanwhile stays. A
table in which every vector stands once is left as it is, but for small files.

Small files of both tables are merged: a task reads some and writes one. At the end files that no
version within the lake's retention needs are deleted, and the log of the table gets a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.errors import FailedPrecondition
from penstock.sinks.lake import VECTORS, LakeFile, LakePiece, LakeSink, LakeTable
from penstock.sinks.schema import newest_of
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec
from penstock.spark.jobs.digests import keys_of, shares_of_keys
from penstock.spark.jobs.filling import SHARE_ROWS, lake_rows
from penstock.spark.jobs.stores import opened_in_task, opened_sink, sink_settings
from penstock.spark.jobs.tasks import Parcel, Tasks, shared_out, shares_for, table_of
from penstock.spark.settings import PipelineSettings

FILE_BYTES: Final = 64 << 20  # a file of half of that is not merged with others


def compact(spark: Any, settings: PipelineSettings, sink: str | None = None) -> dict[str, Any]:
    """Make one lake small again, or all of the pipeline's: the newest row of each vector, few
    files."""
    chosen = [sink_settings(settings, sink)] if sink else list(settings.sinks)
    found = {}
    for one in chosen:
        if one.kind == "lake":
            with opened_sink(settings, one) as lake:
                tasks = Tasks(spark, f"compact of {one.name}")
                found[one.name] = LakeCompaction(tasks, lake).run()
        elif sink:
            raise FailedPrecondition(f"{sink} is no lake: it is a {one.kind}", field="sink")
    if not found:
        raise FailedPrecondition("the pipeline has no lake", field="sink")
    return {"lakes": found}


class LakeCompaction:
    def __init__(self, tasks: Tasks, attached: RoutedSink) -> None:
        assert isinstance(attached.sink, LakeSink)
        assert attached.spec is not None
        self._tasks, self._lake, self._spec = tasks, attached.sink, attached.spec

    def run(self) -> dict[str, Any]:
        thinned = self._thin_out()
        found: dict[str, dict[str, int]] = {}
        for table in (self._lake.history, self._lake.vectors):
            merged = self._merge(table)
            hours = self._lake.retention_hours
            found[table.part] = merged | {"files_deleted": table.vacuum(retention_hours=hours)}
        found["vectors"] |= thinned
        return found

    def _thin_out(self) -> dict[str, int]:
        """Keep the newest row of each vector. Rows are moved only if some will go."""
        pieces = self._lake.vectors.pieces()
        before = sum(piece.rows for piece in pieces)
        shares = shares_for(before, each=SHARE_ROWS, least=self._tasks.parallelism)
        names = self._tasks.make(partial(lake_names, self._spec, shares), pieces)
        kept = sum(self._tasks.answers(distinct_names, self._tasks.by_share(names, shares)))
        if kept < before:
            rows = self._tasks.make(partial(lake_rows, self._spec, shares), pieces)
            together = self._tasks.by_share(rows, shares)
            files = self._tasks.answers(partial(write_newest, self._spec), together)
            self._lake.vectors.exchange(pieces, files, same_rows=False)
        return {"rows_before": before, "rows": kept}

    def _merge(self, table: LakeTable) -> dict[str, int]:
        found = table.pieces(bytes_max=FILE_BYTES, file_bytes_max=FILE_BYTES // 2)
        small = [piece for piece in found if len(piece.files) > 1]
        work = partial(merge_files, self._spec, table.part)
        files = self._tasks.collected(self._tasks.make(work, small))
        if files:
            table.exchange(small, files, same_rows=True)
        merged = sum(len(piece.files) for piece in small)
        return {"files_merged": merged, "files_written": len(files)}


# --- in the tasks ---


def lake_names(spec: SinkSpec, shares: int, piece: LakePiece) -> Iterator[Parcel]:
    """The hashes of the names in a piece of a lake's vectors."""
    with opened_in_task(spec) as lake:
        assert isinstance(lake, LakeSink)
        for batch in lake.vectors.read_piece(piece, ["namespace", "vector_id"]):
            keys = np.unique(keys_of(batch))
            table = pa.table({"key": pa.array(keys.tolist(), pa.binary())})
            yield from shared_out(table, shares_of_keys(keys, shares)) if len(keys) else ()


def distinct_names(parcels: Iterable[Parcel]) -> Iterator[int]:
    found = [table_of(one) for one in parcels]
    yield len(pa.concat_tables(found)["key"].unique()) if found else 0


def write_newest(spec: SinkSpec, parcels: Iterable[Parcel]) -> Iterator[LakeFile]:
    """A file of the newest row of each vector of a share."""
    tables = [table_of(one) for one in parcels]
    if tables:
        with opened_in_task(spec) as lake:
            assert isinstance(lake, LakeSink)
            file = lake.vectors.write(newest_of(pa.concat_tables(tables)).cast(VECTORS))
            yield from () if file is None else (file,)


def merge_files(spec: SinkSpec, part: str, piece: LakePiece) -> Iterator[LakeFile]:
    """The rows of several files in one."""
    with opened_in_task(spec) as lake:
        assert isinstance(lake, LakeSink)
        table = lake.history if part == lake.history.part else lake.vectors
        rows = pa.Table.from_batches(table.read_piece(piece, table.schema.names))
        file = table.write(rows.cast(table.schema))
        yield from () if file is None else (file,)
