"""One Delta table that is appended to exactly once per trigger.

Every append carries the trigger's number as an *application transaction* in the same commit. Delta
keeps the highest number per application in the table's log and through its checkpoints, so what the
table holds and up to where cannot disagree, whatever crashes. Rewriting the table's files does not
touch those numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
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
from penstock.sinks.durable import local_path, sync

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
    def __init__(
        self, uri: str, schema: pa.Schema, *, storage: dict[str, str] | None, compression: str
    ) -> None:
        self.uri, self.schema = uri, schema
        self._storage = storage
        self._local = local_path(uri)
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

    def version(self, application: str) -> int | None:
        """The last trigger that the table holds."""
        with delta_errors(self.uri):
            self.table.update_incremental()
            held = self.table.transaction_version(application)
        return None if held == NOTHING else held

    def append(self, rows: pa.Table, *, application: str, trigger: int) -> None:
        """Append in one commit that says the table now holds everything up to `trigger`."""
        done = CommitProperties(app_transactions=[Transaction(application, trigger)])
        with delta_errors(self.uri):
            write_deltalake(
                self.table,
                rows,
                mode="append",
                writer_properties=self._properties,
                commit_properties=done,
            )
        self._sync(self.table.version())

    def replace(self, rows: pa.RecordBatchReader, *, forget: str | None = None) -> None:
        """Put `rows` in the place of the files this handle knows.

        Files that somebody appended meanwhile stay. So do the triggers' numbers, but for that of
        the application to `forget`.
        """
        anew = [] if forget is None else [Transaction(forget, NOTHING)]
        with delta_errors(self.uri):
            write_deltalake(
                self.table,
                rows,
                mode="overwrite",
                writer_properties=self._properties,
                commit_properties=CommitProperties(app_transactions=anew),
            )
        self._sync(self.table.version())

    def tidy(self, *, retention_hours: int | None) -> dict[str, Any]:
        """Merge small files and delete those nobody refers to any more."""
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
    """A table's rows, file by file.

    Files on this machine are read without Delta's own file system: its reads call back into Python
    from threads that may outlive the interpreter.
    """
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
