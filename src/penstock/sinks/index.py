"""The nearest-neighbour index: LanceDB tables, one per dimension and shard. `Index` asks it,
`IndexSink` keeps it up to date.

A vector belongs to one of the index's *shards*, by the hash of its name. Each shard is a table of
its own, so that as many tasks may merge at a time as there are shards; a question goes to all of
them. How many there are is settled when the index is made.

A deleted vector stays as a row without a vector, its tombstone, so that a late, older state cannot
bring it back. No answer contains tombstones.

The sink merges once per write, keyed by the vector's name: a row is replaced only by a higher
revision, so order and repetition do not matter. A merge adds a fragment and marks the rows it
replaced; both slow later merges and searches down until the table is tidied, which happens every
few writes. Tidying also makes an index of the keys, once a table is so large that scanning its keys
costs more than keeping one, and trains the approximate index, again each time the table has grown
to twice of what that was trained on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any, Final, NamedTuple

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import BTree, IvfPq
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound, Unavailable
from penstock.sinks import conditions, neighbours
from penstock.sinks.conditions import quoted
from penstock.sinks.files import Marks, NewFiles, local_path
from penstock.sinks.neighbours import Neighbour
from penstock.sinks.protocol import (
    SHARDS_MAX,
    Feed,
    InTasks,
    SinkCommit,
    SinkMark,
    Work,
    shards_of,
)
from penstock.sinks.schema import SCANNED, dimensions_of, vector_keys
from penstock.sinks.texts import map_of

REFINE: Final = 10  # an approximate answer is chosen among so many times more candidates
_FOUND: Final = ["namespace", "vector_id", "metadata", "revision", "_distance"]
_TABLE: Final = re.compile(r"vectors_(\d+)(?:_(\d+)_of_(\d+))?")
# LanceDB keeps it in a binary form that its filters look into, with names in alphabetical order.
JSON: Final = pa.json_(pa.utf8())
_STORED_JSON: Final = pa.field(
    "metadata",
    pa.large_binary(),
    metadata={"ARROW:extension:name": "lance.json", "ARROW:extension:metadata": ""},
)


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
        self._tables: dict[TablePlace, Any] = {}

    def search(
        self,
        vector: Sequence[float] | NDArray[np.floating[Any]],
        k: int = 10,
        *,
        namespace: str | None = None,
        metric: neighbours.Metric = "cosine",
        where: Mapping[str, Any] | None = None,
        exact: bool = False,
    ) -> list[Neighbour]:
        """The `k` nearest vectors, of those whose metadata match `where`
        (`penstock.sinks.conditions`). Approximate where the index has been trained for `metric`,
        unless `exact`; a table too small to be worth training is always searched exactly, and so
        are the matching vectors: to find them, all metadata are looked at anyway."""
        query = neighbours.checked_query(vector, k, metric)
        condition = None if where is None else conditions.read(where)
        chosen = "deleted = false"
        if namespace is not None:
            chosen += f" AND namespace = {quoted(namespace)}"
        if condition is not None:
            chosen += f" AND {condition.sql()}"
        with lance_errors(self.path):
            exactly = exact or condition is not None
            rows = [
                row
                for table in self.tables(len(query))
                for row in _nearest(table, query, k, where=chosen, metric=metric, exact=exactly)
            ]
        rows = sorted(rows, key=itemgetter("_distance"))[:k]
        return [
            Neighbour(
                distance=row.pop("_distance"),
                metadata=map_of(row.pop("metadata")),
                **row,
            )
            for row in rows
        ]

    def get(self, vector_id: str, *, namespace: str = "default") -> IndexedVector | None:
        """One vector, or None if there is none."""
        key = quoted(f"{namespace}\0{vector_id}")
        for table in self._all():
            with lance_errors(self.path):
                asked = table.search().where(f"key = {key} AND deleted = false")
                rows = asked.select(SCANNED).limit(1).to_arrow().to_pylist()
            for row in rows:
                values = np.array(row.pop("vector"), np.float32)
                metadata = map_of(row.pop("metadata"))
                return IndexedVector(values=values, metadata=metadata, **row)
        return None

    def count(self) -> int:
        with lance_errors(self.path):
            return sum(int(table.count_rows("deleted = false")) for table in self._all())

    def dimensions(self) -> list[int]:
        """The dimensions there are tables for."""
        return sorted({place.dimensions for place in self.places()})

    def places(self) -> list[TablePlace]:
        with lance_errors(self.path):
            names = self.database.list_tables().tables
        found = [TablePlace.of(name) for name in names]
        return sorted(place for place in found if place is not None)

    def tables(self, dimensions: int) -> list[Any]:
        places = [place for place in self.places() if place.dimensions == dimensions]
        if not places:
            raise NotFound(
                f"the index has no vectors of {dimensions} dimensions, but {self.dimensions()}"
            )
        return [self.table(place) for place in places]

    def table(self, place: TablePlace) -> Any:
        found = self._tables.get(place)
        if found is None:
            with lance_errors(self.path):
                found = self._tables[place] = self.database.open_table(place.name)
        return found

    def _all(self) -> list[Any]:
        return [self.table(place) for place in self.places()]

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Every living vector once."""
        for place in self.places():
            yield from self.scan_table(place)

    def scan_table(self, place: TablePlace) -> Iterator[pa.RecordBatch]:
        with lance_errors(self.path):
            asked = self.table(place).search().where("deleted = false").select(SCANNED)
            yield from map(_scanned, asked.to_batches())

    def close(self) -> None:
        self._tables.clear()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nearest(
    table: Any, query: NDArray[np.float32], k: int, *, where: str, metric: str, exact: bool
) -> list[dict[str, Any]]:
    asked = table.search(query).distance_type(metric).where(where, prefilter=True)
    if exact or metric != trained_metric(table):
        asked = asked.bypass_vector_index()
    else:
        asked = asked.refine_factor(REFINE)
    found: list[dict[str, Any]] = asked.select(_FOUND).limit(k).to_arrow().to_pylist()
    return found


class TablePlace(NamedTuple):
    """Which vectors a table holds."""

    dimensions: int
    shard: int = 0
    shards: int = 1

    @property
    def name(self) -> str:
        alone = f"vectors_{self.dimensions}"
        return alone if self.shards == 1 else f"{alone}_{self.shard}_of_{self.shards}"

    @staticmethod
    def of(name: str) -> TablePlace | None:
        found = _TABLE.fullmatch(name)
        return found and TablePlace(*(int(number) for number in found.groups() if number))


def trained_metric(table: Any) -> str | None:
    """What an approximate index was trained for, None while there is none."""
    name = _named_index(table, "vector")
    return None if name is None else str(table.index_stats(name).distance_type)


def _scanned(batch: pa.RecordBatch) -> pa.RecordBatch:
    at = batch.schema.get_field_index("metadata")
    texts = batch.column(at).cast(pa.utf8())
    return batch.set_column(at, pa.field("metadata", pa.utf8()), texts)


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


KEYED_ROWS: Final = 100_000  # from so many on, finding keys by an index costs less than a scan
GROWN: Final = 2  # times the rows that it was trained on, after which it is trained anew


@dataclass
class _OpenTable:
    """A table, and what was done to it since it was tidied."""

    table: Any
    files: NewFiles | None
    keyed: bool  # an index finds its keys
    writes: int = 0
    rows: int = 0


class IndexSink(InTasks):
    feed = Feed.STATES
    ordered = False

    def __init__(
        self,
        name: str,
        *,
        path: str,
        pipeline: str = "",
        shards: int = 1,
        metric: str = "cosine",
        train_rows: int = 200_000,
        tidy_every: int = 20,
        tombstone_days: float = 7.0,
        storage_options: dict[str, str] | None = None,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        neighbours.check_metric(metric)
        if not 1 <= shards <= SHARDS_MAX or shards & (shards - 1):
            raise InvalidArgument(
                f"shards is {shards}, must be a power of two up to {SHARDS_MAX}",
                field="shards",
                limit=SHARDS_MAX,
            )
        if tidy_every < 1:
            raise InvalidArgument("tidy_every must be at least 1", field="tidy_every", limit=1)
        if train_rows and train_rows < TRAIN_ROWS_MIN:
            raise InvalidArgument(
                f"train_rows must be 0 (never) or at least {TRAIN_ROWS_MIN}",
                field="train_rows",
                limit=TRAIN_ROWS_MIN,
            )
        self.name, self.path, self._pipeline = name, path, pipeline
        self.shards = self._shards_wanted = shards
        self.metric, self.train_rows, self.tidy_every = metric, train_rows, tidy_every
        self._tombstone_ms = int(tombstone_days * DAY_MS)
        self._storage, self._now_ms = storage_options, now_ms
        self._index: Index | None = None
        self._open: dict[TablePlace, _OpenTable] = {}

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
        self._marks = Marks(self.path, storage=self._storage)
        places = self.index.places()
        # An index keeps the shards that it was made with, whatever the options say today.
        self.shards = places[0].shards if places else self._shards_wanted
        self._open = {}

    def write(self, work: Work) -> None:
        states = work.states
        if states is None or not len(states):
            return
        states, rejected = neighbours.searchable(states)
        for shard, rows in self._by_shard(states):
            self._merge(TablePlace(dimensions_of(states), shard, self.shards), rows)
        neighbours.refuse(rejected)

    def _by_shard(self, states: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        if self.shards == 1:
            yield from [(0, states)] if len(states) else []
            return
        owners = shards_of(states) % self.shards
        for shard in np.unique(owners).tolist():
            yield shard, states.filter(pa.array(owners == shard))

    def _merge(self, place: TablePlace, states: pa.Table) -> None:
        held, rows = self._held(place), index_rows(states.combine_chunks())
        with lance_errors(self.path):
            if held.keyed:
                rows = _as_stored(rows)
            merge = held.table.merge_insert("key").use_index(held.keyed)
            merge = merge.when_matched_update_all(where="source.revision > target.revision")
            merge.when_not_matched_insert_all().execute(rows, on_bad_vectors="null")
        held.writes += 1
        held.rows += len(rows)
        if self._is_due(held):
            self._tidy(held)
        if held.files is not None:
            held.files.sync()

    def cursor(self) -> int | None:
        return None

    def commit(self, receipts: Sequence[Any], commit: SinkCommit) -> None:
        with lance_errors(self.path):
            self._marks.write(commit.pipeline, commit.mark)

    def mark(self) -> SinkMark | None:
        with lance_errors(self.path):
            return self._marks.read(self._pipeline)

    def scan(self) -> Iterator[pa.RecordBatch]:
        return self.index.scan()

    def pieces(self) -> list[TablePlace]:
        return self.index.places()

    def scan_piece(self, piece: TablePlace) -> Iterator[pa.RecordBatch]:
        return self.index.scan_table(piece)

    def reset(self) -> None:
        for place in self.index.places():
            with lance_errors(self.path):
                self.index.database.drop_table(place.name)
        with lance_errors(self.path):
            self._marks.clear()
        self.index.close()
        self.shards = self._shards_wanted
        self._open = {}

    def close(self) -> None:
        self._open = {}
        if self._index is not None:
            self._index.close()
            self._index = None

    def tidy(self) -> None:
        """Merge fragments, drop old versions and tombstones, train what has grown enough."""
        for place in self.index.places():
            held = self._held(place)
            self._tidy(held)
            if held.files is not None:
                held.files.sync()

    def _held(self, place: TablePlace) -> _OpenTable:
        if place not in self._open:
            if place not in self.index.places():
                schema = table_schema(place.dimensions)
                with lance_errors(self.path):
                    self.index.database.create_table(place.name, schema=schema)
            self._open[place] = self._opened(place)
        return self._open[place]

    def _opened(self, place: TablePlace) -> _OpenTable:
        table = self.index.table(place)
        local = local_path(self.path)
        files = None if local is None else NewFiles(local / f"{place.name}.lance")
        # Nobody knows how untidy it was left: the first tidying comes soon.
        keyed = _named_index(table, "key") is not None
        return _OpenTable(table, files, keyed=keyed, writes=self.tidy_every // 2)

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
            if not held.keyed and held.table.count_rows() >= KEYED_ROWS:
                held.table.create_index("key", config=BTree())
                held.keyed = True
            if self.train_rows:
                self._train(held.table)
        held.writes = held.rows = 0

    def _train(self, table: Any) -> None:
        """The name of the approximate index says on how many vectors it was trained."""
        rows, name = int(table.count_rows("deleted = false")), _named_index(table, "vector")
        trained = 0 if name is None else int(name.rpartition("_")[2])
        if rows < max(self.train_rows, trained * GROWN):
            return
        config = IvfPq(distance_type=self.metric)  # type: ignore[arg-type]
        table.create_index("vector", config=config, name=f"vector_{rows}")
        if name is not None:
            table.drop_index(name)


def _as_stored(rows: pa.Table) -> pa.Table:
    """Rows whose metadata are in the binary form that LanceDB keeps JSON in. A merge by an index
    takes no other (0.40 ends in a panic), and LanceDB itself is asked to make it: by a table in
    memory, of which an expression over the column gives the bytes instead of the text."""
    at = rows.schema.get_field_index("metadata")
    texts = pa.table({"at": np.arange(rows.num_rows), "metadata": rows["metadata"]})
    made = lancedb.connect("memory://").create_table("texts", texts).search()
    stored = made.select({"at": "at", "stored": "coalesce(metadata, metadata)"})
    found = stored.limit(rows.num_rows).to_arrow().sort_by("at")["stored"]
    return rows.set_column(at, _STORED_JSON, found)


def _named_index(table: Any, column: str) -> str | None:
    return next((str(one.name) for one in table.list_indices() if one.columns == [column]), None)


def table_schema(dimensions: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("key", pa.utf8(), nullable=False),  # namespace, zero, vector_id
            pa.field("namespace", pa.utf8(), nullable=False),
            pa.field("vector_id", pa.utf8(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dimensions)),  # null in a tombstone
            pa.field("metadata", JSON),
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
    metadata = pa.ExtensionArray.from_storage(JSON, states["metadata"].combine_chunks())
    columns |= {"key": vector_keys(states), "vector": vectors, "metadata": metadata}
    return pa.table([columns[name] for name in schema.names], schema=schema)
