"""A nearest-neighbour index in the node's own memory: a search sees a change at once.

HNSW graphs of usearch, one per namespace and number of dimensions, so that a namespace is searched
alone without a filter. Nothing of it is on disk: the sink is `volatile`, it begins empty and is
filled from the log when the node starts.

One thread writes; searches come from others. A graph is changed under a lock, which a search holds
as well: usearch lets readers beside a writer, but not beside a removal and the add that follows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from usearch.compiled import MetricKind
from usearch.index import Index as Graph
from usearch.index import search as nearest_rows

from penstock.errors import NotFound
from penstock.sinks import conditions, neighbours
from penstock.sinks.conditions import Condition
from penstock.sinks.neighbours import Neighbour
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import dimensions_of, scanned_rows
from penstock.sinks.texts import map_of

_METRICS: Final = {"cosine": "cos", "l2": "l2sq", "dot": "ip"}
_KINDS: Final = {"cosine": MetricKind.Cos, "l2": MetricKind.L2sq, "dot": MetricKind.IP}
_FARTHER: Final = 8  # times as many are asked for when too few of the nearest will do
_SCAN_ROWS: Final = 1000

Name = tuple[str, str]  # namespace, vector id
Takes = Callable[[str | None, int], bool]  # metadata, partition: whether a search is about it


class _Candidate(NamedTuple):
    """A vector as it was when the graph was asked."""

    key: int
    namespace: str
    vector_id: str
    distance: float
    revision: int
    metadata: str | None
    partition: int

    def neighbour(self) -> Neighbour:
        return Neighbour(
            namespace=self.namespace,
            vector_id=self.vector_id,
            distance=self.distance,
            revision=self.revision,
            metadata=map_of(self.metadata),
        )


def _judge(partitions: Collection[int] | None, condition: Condition | None) -> Takes:
    def takes(metadata: str | None, partition: int) -> bool:
        if partitions is not None and partition not in partitions:
            return False
        return condition is None or condition.matches(map_of(metadata))

    return takes


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
            self._metadata: list[str | None] = []  # JSON texts
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
        where: Mapping[str, Any] | None = None,
    ) -> list[Neighbour]:
        """The `k` nearest vectors by the sink's metric, of those whose metadata match `where`
        (`penstock.sinks.conditions`); approximate, as HNSW is. Those of other partitions than
        these, which it may be about to forget, are left out."""
        query = neighbours.checked_query(vector, k, self.metric)
        takes = _judge(partitions, None if where is None else conditions.read(where))
        found: list[_Candidate] = []
        for graph in self._graphs_of(namespace, len(query)):
            found += self._nearest(graph, query, k, takes)
        return [one.neighbour() for one in sorted(found, key=lambda one: one.distance)[:k]]

    def _graphs_of(self, namespace: str | None, dimensions: int) -> list[Graph]:
        with self._lock:
            held = list(self._graphs.items())
        if not any(size == dimensions for (_, size), _ in held):
            have = sorted({size for (_, size), _ in held})
            raise NotFound(f"the index has no vectors of {dimensions} dimensions, but {have}")
        return [g for (name, d), g in held if d == dimensions and namespace in (None, name)]

    def _nearest(
        self, graph: Graph, query: NDArray[np.float32], k: int, takes: Takes
    ) -> list[_Candidate]:
        """Others than those that it is about may stand nearer: then it looks farther, and at last
        at every vector. The lock is not held while candidates are judged."""
        for count in (k, _FARTHER * k):
            with self._lock:
                found, size = graph.search(query, count), len(graph)
                pairs = zip(found.keys.tolist(), found.distances.tolist(), strict=True)
                candidates = [self._candidate(key, distance) for key, distance in pairs]
            taken = [one for one in candidates if takes(one.metadata, one.partition)]
            if len(taken) >= k or len(taken) == size:
                return taken
        return self._nearest_of_all(graph, query, k, takes)

    def _nearest_of_all(
        self, graph: Graph, query: NDArray[np.float32], k: int, takes: Takes
    ) -> list[_Candidate]:
        with self._lock:
            keys = np.asarray(graph.keys).tolist()
            held = [(self._metadata[key], self._partitions[key]) for key in keys]
        judged = [(key, one) for key, one in zip(keys, held, strict=True) if takes(*one)]
        with self._lock:  # What has changed since is judged as it is now.
            taken = [
                self._candidate(key)
                for key, one in judged
                if self._dimensions[key] == len(query)
                and ((now := (self._metadata[key], self._partitions[key])) == one or takes(*now))
            ]
            if not taken:
                return []
            vectors = np.asarray(graph.get(np.array([one.key for one in taken], np.uint64)))
        found = nearest_rows(vectors, query, min(k, len(taken)), _KINDS[self.metric], exact=True)
        pairs = zip(found.keys.tolist(), found.distances.tolist(), strict=True)
        return [taken[row]._replace(distance=distance) for row, distance in pairs]

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

    def _candidate(self, key: int, distance: float = 0.0) -> _Candidate:
        return _Candidate(
            key, *self._names[key], distance, self._revisions[key], self._metadata[key],
            self._partitions[key],
        )  # fmt: skip

    def _rows(self, keys: list[int], dimensions: int) -> pa.RecordBatch:
        rows = []
        with self._lock:
            for key in keys:
                namespace, vector_id = self._names[key]
                values = np.asarray(self._graphs[namespace, dimensions].get(key)).reshape(-1)
                held = self._metadata[key], self._revisions[key]
                rows.append((namespace, vector_id, values, *held))
        return scanned_rows(rows)
