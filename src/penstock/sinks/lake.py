"""The lake: every change and every vector as Delta tables.

`history` has one row per released delta. `vectors` has one row per touched vector and trigger: the
row with the highest revision of a vector is how it is now. Rows are only appended, each trigger in
one commit per table; `compact` thins `vectors` out to the newest row of each vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from penstock.sinks import newest
from penstock.sinks.lake_table import LakeTable, delta_errors, read
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import DELTAS, STATE_FIELDS

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
SCANNED: Final = ["namespace", "vector_id", "vector", "metadata", "revision"]
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
        self.history, self.vectors = (
            LakeTable(f"{self.path}/{part}", schema, storage=storage, compression=compression)
            for part, schema in (("history", HISTORY), ("vectors", VECTORS))
        )
        self._positions: dict[tuple[str, int], int] = {}

    def open(self) -> None:
        for table in (self.history, self.vectors):
            table.open()
        self._positions = _positions(self.history)

    def write(self, work: Work) -> None:
        if work.states is not None and len(work.states):
            self._append(self.vectors, "vectors", vectors_of(work.states), work)
        if work.deltas is not None and len(work.deltas):
            self._append(self.history, "history", history_of(work.deltas), work)

    def cursor(self) -> int | None:
        held = [
            table.version(f"{self.pipeline}/{part}")
            for table, part in ((self.history, "history"), (self.vectors, "vectors"))
        ]
        known = [version for version in held if version is not None]
        return min(known) if len(known) == len(held) else None

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.vectors.table.update_incremental()
        return _living(self.vectors.table)

    def reset(self) -> None:
        """Empty both tables; their past versions stay readable until they are vacuumed."""
        for table, part in ((self.history, "history"), (self.vectors, "vectors")):
            table.table.update_incremental()
            nothing = pa.RecordBatchReader.from_batches(table.schema, [])
            table.replace(nothing, forget=f"{self.pipeline}/{part}")
        self._positions = {}

    def close(self) -> None:
        for table in (self.history, self.vectors):
            table.close()

    def compact(self) -> dict[str, Any]:
        """Thin `vectors` out, merge small files, delete old ones. Appends may go on meanwhile."""
        table = self.vectors.table
        table.update_incremental()
        chosen = newest.winners(self.vectors.batches(_JUDGED))
        if len(chosen) and not chosen.all():
            rows = newest.chosen_rows(self.vectors.batches(VECTORS.names), chosen)
            self.vectors.replace(pa.RecordBatchReader.from_batches(VECTORS, _cast(rows)))
        found: dict[str, Any] = {
            part: lake.tidy(retention_hours=self.retention_hours)
            for part, lake in (("history", self.history), ("vectors", self.vectors))
        }
        found["vectors"] |= {"rows_before": len(chosen), "rows": int(chosen.sum())}
        return found

    def _append(self, table: LakeTable, part: str, rows: pa.Table, work: Work) -> None:
        application = f"{work.pipeline}/{part}"
        held = table.version(application)
        if held is not None and work.last <= held:
            return
        spans = _spans(rows) if part == "history" else {}
        # Another process may have written some of it: of that only the table itself knows.
        overlaps = bool(spans) and held is not None and work.first <= held
        if overlaps or any(
            low <= self._positions.get(place, -1) for place, (low, _) in spans.items()
        ):
            rows = self._unwritten(rows)
        if len(rows):
            table.append(rows, application=application, trigger=work.last)
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


def history_of(deltas: pa.Table) -> pa.Table:
    """DELTAS as the lake stores them. Indices are below 4096: their sign is no matter."""
    indices = [
        pa.ListArray.from_arrays(chunk.offsets, chunk.values.view(pa.int16()))
        for chunk in deltas["indices"].chunks
    ]
    at = deltas.schema.get_field_index("indices")
    column = pa.chunked_array(indices, pa.list_(pa.int16()))
    return deltas.set_column(at, "indices", column).select(HISTORY.names).cast(HISTORY)


def vectors_of(states: pa.Table) -> pa.Table:
    """STATES as the lake stores them."""
    lists = [_unsized(chunk) for chunk in states["vector"].chunks]
    at = states.schema.get_field_index("vector")
    column = pa.chunked_array(lists, pa.list_(pa.float32()))
    return states.set_column(at, "vector", column).select(VECTORS.names).cast(VECTORS)


def _unsized(vectors: pa.FixedSizeListArray) -> pa.ListArray:
    width = vectors.type.list_size
    offsets = pa.array(np.arange(0, (len(vectors) + 1) * width, width, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, vectors.flatten())


def _living(table: DeltaTable) -> Iterator[pa.RecordBatch]:
    chosen = newest.winners(read(table, _JUDGED))
    for batch in newest.chosen_rows(read(table, [*SCANNED, "deleted"]), chosen):
        alive = batch.filter(pc.invert(batch["deleted"])).select(SCANNED)
        if len(alive):
            yield alive


def _spans(rows: pa.Table) -> dict[tuple[str, int], tuple[int, int]]:
    """The lowest and highest position of each log partition."""
    by_place = rows.group_by(["topic", "partition"])
    found = by_place.aggregate([("position", "min"), ("position", "max")]).to_pylist()
    return {
        (row["topic"], row["partition"]): (row["position_min"], row["position_max"])
        for row in found
    }


def _positions(history: LakeTable) -> dict[tuple[str, int], int]:
    """The highest position that the table has of each log partition."""
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
