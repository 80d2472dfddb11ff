"""Two sinks of a user's own, as `module:Class` in a pipeline's configuration names them.

Both keep vectors in a SQLite file. `Partner` takes only so many rows a second, as a store at the
end of a slow line does. `Shop` fails for as long as a certain file exists, so that an outage can
begin and end by `touch` and `rm`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from penstock.errors import Unavailable
from penstock.sinks.protocol import Feed, Work

SCAN_ROWS: Final = 4096
WRITE_ROWS: Final = 500  # between two looks at the clock

_CREATE: Final = """
create table if not exists vectors (
  namespace text not null, vector_id text not null, vector blob not null, metadata text,
  revision integer not null, deleted integer not null, primary key (namespace, vector_id)
) without rowid
"""
# The one rule that makes a resend harmless: only a higher revision replaces what is there. A
# deleted vector stays as a row, or a late, older state would bring it back.
_UPSERT: Final = """
insert into vectors values (?, ?, ?, ?, ?, ?) on conflict do update set
  vector = excluded.vector, metadata = excluded.metadata, revision = excluded.revision,
  deleted = excluded.deleted
where excluded.revision > vectors.revision
"""
_SCAN: Final = """
select namespace, vector_id, vector, metadata, revision from vectors where not deleted
"""


class SqliteSink:
    """The newest state of every vector in one table."""

    feed = Feed.STATES
    ordered = False

    def __init__(self, name: str, *, path: str) -> None:
        self.name, self.path = name, Path(path)
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(
                self.path, check_same_thread=False
            )  # closed by another
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = full")
            self._database.execute(_CREATE)
        except sqlite3.Error as error:
            raise Unavailable(f"{self.path}: {error}") from error

    @property
    def database(self) -> sqlite3.Connection:
        assert self._database is not None, "open first"
        return self._database

    def write(self, work: Work) -> None:
        """One transaction: all of it or nothing, and on disk when this returns."""
        if work.states is None:
            return
        with self.database as transaction:
            for batch in work.states.to_batches(max_chunksize=WRITE_ROWS):
                transaction.executemany(_UPSERT, _rows(batch))

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        found = self.database.execute(_SCAN)
        while rows := found.fetchmany(SCAN_ROWS):
            namespace, vector_id, vector, metadata, revision = zip(*rows, strict=True)
            dimensions = len(vector[0]) // 4
            values = pa.Array.from_buffers(
                pa.float32(), len(rows) * dimensions, [None, pa.py_buffer(b"".join(vector))]
            )
            yield pa.record_batch(
                {
                    "namespace": pa.array(namespace, pa.utf8()),
                    "vector_id": pa.array(vector_id, pa.utf8()),
                    "vector": pa.FixedSizeListArray.from_arrays(values, dimensions),
                    "metadata": pa.array(metadata, pa.utf8()),
                    "revision": pa.array(revision, pa.int64()),
                }
            )

    def reset(self) -> None:
        with self.database as transaction:
            transaction.execute("delete from vectors")

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


class Partner(SqliteSink):
    """Takes `rows_per_s` at most."""

    def __init__(self, name: str, *, path: str, rows_per_s: float = 1000.0) -> None:
        super().__init__(name, path=path)
        self.rows_per_s = rows_per_s

    def write(self, work: Work) -> None:
        began = time.monotonic()
        super().write(work)
        rows = 0 if work.states is None else work.states.num_rows
        time.sleep(max(0.0, rows / self.rows_per_s - (time.monotonic() - began)))


class Shop(SqliteSink):
    """Refuses to work while the file `outage` exists."""

    def __init__(self, name: str, *, path: str, outage: str) -> None:
        super().__init__(name, path=path)
        self.outage = Path(outage)

    def write(self, work: Work) -> None:
        if self.outage.exists():
            raise Unavailable("the shop is closed for repairs")
        super().write(work)


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[object, ...]]:
    vectors = batch.column("vector")
    values = vectors.flatten().to_numpy().reshape(len(vectors), -1)
    return zip(
        batch.column("namespace").to_pylist(),
        batch.column("vector_id").to_pylist(),
        (row.tobytes() for row in values),
        batch.column("metadata").to_pylist(),
        batch.column("revision").to_pylist(),
        batch.column("deleted").to_pylist(),
        strict=True,
    )
