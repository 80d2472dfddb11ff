"""A history's deltas as payloads, many at a time.

Rows of one shape (operation, length of the clock, namespace) have payloads of one length, so each
shape is laid out as a matrix of bytes and cut into rows. What a delta carries depends on its index
in the history alone, not on how the rows are asked for.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.demo.corpus.history import History
from penstock.model.delta import Op, Source

_HEADER: Final = np.dtype(
    {
        "names": ["version", "op", "priority", "source", "n", "n_clock", "flags", "delta_id",
                  "parent", "origin", "time", "vector", "namespace", "vector_id", "metadata"],
        "formats": ["u1", "u1", "u1", "u1", "<u2", "u1", "u1", "V16", "V16", "V16", "<i8", "V16",
                    "<u2", "<u2", "<u4"],
        "offsets": [0, 1, 2, 3, 4, 6, 7, 8, 24, 40, 56, 64, 80, 82, 84],
        "itemsize": 88,
    }
)  # fmt: skip
_COUNTER: Final = np.dtype([("origin", "V16"), ("counter", "<u8")])
_HAS_PARENT, _HAS_INDICES, _HAS_METADATA = 1, 2, 4
_DENSE: Final = (Op.CREATE, Op.DENSE)
_SPARSE: Final = (Op.SPARSE, Op.OFFSET)
_DESCRIBED: Final = (Op.CREATE, Op.METADATA)
_ID_DIGITS: Final = 9


def names_of(namespaces: tuple[str, ...], vector: int) -> tuple[str, str]:
    """The namespace and id of a vector; ids all have one length."""
    return namespaces[vector % len(namespaces)], f"v{vector:0{_ID_DIGITS}d}"


class Encoder:
    """Payloads of a history's deltas, by index."""

    def __init__(
        self,
        history: History,
        *,
        rng: np.random.Generator,
        dimensions: int,
        components: int,
        namespaces: tuple[str, ...],
    ) -> None:
        self._history, self._namespaces = history, namespaces
        self._dimensions, self._components = dimensions, components
        count, ops = len(history), history.op
        self._pool = np.zeros(count, np.int64)  # row of a delta in the values of its shape
        for kinds in (_DENSE, _SPARSE):
            of_kind = np.isin(ops, kinds)
            self._pool[of_kind] = np.arange(np.count_nonzero(of_kind))
        dense, sparse = (np.count_nonzero(np.isin(ops, kinds)) for kinds in (_DENSE, _SPARSE))
        self._dense = rng.random((dense, dimensions), np.float32) * 2 - 1
        self._sparse = rng.random((sparse, components), np.float32) * 2 - 1
        self._factors = rng.random(count, np.float32) + np.float32(0.5)
        # Sorted draws with repetition, spread by their rank: increasing and distinct.
        drawn = rng.integers(0, dimensions - components + 1, (sparse, components), np.uint16)
        drawn.sort(axis=1)
        self._indices = drawn + np.arange(components, dtype=np.uint16)
        origins = [f"writer-{n}".encode().ljust(16, b"\0") for n in range(history.clock.shape[1])]
        self._origins = np.array(origins, "V16")

    @cached_property
    def _hashes(self) -> NDArray[Any]:
        """The hash of each vector's name, by vector."""
        digests = []
        for vector in range(int(self._history.vector.max()) + 1):
            namespace, vector_id = names_of(self._namespaces, vector)
            digests.append(xxhash.xxh3_128_digest(f"{namespace}\0{vector_id}".encode()))
        return np.array(digests, "V16")

    def payloads(self, rows: NDArray[np.int64]) -> list[bytes]:
        """The payloads of the deltas `rows`, in that order."""
        history = self._history
        lengths = np.count_nonzero(history.clock[rows], axis=1)
        spaces = history.vector[rows] % len(self._namespaces)
        shape = (history.op[rows].astype(np.int64) << 32) | (lengths << 16) | spaces
        found = np.empty(len(rows), object)
        for one in np.unique(shape):
            at = np.flatnonzero(shape == one)
            matrix = self._matrix(
                rows[at],
                Op(int(one) >> 32),
                clock=(int(one) >> 16) & 0xFFFF,
                namespace=self._namespaces[int(one) & 0xFFFF].encode(),
            )
            found[at] = matrix.view(f"V{matrix.shape[1]}").ravel().tolist()
        return found.tolist()

    def _matrix(
        self, rows: NDArray[np.int64], op: Op, *, clock: int, namespace: bytes
    ) -> NDArray[np.uint8]:
        """The payloads of deltas of one shape, one per row."""
        indices, values = self._components_of(rows, op)
        metadata = _metadata(rows) if op in _DESCRIBED else np.empty((len(rows), 0), np.uint8)
        digits = _digits(self._history.vector[rows], _ID_DIGITS)
        name = np.frombuffer(namespace + b"v", np.uint8)
        header = self._header(rows, op)
        header["n"], header["n_clock"] = values.shape[1], clock
        header["namespace"], header["vector_id"] = len(namespace), 1 + _ID_DIGITS
        header["metadata"] = metadata.shape[1]
        header["flags"] |= _HAS_INDICES * (indices.shape[1] > 0)
        header["flags"] |= _HAS_METADATA * (metadata.shape[1] > 0)
        parts = [_bytes(header), self._clock(rows, clock), _bytes(indices), _bytes(values)]
        parts += [np.broadcast_to(name, (len(rows), len(name))), digits, metadata]
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    def _header(self, rows: NDArray[np.int64], op: Op) -> NDArray[Any]:
        history = self._history
        parent = history.parent[rows]
        header = np.zeros((len(rows), 1), _HEADER)
        one = header[:, 0]
        one["version"], one["op"], one["source"] = 1, op, Source.WRITER
        one["priority"] = history.priority[rows]
        one["flags"] = _HAS_PARENT * (parent >= 0)
        identity = history.delta_id.view("V16").ravel()
        one["delta_id"] = identity[rows]
        one["parent"][parent >= 0] = identity[parent[parent >= 0]]
        one["origin"] = self._origins[history.origin[rows]]
        one["time"] = history.time[rows]
        one["vector"] = self._hashes[history.vector[rows]]
        return header

    def _clock(self, rows: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """Counters of the origins that were seen, the writer's own first."""
        seen = self._history.clock[rows]
        rank = (seen > 0).astype(np.int8)
        rank[np.arange(len(rows)), self._history.origin[rows]] = 2
        order = np.argsort(-rank, axis=1, kind="stable")[:, :length]
        entries = np.zeros(order.shape, _COUNTER)
        entries["origin"] = self._origins[order]
        entries["counter"] = np.take_along_axis(seen, order, axis=1)
        return _bytes(entries)

    def _components_of(
        self, rows: NDArray[np.int64], op: Op
    ) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        none = np.empty((len(rows), 0), np.uint16)
        pool = self._pool[rows]
        if op in _SPARSE:
            return self._indices[pool], self._sparse[pool]
        if op in _DENSE:
            return none, self._dense[pool]
        if op is Op.SCALE:
            return none, self._factors[rows, None]
        return none, np.empty((len(rows), 0), np.float32)


def _metadata(rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The msgpack map {"label": five digits} for each row."""
    head = np.frombuffer(b"\x81\xa5label\xa5", np.uint8)
    return np.concatenate([np.broadcast_to(head, (len(rows), len(head))), _digits(rows, 5)], axis=1)


def _digits(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    places = 10 ** np.arange(width - 1, -1, -1)
    return (numbers[:, None] // places % 10 + ord("0")).astype(np.uint8)


def _bytes(columns: NDArray[Any]) -> NDArray[np.uint8]:
    """An array with one row per delta, as the bytes of each row."""
    rows = len(columns)
    width = columns.dtype.itemsize * columns.shape[1]
    return np.ascontiguousarray(columns).view(np.uint8).reshape(rows, width)
