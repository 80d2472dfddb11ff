"""The nearest-neighbour index, for those who ask it: LanceDB tables, one per dimension.

A deleted vector stays as a row without a vector, its tombstone, so that a late, older state cannot
bring it back. No answer contains tombstones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import lancedb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import NotFound, Unavailable
from penstock.sinks.neighbours import Metric, Neighbour, checked_query, unpacked

SCANNED: Final = ["namespace", "vector_id", "vector", "metadata", "revision"]
REFINE: Final = 10  # an approximate answer is chosen among so many times more candidates
_FOUND: Final = ["namespace", "vector_id", "metadata", "revision", "_distance"]
_PREFIX: Final = "vectors_"


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A vector as the index has it."""

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
                path,
                read_consistency_interval=timedelta(0),
                storage_options=storage_options,
            )
        self._tables: dict[int, Any] = {}

    def search(
        self,
        vector: Sequence[float] | NDArray[np.floating[Any]],
        k: int = 10,
        *,
        namespace: str | None = None,
        metric: Metric = "cosine",
        exact: bool = False,
    ) -> list[Neighbour]:
        """The `k` nearest vectors. Approximate where the index has been trained for `metric`,
        unless `exact`; a table too small to be worth training is always searched exactly."""
        query = checked_query(vector, k, metric)
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
                namespace=row["namespace"],
                vector_id=row["vector_id"],
                distance=row["_distance"],
                revision=row["revision"],
                metadata=unpacked(row["metadata"]),
            )
            for row in rows
        ]

    def get(self, vector_id: str, *, namespace: str = "default") -> Vector | None:
        """One vector, or None if there is none."""
        key = quoted(f"{namespace}\0{vector_id}")
        for dimensions in self.dimensions():
            with lance_errors(self.path):
                asked = self.table(dimensions).search().where(f"key = {key} AND deleted = false")
                rows = asked.select(SCANNED).limit(1).to_arrow().to_pylist()
            for row in rows:
                return Vector(
                    namespace=namespace,
                    vector_id=vector_id,
                    values=np.array(row["vector"], np.float32),
                    revision=row["revision"],
                    metadata=unpacked(row["metadata"]),
                )
        return None

    def count(self) -> int:
        """How many vectors it has."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def lance_errors(path: str) -> Iterator[None]:
    """LanceDB says everything with the built-in exceptions; the caller tries again later."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise Unavailable(f"the index {path} cannot be used: {error}") from error
