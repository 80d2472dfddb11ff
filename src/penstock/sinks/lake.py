"""The lake: every change and every vector as Delta tables.

`history` has one row per released delta. `vectors` has one row per touched vector and trigger: the
row with the highest revision of a vector is how it is now. Rows are only appended, each trigger in
one commit per table; `compact` thins `vectors` out to the newest row of each vector.

A table is appended to exactly once per trigger. Every append carries the trigger's number as an
*application transaction* in the same commit. Delta keeps the highest number per application in the
table's log and through its checkpoints, so what the table holds and up to where cannot disagree,
whatever crashes. Rewriting the table's files does not touch those numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import DeltaError
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from penstock.errors import Unavailable
from penstock.sinks.files import local_path, sync
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import DELTAS, SCANNED, STATE_FIELDS, chosen_rows, winners

# Delta knows neither unsigned integers nor sizes of lists and binaries.
HISTORY: Final = pa.schema(
    [
        {
            "delta_id": pa.field("delta_id", pa.binary(), nullable=False),
            "parent": pa.field("parent", pa.binary()),
            "indices": pa.field("indices", pa.list_(pa.int16())),
        }.get(field.name, field)
        for field in DELTAS
        if field.name != "payload"
    ]
)
VECTORS: Final = pa.schema(
    [
        pa.field("namespace", pa.utf8(), nullable=False),
        pa.field("vector_id", pa.utf8(), nullable=False),
        pa.field("vector", pa.list_(pa.float32()), nullable=False),
        *STATE_FIELDS,
    ]
)
_JUDGED: Final = ["namespace", "vector_id", "revision"]


class LakeSink:
    feed = Feed.STATES | Feed.DELTAS
    ordered = True

    def __init__(
        self,
        name: str,
        *,
        path: str,
        pipeline: str = "",
        storage_options: Mapping[str, str] | None = None,
        compression: str = "snappy",
        retention_hours: int | None = None,
    ) -> None:
        self.name, self.path, self.pipeline = name, path.rstrip("/"), pipeline
        self.retention_hours = retention_hours  # of files that compaction replaced; None: a week
        storage = None if storage_options is None else dict(storage_options)
        self.history, self.vectors = self._tables = tuple(
            LakeTable(self.path, part, schema, storage=storage, compression=compression)
            for part, schema in (("history", HISTORY), ("vectors", VECTORS))
        )
        self._positions: dict[tuple[str, int], int] = {}

    def open(self) -> None:
        for table in self._tables:
            table.open()
        self._positions = _positions(self.history)

    def write(self, work: Work) -> None:
        if work.states is not None and len(work.states):
            self._append(self.vectors, vectors_of(work.states), work)
        if work.deltas is not None and len(work.deltas):
            self._append(self.history, work.deltas.select(HISTORY.names).cast(HISTORY), work)

    def cursor(self) -> int | None:
        held = [table.version(self.pipeline) for table in self._tables]
        known = [version for version in held if version is not None]
        return min(known) if len(known) == len(held) else None

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.vectors.table.update_incremental()
        return _living(self.vectors.table)

    def reset(self) -> None:
        """Empty both tables; their past versions stay readable until they are vacuumed."""
        for table in self._tables:
            table.table.update_incremental()
            nothing = pa.RecordBatchReader.from_batches(table.schema, [])
            table.replace(nothing, forget=self.pipeline)
        self._positions = {}

    def close(self) -> None:
        for table in self._tables:
            table.close()

    def compact(self) -> dict[str, Any]:
        """Thin `vectors` out, merge small files, delete old ones. Appends may go on meanwhile."""
        self.vectors.table.update_incremental()
        chosen = winners(self.vectors.batches(_JUDGED))
        if len(chosen) and not chosen.all():
            rows = chosen_rows(self.vectors.batches(VECTORS.names), chosen)
            self.vectors.replace(pa.RecordBatchReader.from_batches(VECTORS, _cast(rows)))
        found: dict[str, Any] = {
            table.part: table.tidy(retention_hours=self.retention_hours) for table in self._tables
        }
        found["vectors"] |= {"rows_before": len(chosen), "rows": int(chosen.sum())}
        return found

    def _append(self, table: LakeTable, rows: pa.Table, work: Work) -> None:
        held = table.version(work.pipeline)
        if held is not None and work.last <= held:
            return
        spans = _spans(rows) if table is self.history else {}
        # Another process may have written some of it: of that only the table itself knows.
        overlaps = bool(spans) and held is not None and work.first <= held
        if overlaps or any(
            low <= self._positions.get(place, -1) for place, (low, _) in spans.items()
        ):
            rows = self._unwritten(rows)
        if len(rows):
            table.append(rows, pipeline=work.pipeline, trigger=work.last)
        for place, (_, high) in spans.items():
            self._positions[place] = max(high, self._positions.get(place, -1))

    def _unwritten(self, rows: pa.Table) -> pa.Table:
        """Without the deltas that the history has. A delta is known by its place in the log.

        Positions only grow, so this is asked only after a crash between the commits of the two
        tables, when a new pipeline writes into an old lake, or when a partition of a hosted sink
        has moved to another node.
        """
        spans = pc.min_max(rows["position"])
        where = (pc.field("position") >= spans["min"]) & (pc.field("position") <= spans["max"])
        held = list(self.history.batches(["topic", "partition", "sequence"], where=where))
        if not held:
            return rows
        known = pc.is_in(_places(rows), value_set=_places(pa.Table.from_batches(held)))
        return rows.filter(pc.invert(known))


def latest(path: str, *, storage_options: Mapping[str, str] | None = None) -> pa.RecordBatchReader:
    """The living vectors of a lake, each once, as `vectors` has them. Streams."""
    where = f"{path.rstrip('/')}/vectors"
    with delta_errors(where):
        table = DeltaTable(where, storage_options=dict(storage_options or {}))
    schema = pa.schema([VECTORS.field(name) for name in SCANNED])
    return pa.RecordBatchReader.from_batches(schema, _living(table))


def vectors_of(states: pa.Table) -> pa.Table:
    return states.select(VECTORS.names).cast(VECTORS)


def _living(table: DeltaTable) -> Iterator[pa.RecordBatch]:
    chosen = winners(read(table, _JUDGED))
    for batch in chosen_rows(read(table, [*SCANNED, "deleted"]), chosen):
        alive = batch.filter(pc.invert(batch["deleted"])).select(SCANNED)
        if len(alive):
            yield alive


def _spans(rows: pa.Table) -> dict[tuple[str, int], tuple[int, int]]:
    by_place = rows.group_by(["topic", "partition"])
    found = by_place.aggregate([("position", "min"), ("position", "max")]).to_pylist()
    return {
        (row["topic"], row["partition"]): (row["position_min"], row["position_max"])
        for row in found
    }


def _positions(history: LakeTable) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for batch in history.batches(["topic", "partition", "position"]):
        for place, (_, high) in _spans(pa.Table.from_batches([batch])).items():
            found[place] = max(high, found.get(place, -1))
    return found


def _places(rows: pa.Table) -> pa.ChunkedArray:
    texts = [rows["topic"], *(rows[name].cast(pa.utf8()) for name in ("partition", "sequence"))]
    return pc.binary_join_element_wise(*texts, "/")


def _cast(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from pa.Table.from_batches([batch]).cast(VECTORS).to_batches()


# Values of vectors do not repeat: a dictionary only costs time, and nobody prunes by them.
_PLAIN: Final = ColumnProperties(dictionary_enabled=False, statistics_enabled="NONE")
_PRUNED: Final = ColumnProperties(dictionary_enabled=False, statistics_enabled="CHUNK")
_REPEATED: Final = ColumnProperties(dictionary_enabled=True, statistics_enabled="CHUNK")
_COLUMNS: Final = {
    **dict.fromkeys(("sequence", "position", "ordinal", "log_time_ms"), _PRUNED),
    **dict.fromkeys(("topic", "partition", "namespace", "op", "origin"), _REPEATED),
}
NOTHING: Final = -1  # the trigger that a table holds after it was emptied
STATISTICS: Final = "topic,partition,namespace,sequence,position,ordinal,log_time_ms"


class LakeTable:
    """One of the lake's two tables. The application that a pipeline is to it is `pipeline/part`."""

    def __init__(
        self, lake: str, part: str, schema: pa.Schema, *, storage: dict[str, str] | None,
        compression: str,
    ) -> None:  # fmt: skip
        self.part, self.uri, self.schema = part, f"{lake}/{part}", schema
        self._storage = storage
        self._local = local_path(self.uri)
        self._properties = WriterProperties(
            compression=compression.upper(),  # type: ignore[arg-type]
            default_column_properties=_PLAIN,
            column_properties=_COLUMNS,
        )
        self._table: DeltaTable | None = None

    @property
    def table(self) -> DeltaTable:
        assert self._table is not None, "the table is not open"
        return self._table

    def open(self) -> None:
        named = {name for name in STATISTICS.split(",") if name in self.schema.names}
        with delta_errors(self.uri):
            if self._local is not None:
                self._local.mkdir(parents=True, exist_ok=True)
            self._table = DeltaTable.create(
                self.uri,
                self.schema,
                mode="ignore",
                configuration={"delta.dataSkippingStatsColumns": ",".join(sorted(named))},
                storage_options=self._storage,
            )
            self._table.update_incremental()

    def close(self) -> None:
        self._table = None

    def version(self, pipeline: str) -> int | None:
        with delta_errors(self.uri):
            self.table.update_incremental()
            held = self.table.transaction_version(f"{pipeline}/{self.part}")
        return None if held == NOTHING else held

    def append(self, rows: pa.Table, *, pipeline: str, trigger: int) -> None:
        """Append in one commit that says the table now holds everything up to `trigger`."""
        self._write(rows, "append", {pipeline: trigger})

    def replace(self, rows: pa.RecordBatchReader, *, forget: str | None = None) -> None:
        """Put `rows` in the place of the files this handle knows. Files that somebody appended
        meanwhile stay. So do the triggers' numbers, but for that of the pipeline to `forget`."""
        self._write(rows, "overwrite", {} if forget is None else {forget: NOTHING})

    def _write(
        self, rows: Any, mode: Literal["append", "overwrite"], triggers: dict[str, int]
    ) -> None:
        held = [Transaction(f"{name}/{self.part}", number) for name, number in triggers.items()]
        with delta_errors(self.uri):
            write_deltalake(
                self.table,
                rows,
                mode=mode,
                writer_properties=self._properties,
                commit_properties=CommitProperties(app_transactions=held),
            )
        self._sync(self.table.version())

    def tidy(self, *, retention_hours: int | None) -> dict[str, Any]:
        with delta_errors(self.uri):
            merged = self.table.optimize.compact(writer_properties=self._properties)
            enforced = retention_hours is None or retention_hours >= 168
            gone = self.table.vacuum(
                retention_hours, dry_run=False, enforce_retention_duration=enforced
            )
            self.table.create_checkpoint()
        return {
            "files_merged": merged["numFilesRemoved"],
            "files_written": merged["numFilesAdded"],
            "files_deleted": len(gone),
        }

    def batches(
        self, columns: list[str] | None = None, *, where: Any = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows in an order that stays the same as long as this handle is not updated."""
        return read(self.table, columns, where=where)

    def _sync(self, version: int) -> None:
        """Delta's writer leaves it to the kernel when files reach the disk."""
        if self._local is None:
            return
        log = self._local / "_delta_log"
        entry = log / f"{version:020}.json"
        added = [self._local / path for path in _added(entry)]
        sync([*added, entry, self._local, log])


def read(
    table: DeltaTable, columns: list[str] | None, *, where: Any = None
) -> Iterator[pa.RecordBatch]:
    """A table's rows, file by file. Files on this machine are read without Delta's own file system:
    its reads call back into Python from threads that may outlive the interpreter."""
    local = local_path(table.table_uri)
    files = None if local is None else SubTreeFileSystem(str(local), LocalFileSystem())
    dataset = table.to_pyarrow_dataset(filesystem=files)
    for fragment in dataset.get_fragments(filter=where):
        yield from fragment.to_batches(schema=dataset.schema, columns=columns, filter=where)


@contextmanager
def delta_errors(uri: str) -> Iterator[None]:
    """Whatever a store says, the write is tried again later; its words are kept."""
    try:
        yield
    except (DeltaError, OSError) as error:
        raise Unavailable(f"the Delta table {uri} cannot be used: {error}") from error


def _added(entry: Path) -> Iterable[str]:
    for line in entry.read_bytes().splitlines():
        action = msgspec.json.decode(line)
        if "add" in action:
            yield action["add"]["path"]
