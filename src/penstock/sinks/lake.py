"""The lake: every change and every vector as Delta tables.

`history` has one row per released delta. `vectors` has one row per touched vector and trigger: the
row with the highest revision of a vector is how it is now. Rows are only appended, each trigger in
one commit per table; a job thins `vectors` out to the newest row of each vector.

A table is appended to exactly once per trigger. Every append carries the trigger's number as an
*application transaction* in the same commit. Delta keeps the newest number per application in the
table's log and through its checkpoints, so what the table holds and up to where cannot disagree,
whatever crashes. Of two writers that append under one application at once, Delta refuses one.
Rewriting the table's files does not touch those numbers.

Files are written by as many tasks as there are, each a Parquet file whose place in the table is its
receipt; a commit names the files of all. What no commit names is swept by `vacuum`.

The history also keeps, per log partition, the position that it reaches: an application transaction,
too. A pipeline that begins anew in an old lake, or a partition that moves to another node, knows by
it which deltas may be there already.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import (
    CommitProperties,
    DeltaTable,
    Transaction,
)
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction
from obstore.exceptions import BaseError
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from penstock.errors import Unavailable
from penstock.sinks.files import local_path, object_store, sync
from penstock.sinks.protocol import Feed, SinkCommit, SinkMark, Work
from penstock.sinks.schema import AS_SENT, DELTAS, SCANNED, STATE_FIELDS, chosen_rows, winners

# Delta knows neither unsigned integers nor sizes of lists and binaries.
HISTORY: Final = pa.schema(
    [
        {
            "delta_id": pa.field("delta_id", pa.binary(), nullable=False),
            "parent": pa.field("parent", pa.binary()),
            "indices": pa.field("indices", pa.list_(pa.int16())),
        }.get(field.name, field)
        for field in DELTAS
        if field.name not in AS_SENT
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
PIECE_BYTES: Final = 64 << 20  # of files that one task reads


LogPlace = tuple[str, int]  # a topic and a partition of it


@dataclass(frozen=True, kw_only=True)
class LakeFile:
    """A file of rows that is in the folder of a table, and not yet in the table."""

    part: str
    path: str
    bytes: int
    statistics: str  # JSON, as Delta has it
    positions: dict[LogPlace, int]  # of a history: how far it reaches with this file


LakeReceipt = list[LakeFile]


@dataclass(frozen=True, kw_only=True)
class LakePiece:
    """Some files of a table, as they were in one of its versions."""

    version: int
    files: tuple[str, ...]
    bytes: int
    rows: int


class LakeSink:
    feed = Feed.STATES | Feed.DELTAS
    ordered = True
    shards = 0

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

    def open(self) -> None:
        for table in self._tables:
            table.open()

    def write(self, work: Work) -> None:
        receipt = self.write_part(work)
        span = SinkCommit(pipeline=work.pipeline, first=work.first, last=work.last, position=())
        self.commit([] if receipt is None else [receipt], span)

    def write_part(self, work: Work) -> LakeReceipt | None:
        files = []
        if work.states is not None and self._lacks(self.vectors, work):
            files.append(self.vectors.write(vectors_of(work.states)))
        if work.deltas is not None and self._lacks(self.history, work):
            rows = work.deltas.select(HISTORY.names).cast(HISTORY)
            files.append(
                self.history.write(self._unwritten(rows), positions=_positions(rows, "max"))
            )
        return [file for file in files if file is not None] or None

    def commit(self, receipts: Sequence[LakeReceipt], commit: SinkCommit) -> None:
        for table in self._tables:
            files = [file for receipt in receipts for file in receipt if file.part == table.part]
            held = table.version(commit.pipeline)
            if files and (held is None or commit.last > held):
                table.append(files, pipeline=commit.pipeline, trigger=commit.last)

    def mark(self) -> SinkMark | None:
        """It names no driver: Delta refuses the commit of one that was overtaken."""
        held = self.cursor()
        return None if held is None else SinkMark(position=(held,))

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
            table.empty(forget=self.pipeline)

    def close(self) -> None:
        for table in self._tables:
            table.close()

    def pieces(self) -> list[LakePiece]:
        return self.vectors.pieces()

    def scan_piece(self, piece: LakePiece) -> Iterator[pa.RecordBatch]:
        return self.vectors.read_piece(piece, [*SCANNED, "deleted"])

    def _lacks(self, table: LakeTable, work: Work) -> bool:
        held = table.version(work.pipeline)
        return held is None or work.last > held

    def _unwritten(self, rows: pa.Table) -> pa.Table:
        """Without the deltas that the history has. A delta is known by its place in the log.

        Positions only grow, so there are some only after a crash between the commits of the two
        tables, when a new pipeline writes into an old lake, or when a partition of a hosted sink
        has moved to another node.
        """
        starts = _positions(rows, "min")
        if not any(low <= self.history.reaches(place) for place, low in starts.items()):
            return rows
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


def deltas_of(history: pa.Table) -> pa.Table:
    """DELTAS of rows of a history, which keeps none of the columns that are as they were sent."""
    missing = {name: pa.nulls(history.num_rows, DELTAS.field(name).type) for name in AS_SENT}
    columns = [
        missing[field.name] if field.name in missing else history[field.name].cast(field.type)
        for field in DELTAS
    ]
    return pa.table(columns, schema=DELTAS)


def vectors_of(states: pa.Table) -> pa.Table:
    return states.select(VECTORS.names).cast(VECTORS)


def _living(table: DeltaTable) -> Iterator[pa.RecordBatch]:
    chosen = winners(read(table, _JUDGED))
    for batch in chosen_rows(read(table, [*SCANNED, "deleted"]), chosen):
        alive = batch.filter(pc.invert(batch["deleted"])).select(SCANNED)
        if len(alive):
            yield alive


def _positions(rows: pa.Table, which: Literal["min", "max"]) -> dict[LogPlace, int]:
    found = rows.group_by(["topic", "partition"]).aggregate([("position", which)]).to_pylist()
    return {(row["topic"], row["partition"]): row[f"position_{which}"] for row in found}


def _places(rows: pa.Table) -> pa.ChunkedArray:
    texts = [rows["topic"], *(rows[name].cast(pa.utf8()) for name in ("partition", "sequence"))]
    return pc.binary_join_element_wise(*texts, "/")


# Values of vectors do not repeat: a dictionary only costs time, and nobody prunes by them.
_REPEATING: Final = ("topic", "partition", "namespace", "op", "origin")
NOTHING: Final = -1  # the trigger that a table holds after it was emptied
_NAMED: Final = (
    "topic",
    "partition",
    "namespace",
    "sequence",
    "position",
    "ordinal",
    "log_time_ms",
)


class LakeTable:
    """One of the lake's two tables. The application that a pipeline is to it is `pipeline/part`."""

    def __init__(
        self, lake: str, part: str, schema: pa.Schema, *, storage: dict[str, str] | None,
        compression: str,
    ) -> None:  # fmt: skip
        self.part, self.uri, self.schema = part, f"{lake}/{part}", schema
        self._storage, self._compression = storage, compression
        self._local = local_path(self.uri)
        self._table: DeltaTable | None = None
        self._objects: Any = None  # the store that files are put into, if that is not a folder

    @property
    def table(self) -> DeltaTable:
        assert self._table is not None, "the table is not open"
        return self._table

    def open(self) -> None:
        named = {name for name in _NAMED if name in self.schema.names}
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

    def reaches(self, place: LogPlace) -> int:
        """The newest position of a log partition that the table has a row of, -1 before any."""
        held = self.table.transaction_version(_position_of(place))
        return NOTHING if held is None else held

    def write(
        self, rows: pa.Table, *, positions: Mapping[LogPlace, int] | None = None
    ) -> LakeFile | None:
        """Write rows to a file of the table's folder, durably; none if there are no rows."""
        if not rows.num_rows:
            return None
        path = f"part-{uuid.uuid4().hex}.parquet"
        named = [name for name in _NAMED if name in self.schema.names]
        with delta_errors(self.uri), self._created(path) as file:
            pq.write_table(
                rows,
                file,
                compression=self._compression,
                use_dictionary=[name for name in _REPEATING if name in self.schema.names],
                write_statistics=named,
            )
            size = file.tell()
        return LakeFile(
            part=self.part,
            path=path,
            bytes=size,
            statistics=_statistics(rows, named),
            positions=dict(positions or {}),
        )

    @contextmanager
    def _created(self, path: str) -> Iterator[pa.NativeFile]:
        """A new file of the table's folder, durable when the block ends."""
        if self._local is not None:
            with pa.OSFile(str(self._local / path), "wb") as file:
                yield file
            sync([self._local / path])
            return
        data = pa.BufferOutputStream()
        yield data
        if self._objects is None:
            self._objects = object_store(self.uri, self._storage or {}, field="path")
        self._objects.put(path, data.getvalue().to_pybytes())

    def append(self, files: Sequence[LakeFile], *, pipeline: str, trigger: int) -> None:
        """Take files in, in one commit that says the table now holds all up to `trigger`."""
        now_ms = time.time_ns() // 1_000_000
        actions = [
            AddAction(file.path, file.bytes, {}, now_ms, True, file.statistics) for file in files
        ]
        reached: dict[str, int] = {}
        for place, position in (pair for file in files for pair in file.positions.items()):
            name = _position_of(place)
            reached[name] = max(position, reached.get(name, self.reaches(place)))
        with delta_errors(self.uri):
            self.table.create_write_transaction(
                list(actions),
                "append",
                self.schema,
                commit_properties=self._transactions({pipeline: trigger}, reached),
            )
            self.table.update_incremental()
        self._sync(self.table.version())

    def empty(self, *, forget: str) -> None:
        """Take all rows out in one commit. The triggers' numbers stay, but for that of the pipeline
        to `forget`."""
        now_ms, held = time.time_ns() // 1_000_000, self.pieces()
        gone = [RemoveAction(path, True, now_ms) for piece in held for path in piece.files]
        with delta_errors(self.uri):
            self.table.create_write_transaction(
                list(gone),
                "append",
                self.schema,
                commit_properties=self._transactions({forget: NOTHING}),
            )
            self.table.update_incremental()
        self._sync(self.table.version())

    def _transactions(
        self, triggers: Mapping[str, int], reached: Mapping[str, int] | None = None
    ) -> CommitProperties:
        held = {f"{name}/{self.part}": number for name, number in triggers.items()}
        held |= reached or {}
        return CommitProperties(app_transactions=[Transaction(*pair) for pair in held.items()])

    def vacuum(self, *, retention_hours: int | None) -> int:
        """Delete files that no version within the retention needs; how many went."""
        with delta_errors(self.uri):
            enforced = retention_hours is None or retention_hours >= 168
            gone = self.table.vacuum(
                retention_hours, dry_run=False, enforce_retention_duration=enforced
            )
            self.table.create_checkpoint()
        return len(gone)

    def pieces(
        self, *, bytes_max: int = PIECE_BYTES, file_bytes_max: int | None = None
    ) -> list[LakePiece]:
        """The newest version's files, small ones together; only those up to a size, if told."""
        with delta_errors(self.uri):
            self.table.update_incremental()
            held = pa.table(self.table.get_add_actions(flatten=True))
        names = ("path", "size_bytes", "num_records")
        files = zip(*(held[name].to_pylist() for name in names), strict=True)
        groups: list[list[tuple[str, int, int]]] = []
        for file in sorted(files, key=itemgetter(1), reverse=True):
            if file_bytes_max is not None and file[1] > file_bytes_max:
                continue
            if groups and sum(size for _, size, _ in groups[-1]) + file[1] <= bytes_max:
                groups[-1].append(file)
            else:
                groups.append([file])
        return [self._piece(group) for group in groups]

    def _piece(self, files: Sequence[tuple[str, int, int]]) -> LakePiece:
        paths, sizes, rows = zip(*files, strict=True)
        return LakePiece(
            version=self.table.version(), files=paths, bytes=sum(sizes), rows=sum(rows)
        )

    def read_piece(
        self, piece: LakePiece, columns: list[str] | None = None, *, where: Any = None
    ) -> Iterator[pa.RecordBatch]:
        with delta_errors(self.uri):
            table = DeltaTable(self.uri, version=piece.version, storage_options=self._storage)
            yield from read(table, columns, where=where, files=frozenset(piece.files))

    def exchange(
        self, pieces: Sequence[LakePiece], files: Sequence[LakeFile], *, same_rows: bool
    ) -> None:
        """Put files in the place of those of the pieces, in one commit. What was appended meanwhile
        stays, and so do the triggers' numbers."""
        now_ms, changed = time.time_ns() // 1_000_000, not same_rows
        actions: list[Any] = [
            AddAction(file.path, file.bytes, {}, now_ms, changed, file.statistics) for file in files
        ]
        gone = sorted({path for piece in pieces for path in piece.files})
        actions += [RemoveAction(path, changed, now_ms) for path in gone]
        with delta_errors(self.uri):
            self.table.create_write_transaction(actions, "append", self.schema)
            self.table.update_incremental()
        self._sync(self.table.version())

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


def _position_of(place: LogPlace) -> str:
    return f"position/{place[0]}/{place[1]}"


def _statistics(rows: pa.Table, named: Sequence[str]) -> str:
    ends = {name: pc.min_max(rows[name]).as_py() for name in named}
    told = {
        "numRecords": rows.num_rows,
        "minValues": {name: end["min"] for name, end in ends.items()},
        "maxValues": {name: end["max"] for name, end in ends.items()},
        "nullCount": dict.fromkeys(ends, 0),
    }
    return msgspec.json.encode(told).decode()


def read(
    table: DeltaTable,
    columns: list[str] | None,
    *,
    where: Any = None,
    files: Set[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """A table's rows, file by file. Files on this machine are read without Delta's own file system:
    its reads call back into Python from threads that may outlive the interpreter."""
    local = local_path(table.table_uri)
    system = None if local is None else SubTreeFileSystem(str(local), LocalFileSystem())
    dataset = table.to_pyarrow_dataset(filesystem=system)
    for fragment in dataset.get_fragments(filter=where):
        if files is None or fragment.path in files:
            yield from fragment.to_batches(schema=dataset.schema, columns=columns, filter=where)


@contextmanager
def delta_errors(uri: str) -> Iterator[None]:
    """Whatever a store says, the write is tried again later; its words are kept."""
    try:
        yield
    except (DeltaError, BaseError, OSError) as error:
        raise Unavailable(f"the Delta table {uri} cannot be used: {error}") from error


def _added(entry: Path) -> Iterable[str]:
    for line in entry.read_bytes().splitlines():
        action = msgspec.json.decode(line)
        if "add" in action:
            yield action["add"]["path"]
