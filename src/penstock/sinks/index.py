"""The nearest-neighbour index: LanceDB tables, one per dimension. `Index` asks it, `IndexSink`
keeps it up to date.

A deleted vector stays as a row without a vector, its tombstone, so that a late, older state cannot
bring it back. No answer contains tombstones.

The sink merges once per write, keyed by the vector's name: a row is replaced only by a higher
revision, so order and repetition do not matter. A merge adds a fragment and marks the rows it
replaced; both slow later merges and searches down until the table is tidied, which happens every
few writes. No scalar index serves the merge: at the sizes of a trigger, scanning one column of keys
costs less than keeping an index of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import IvfPq
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound, Unavailable
from penstock.sinks import neighbours
from penstock.sinks.files import NewFiles, local_path
from penstock.sinks.neighbours import Neighbour
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import SCANNED, dimensions_of, vector_keys

REFINE: Final = 10  # an approximate answer is chosen among so many times more candidates
_FOUND: Final = ["namespace", "vector_id", "metadata", "revision", "_distance"]
_PREFIX: Final = "vectors_"


@dataclass(frozen=True, kw_only=True)
class IndexedVector:
    namespace: str
    vector_id: str
    values: NDArray[np.float32]
    revision: int
    metadata: dict[str, Any] | None


class Index:
    """What a pipeline's index holds at this moment. It is safe to ask while it is written."""

    def __init__(self, path: str, *, storage_options: dict[str, str] | None = None) -> None:
        self.path = path
        with lance_errors(path):
            self.database = lancedb.connect(
                path, read_consistency_interval=timedelta(0), storage_options=storage_options
            )
        self._tables: dict[int, Any] = {}

    def search(
        self,
        vector: Sequence[float] | NDArray[np.floating[Any]],
        k: int = 10,
        *,
        namespace: str | None = None,
        metric: neighbours.Metric = "cosine",
        exact: bool = False,
    ) -> list[Neighbour]:
        """The `k` nearest vectors. Approximate where the index has been trained for `metric`,
        unless `exact`; a table too small to be worth training is always searched exactly."""
        query = neighbours.checked_query(vector, k, metric)
        table = self.table(len(query))
        where = "deleted = false"
        if namespace is not None:
            where += f" AND namespace = {quoted(namespace)}"
        with lance_errors(self.path):
            asked = table.search(query).distance_type(metric).where(where, prefilter=True)
            if exact or metric != trained_metric(table):
                asked = asked.bypass_vector_index()
            else:
                asked = asked.refine_factor(REFINE)
            rows = asked.select(_FOUND).limit(k).to_arrow().to_pylist()
        return [
            Neighbour(
                distance=row.pop("_distance"),
                metadata=neighbours.unpacked(row.pop("metadata")),
                **row,
            )
            for row in rows
        ]

    def get(self, vector_id: str, *, namespace: str = "default") -> IndexedVector | None:
        """One vector, or None if there is none."""
        key = quoted(f"{namespace}\0{vector_id}")
        for dimensions in self.dimensions():
            with lance_errors(self.path):
                asked = self.table(dimensions).search().where(f"key = {key} AND deleted = false")
                rows = asked.select(SCANNED).limit(1).to_arrow().to_pylist()
            for row in rows:
                values = np.array(row.pop("vector"), np.float32)
                metadata = neighbours.unpacked(row.pop("metadata"))
                return IndexedVector(values=values, metadata=metadata, **row)
        return None

    def count(self) -> int:
        with lance_errors(self.path):
            return sum(
                int(self.table(found).count_rows("deleted = false")) for found in self.dimensions()
            )

    def dimensions(self) -> list[int]:
        """The dimensions there are tables for."""
        with lance_errors(self.path):
            names = self.database.list_tables().tables
        return sorted(int(name.removeprefix(_PREFIX)) for name in names if _PREFIX in name)

    def table(self, dimensions: int) -> Any:
        found = self._tables.get(dimensions)
        if found is None:
            have = self.dimensions()
            if dimensions not in have:
                raise NotFound(f"the index has no vectors of {dimensions} dimensions, but {have}")
            with lance_errors(self.path):
                found = self.database.open_table(table_name(dimensions))
            self._tables[dimensions] = found
        return found

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Every living vector once."""
        for dimensions in self.dimensions():
            with lance_errors(self.path):
                asked = self.table(dimensions).search().where("deleted = false").select(SCANNED)
                yield from asked.to_batches()

    def close(self) -> None:
        self._tables.clear()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def table_name(dimensions: int) -> str:
    return f"{_PREFIX}{dimensions}"


def trained_metric(table: Any) -> str | None:
    """What an approximate index was trained for, None while there is none."""
    for index in table.list_indices():
        if index.columns == ["vector"]:
            return str(table.index_stats(index.name).distance_type)
    return None


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def lance_errors(path: str) -> Iterator[None]:
    """LanceDB says everything with the built-in exceptions; the caller tries again later."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise Unavailable(f"the index {path} cannot be used: {error}") from error


DAY_MS: Final = 24 * 3600 * 1000
OLD_VERSIONS: Final = timedelta(minutes=5)  # kept for whoever is reading them
STRETCH: Final = 4  # a table that changed little is tidied this much later
CHANGED_SHARE: Final = 10  # "little" is less than this part of its rows
TRAIN_ROWS_MIN: Final = 256  # LanceDB trains no codebook on less


@dataclass
class _OpenTable:
    """A table, and what was done to it since it was tidied."""

    table: Any
    files: NewFiles | None
    writes: int = 0
    rows: int = 0
    metric: str | None = None  # what it was trained for


class IndexSink:
    feed = Feed.STATES
    ordered = False

    def __init__(
        self,
        name: str,
        *,
        path: str,
        pipeline: str = "",
        metric: str = "cosine",
        train_rows: int = 200_000,
        tidy_every: int = 20,
        tombstone_days: float = 7.0,
        storage_options: dict[str, str] | None = None,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        neighbours.check_metric(metric)
        if tidy_every < 1:
            raise InvalidArgument("tidy_every must be at least 1", field="tidy_every", limit=1)
        if train_rows and train_rows < TRAIN_ROWS_MIN:
            raise InvalidArgument(
                f"train_rows must be 0 (never) or at least {TRAIN_ROWS_MIN}",
                field="train_rows",
                limit=TRAIN_ROWS_MIN,
            )
        self.name, self.path = name, path
        self.metric, self.train_rows, self.tidy_every = metric, train_rows, tidy_every
        self._tombstone_ms = int(tombstone_days * DAY_MS)
        self._storage, self._now_ms = storage_options, now_ms
        self._index: Index | None = None
        self._open: dict[int, _OpenTable] = {}

    @property
    def index(self) -> Index:
        assert self._index is not None, "the sink is not open"
        return self._index

    def open(self) -> None:
        local = local_path(self.path)
        if local is not None:
            with lance_errors(self.path):
                local.mkdir(parents=True, exist_ok=True)
        self._index = Index(self.path, storage_options=self._storage)
        self._open = {found: self._opened(found) for found in self.index.dimensions()}

    def write(self, work: Work) -> None:
        states = work.states
        if states is None or not len(states):
            return
        states, rejected = neighbours.searchable(states)
        if len(states):
            rows = index_rows(states)
            held = self._held(dimensions_of(states))
            with lance_errors(self.path):
                _merge(held.table, rows)
            held.writes += 1
            held.rows += len(rows)
            if self._is_due(held):
                self._tidy(held)
            if held.files is not None:
                held.files.sync()
        neighbours.refuse(rejected)

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        return self.index.scan()

    def reset(self) -> None:
        for dimensions in self.index.dimensions():
            with lance_errors(self.path):
                self.index.database.drop_table(table_name(dimensions))
        self.index.close()
        self._open.clear()

    def close(self) -> None:
        self._open.clear()
        if self._index is not None:
            self._index.close()
            self._index = None

    def tidy(self) -> None:
        """Merge fragments, drop old versions and tombstones, train what has grown enough."""
        for held in self._open.values():
            self._tidy(held)
            if held.files is not None:
                held.files.sync()

    def _held(self, dimensions: int) -> _OpenTable:
        if dimensions not in self._open:
            with lance_errors(self.path):
                self.index.database.create_table(
                    table_name(dimensions), schema=table_schema(dimensions), exist_ok=True
                )
            self._open[dimensions] = self._opened(dimensions)
        return self._open[dimensions]

    def _opened(self, dimensions: int) -> _OpenTable:
        table = self.index.table(dimensions)
        local = local_path(self.path)
        files = None if local is None else NewFiles(local / f"{table_name(dimensions)}.lance")
        # Nobody knows how untidy it was left: the first tidying comes soon.
        return _OpenTable(table, files, writes=self.tidy_every // 2, metric=trained_metric(table))

    def _is_due(self, held: _OpenTable) -> bool:
        if held.writes < self.tidy_every:
            return False
        if held.writes >= self.tidy_every * STRETCH:
            return True
        return held.rows * CHANGED_SHARE >= int(held.table.count_rows())

    def _tidy(self, held: _OpenTable) -> None:
        with lance_errors(self.path):
            before_ms = self._now_ms() - self._tombstone_ms
            expired = f"deleted = true AND log_time_ms < {before_ms}"
            if held.table.count_rows(expired):
                held.table.delete(expired)
            held.table.optimize(cleanup_older_than=OLD_VERSIONS)
            if self.train_rows and held.metric is None:
                self._train(held)
        held.writes = held.rows = 0

    def _train(self, held: _OpenTable) -> None:
        if held.table.count_rows("deleted = false") < self.train_rows:
            return
        config = IvfPq(distance_type=self.metric)  # type: ignore[arg-type]
        held.table.create_index("vector", config=config)
        held.metric = self.metric


def table_schema(dimensions: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("key", pa.utf8(), nullable=False),  # namespace, zero, vector_id
            pa.field("namespace", pa.utf8(), nullable=False),
            pa.field("vector_id", pa.utf8(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dimensions)),  # null in a tombstone
            pa.field("metadata", pa.binary()),
            pa.field("deleted", pa.bool_(), nullable=False),
            pa.field("revision", pa.int64(), nullable=False),
            pa.field("log_time_ms", pa.int64(), nullable=False),
        ]
    )


def index_rows(states: pa.Table) -> pa.Table:
    dimensions = dimensions_of(states)
    vectors = pa.FixedSizeListArray.from_arrays(
        pa.array(neighbours.values_of(states["vector"]).reshape(-1)),
        dimensions,
        mask=pa.array(states["deleted"].to_numpy()),
    )
    schema = table_schema(dimensions)
    columns = {name: states[name] for name in schema.names if name != "key"}
    columns |= {"key": vector_keys(states), "vector": vectors}
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _merge(table: Any, rows: pa.Table) -> None:
    merge = table.merge_insert("key").use_index(False)
    merge = merge.when_matched_update_all(where="source.revision > target.revision")
    merge.when_not_matched_insert_all().execute(rows, on_bad_vectors="null")
