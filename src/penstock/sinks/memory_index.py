"""A nearest-neighbour index in the node's own memory: a search sees a change at once.

HNSW graphs of usearch, one per namespace and number of dimensions, so that a namespace is searched
alone without a filter. Nothing of it is on disk: the sink is `volatile`, it begins empty and is
filled from the log when the node starts.

One thread writes; searches come from others. A graph is changed under a lock, which a search holds
as well: usearch lets readers beside a writer, but not beside a removal and the add that follows it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from usearch.index import Index as Graph

from penstock.errors import NotFound
from penstock.sinks import neighbours
from penstock.sinks.neighbours import Neighbour
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import dimensions_of, scanned_rows

_METRICS: Final = {"cosine": "cos", "l2": "l2sq", "dot": "ip"}
_SCAN_ROWS: Final = 1000

Name = tuple[str, str]  # namespace, vector id


class MemoryIndexSink:
    feed = Feed.STATES
    ordered = False
    volatile = True  # what it holds is gone with the process

    def __init__(
        self, name: str, *, metric: str = "cosine", connectivity: int = 16, effort: int = 64
    ) -> None:
        neighbours.check_metric(metric)
        self.name, self.metric = name, metric
        self._connectivity, self._effort = connectivity, effort
        self._lock = threading.Lock()
        self.reset()

    def open(self) -> None:
        """There is nothing to reach."""

    def reset(self) -> None:
        with self._lock:
            self._graphs: dict[tuple[str, int], Graph] = {}
            # By key in the graphs. A deleted vector keeps its row: an older state must not win.
            self._names: list[Name] = []
            self._keys: dict[Name, int] = {}
            self._revisions: list[int] = []
            self._metadata: list[bytes | None] = []
            self._dimensions: list[int] = []  # 0: deleted
            self._partitions: list[int] = []  # of the log

    def write(self, work: Work) -> None:
        states = work.states
        if states is None or not len(states):
            return
        states, rejected = neighbours.searchable(states)
        with self._lock:
            self._merge(states)
        neighbours.refuse(rejected)

    def forget(self, partition: int) -> None:
        """Another node indexes this partition now. Searches go on between two handfuls."""
        keys = [key for key, home in enumerate(self._partitions) if home == partition]
        for at in range(0, len(keys), _SCAN_ROWS):
            with self._lock:
                for key in keys[at : at + _SCAN_ROWS]:
                    self._forget(key)
                    self._revisions[key], self._metadata[key] = -1, None

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        with self._lock:
            alive = [key for key, dimensions in enumerate(self._dimensions) if dimensions]
        for dimensions in sorted({self._dimensions[key] for key in alive}):
            keys = [key for key in alive if self._dimensions[key] == dimensions]
            for at in range(0, len(keys), _SCAN_ROWS):
                yield self._rows(keys[at : at + _SCAN_ROWS], dimensions)

    def close(self) -> None:
        """It goes on holding what it holds, for who searches."""

    def search(
        self,
        vector: Sequence[float] | NDArray[np.floating[Any]],
        k: int = 10,
        *,
        namespace: str | None = None,
        partitions: Collection[int] | None = None,
    ) -> list[Neighbour]:
        """The `k` nearest vectors by the sink's metric; approximate, as HNSW is. Those of other
        partitions than these, which it may be about to forget, are left out."""
        query = neighbours.checked_query(vector, k, self.metric)
        with self._lock:
            graphs = [
                graph
                for (name, dimensions), graph in self._graphs.items()
                if dimensions == len(query) and namespace in (None, name)
            ]
            if not graphs and not any(d == len(query) for _, d in self._graphs):
                have = sorted({dimensions for _, dimensions in self._graphs})
                raise NotFound(f"the index has no vectors of {len(query)} dimensions, but {have}")
            found: list[tuple[float, int]] = []
            for graph in graphs:
                found += self._nearest(graph, query, k, partitions)
            return [self._neighbour(key, distance) for distance, key in sorted(found)[:k]]

    def __len__(self) -> int:
        return sum(1 for dimensions in self._dimensions if dimensions)

    # --- inside; the lock is held ---

    def _merge(self, states: pa.Table) -> None:
        dimensions, values = dimensions_of(states), neighbours.values_of(states["vector"])
        added: dict[str, tuple[list[int], list[int]]] = {}  # namespace: keys, rows
        columns = (states[name].to_pylist() for name in ("namespace", "vector_id", "revision"))
        deleted, metadata = states["deleted"].to_pylist(), states["metadata"].to_pylist()
        partitions = states["partition"].to_pylist()
        for row, (namespace, vector_id, revision) in enumerate(zip(*columns, strict=True)):
            key = self._key((namespace, vector_id))
            if revision <= self._revisions[key]:
                continue
            self._forget(key)
            self._revisions[key], self._metadata[key] = revision, metadata[row]
            self._partitions[key] = partitions[row]
            if not deleted[row]:
                self._dimensions[key] = dimensions
                keys, rows = added.setdefault(namespace, ([], []))
                keys.append(key)
                rows.append(row)
        for namespace, (keys, rows) in added.items():
            self._graph(namespace, dimensions).add(np.array(keys, np.uint64), values[rows])

    def _nearest(
        self, graph: Graph, query: NDArray[np.float32], k: int, partitions: Collection[int] | None
    ) -> list[tuple[float, int]]:
        """Distances and keys. Others than those of the partitions may stand nearer: then it looks
        farther."""
        wanted = k
        while True:
            matches = graph.search(query, wanted)
            found = list(zip(matches.distances.tolist(), matches.keys.tolist(), strict=True))
            if partitions is not None:
                found = [one for one in found if self._partitions[one[1]] in partitions]
            if len(found) >= k or wanted >= len(graph):
                return found
            wanted = min(2 * wanted, len(graph))

    def _key(self, name: Name) -> int:
        key = self._keys.setdefault(name, len(self._names))
        if key == len(self._names):
            self._names.append(name)
            self._revisions.append(-1)
            self._metadata.append(None)
            self._dimensions.append(0)
            self._partitions.append(-1)
        return key

    def _forget(self, key: int) -> None:
        dimensions = self._dimensions[key]
        if dimensions:
            self._graphs[self._names[key][0], dimensions].remove(key)
            self._dimensions[key] = 0

    def _graph(self, namespace: str, dimensions: int) -> Graph:
        found = self._graphs.get((namespace, dimensions))
        if found is None:
            found = Graph(
                ndim=dimensions,
                metric=_METRICS[self.metric],
                dtype="f32",
                connectivity=self._connectivity,
                expansion_add=self._effort,
                expansion_search=self._effort,
            )
            self._graphs[namespace, dimensions] = found
        return found

    def _neighbour(self, key: int, distance: float) -> Neighbour:
        namespace, vector_id = self._names[key]
        return Neighbour(
            namespace=namespace,
            vector_id=vector_id,
            distance=distance,
            revision=self._revisions[key],
            metadata=neighbours.unpacked(self._metadata[key]),
        )

    def _rows(self, keys: list[int], dimensions: int) -> pa.RecordBatch:
        rows = []
        with self._lock:
            for key in keys:
                namespace, vector_id = self._names[key]
                values = np.asarray(self._graphs[namespace, dimensions].get(key)).reshape(-1)
                held = self._metadata[key], self._revisions[key]
                rows.append((namespace, vector_id, values, *held))
        return scanned_rows(rows)
