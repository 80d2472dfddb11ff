"""Payloads of many deltas from columns, without an object per delta.

What all deltas of a call have in the same place (header, one clock entry, components, namespace)
is laid out as one matrix of bytes, a column at a time; only the names behind it differ in length
and are joined row by row. That is a microsecond or two per delta, nearly all of it in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.columns import Binary
from penstock.model.delta import (
    HAS_INDICES,
    HAS_METADATA,
    HAS_PARENT,
    NAMESPACE_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
    VERSION,
    Op,
    PriorityClass,
    Source,
)
from penstock.model.delta_batch import FIXED

Ids = NDArray[np.uint8]  # (n, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaColumns:
    """What deltas change: a row each. `values` and `indices` are (n, k); no indices: dense.

    `op` and `priority` are one for all, or a column. Which delta follows which, and when, is
    not here: the writer fills that in.
    """

    vector_ids: Sequence[str] | Sequence[bytes]
    values: NDArray[np.float32]
    indices: NDArray[np.uint16] | None = None
    namespace: str = "default"
    op: Op | NDArray[np.uint8] | None = None  # None: SPARSE with indices, else DENSE
    priority: PriorityClass | NDArray[np.uint8] = PriorityClass.NORMAL
    source: Source = Source.WRITER
    metadata: Sequence[bytes] | None = None  # msgpack maps, or empty
    headers: bytes = b""  # of every message, a msgpack map

    def __len__(self) -> int:
        return len(self.vector_ids)

    def checked(self) -> DeltaColumns:
        """Itself with columns of the right types; `InvalidArgument` for shapes that do not fit."""
        count = len(self.vector_ids)
        values = np.ascontiguousarray(self.values, np.float32)
        if values.ndim != 2 or len(values) != count:
            raise InvalidArgument(f"values must be a matrix of {count} rows", field="values")
        indices = self.indices
        if indices is not None:
            wide = np.asarray(indices)
            if wide.shape != values.shape:
                raise InvalidArgument("indices and values differ in shape", field="indices")
            if wide.size and (wide.min() < 0 or wide.max() > 0xFFFF):
                raise InvalidArgument("an index is out of range", field="indices", limit=0xFFFF)
            indices = np.ascontiguousarray(wide, np.uint16)
        if self.metadata is not None and len(self.metadata) != count:
            raise InvalidArgument(f"metadata must have {count} values", field="metadata")
        return replace(
            self,
            values=values,
            indices=indices,
            op=self._column(self._op, count, "op"),
            priority=self._column(self.priority, count, "priority"),
        )

    @property
    def _op(self) -> Op | NDArray[np.uint8]:
        if self.op is not None:
            return self.op
        return Op.DENSE if self.indices is None else Op.SPARSE

    @staticmethod
    def _column(value: Any, count: int, field: str) -> NDArray[np.uint8]:
        column = np.asarray(value, np.uint8)
        if column.ndim and column.shape != (count,):
            raise InvalidArgument(f"{field} must be one value or {count}", field=field)
        return np.broadcast_to(column, count)


@dataclass(frozen=True, slots=True)
class Names:
    """Vectors by name: UTF-8 ids, and the hashes that stand for (namespace, id)."""

    ids: list[bytes]
    hashes: Ids
    digests: list[bytes]  # the same as `hashes`

    @staticmethod
    def of(namespace: str, vector_ids: Sequence[str] | Sequence[bytes]) -> Names:
        ids = [v.encode() if isinstance(v, str) else bytes(v) for v in vector_ids]
        prefix = namespace.encode() + b"\0"
        _check_length(namespace.encode(), NAMESPACE_BYTES_MAX, "namespace")
        for name in (min(ids, key=len), max(ids, key=len)) if ids else ():
            _check_length(name, VECTOR_ID_BYTES_MAX, "vector_id")
        digest = xxhash.xxh3_128_digest
        digests = [digest(prefix + name) for name in ids]
        hashes = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
        return Names(ids, hashes, digests)


def _check_length(name: bytes, limit: int, field: str) -> None:
    if not 1 <= len(name) <= limit:
        raise InvalidArgument(
            f"{field} has {len(name)} bytes, must be from 1 to {limit}", field=field, limit=limit
        )


@dataclass(frozen=True, slots=True)
class Causes:
    """Which delta each one is and follows: ids, parents (zero: none), own counters, times."""

    delta_ids: Ids
    parents: Ids
    counters: NDArray[np.uint64]
    times: NDArray[np.int64]


def encode_columns(
    columns: DeltaColumns, names: Names, causes: Causes, *, origin: bytes, rows: NDArray[np.int64]
) -> Binary:
    """The payloads of some rows of checked columns, each with a clock of its origin alone."""
    fixed = _fixed(columns, names, causes, origin=origin, rows=rows)
    tails = [names.ids[row] for row in rows.tolist()]
    if columns.metadata is not None:
        tails = [t + columns.metadata[row] for t, row in zip(tails, rows.tolist(), strict=True)]
    width = fixed.shape[1]
    sizes = np.fromiter(map(len, tails), np.int64, len(tails)) + width
    offsets = np.zeros(len(tails) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise InvalidArgument("deltas of one request are over 2 GiB", field="values")
    heads = fixed.tobytes()
    parts = [b""] * (2 * len(tails))
    parts[0::2] = [heads[at : at + width] for at in range(0, len(heads), width)]
    parts[1::2] = tails
    return Binary(offsets.astype(np.int32), b"".join(parts))


def _fixed(
    columns: DeltaColumns, names: Names, causes: Causes, *, origin: bytes, rows: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Everything up to and with the namespace: as long in every row."""
    namespace = np.frombuffer(columns.namespace.encode(), np.uint8)
    blocks = [_bytes(_header(columns, names, causes, origin=origin, rows=rows)[:, None], FIXED)]
    if columns.indices is not None:
        blocks.append(_bytes(columns.indices[rows], "<u2"))
    blocks.append(_bytes(columns.values[rows], "<f4"))
    blocks.append(np.broadcast_to(namespace, (len(rows), len(namespace))))
    return np.concatenate(blocks, axis=1)


def _bytes(matrix: NDArray[Any], dtype: Any) -> NDArray[np.uint8]:
    """A matrix's rows as bytes; it may have no columns."""
    cells = np.ascontiguousarray(matrix, dtype)
    width = cells.shape[1] * cells.itemsize
    return np.frombuffer(cells.tobytes(), np.uint8).reshape(len(cells), width)


def _header(
    columns: DeltaColumns, names: Names, causes: Causes, *, origin: bytes, rows: NDArray[np.int64]
) -> NDArray[Any]:
    head: NDArray[Any] = np.zeros(len(rows), FIXED)
    parents = causes.parents[rows]
    flags = parents.any(axis=1) * np.uint8(HAS_PARENT)
    if columns.indices is not None:
        flags |= np.uint8(HAS_INDICES)
    if columns.metadata is not None:
        lengths = np.fromiter((len(columns.metadata[r]) for r in rows.tolist()), "<u4", len(rows))
        head["metadata_bytes"] = lengths
        flags |= (lengths > 0) * np.uint8(HAS_METADATA)
    head["version"] = VERSION
    head["op"] = np.asarray(columns.op)[rows]
    head["priority"] = np.asarray(columns.priority)[rows]
    head["source"] = columns.source
    head["n"] = columns.values.shape[1]
    head["clocks"] = 1
    head["flags"] = flags
    head["delta_id"] = _pairs(causes.delta_ids[rows])
    head["parent"] = _pairs(parents)
    head["origin"] = head["own"] = np.frombuffer(origin.ljust(16, b"\0"), "<u8")
    head["time"] = causes.times[rows]
    head["vector"] = _pairs(names.hashes[rows])
    head["namespace_bytes"] = len(columns.namespace.encode())
    head["vector_id_bytes"] = np.fromiter(
        (len(names.ids[r]) for r in rows.tolist()), "<u2", len(rows)
    )
    head["counter"] = causes.counters[rows]
    return head


def _pairs(sixteens: Ids) -> NDArray[np.uint64]:
    return np.ascontiguousarray(sixteens).view("<u8")
