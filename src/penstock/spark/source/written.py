"""What a DataFrame must look like to be written, and its rows as messages.

Either `value` with priority, key and headers beside it, or the columns of deltas as `mode=deltas`
reads them: then each row becomes the payload of one delta.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray
from pyspark.sql.types import StructType

from penstock.errors import InvalidArgument
from penstock.model.delta import Delta, Op, PriorityClass, Source, encode
from penstock.model.topic import TopicConfig, TopicKind

_TEXT: Final = ("binary", "string")
_WHOLE: Final = ("bigint", "int", "smallint", "tinyint")
_MAP: Final = ("map<string,string>",)
# Each column with the types that it may have, in Spark's words.
MESSAGE: Final[dict[str, tuple[str, ...]]] = {
    "value": _TEXT,
    "priority": _WHOLE,
    "key": _TEXT,
    "headers": _MAP,
}
DELTA: Final[dict[str, tuple[str, ...]]] = {
    "namespace": ("string",),
    "vector_id": ("string",),
    "op": ("string",),
    "origin": ("string",),
    "delta_time": ("bigint",),
    "delta_id": ("binary",),
    "parent": ("binary",),
    "clock": ("map<string,bigint>",),
    "indices": ("array<int>",),
    "values": ("array<float>",),
    "metadata": ("string",),
    "priority": _WHOLE,
    "source": ("string",),
    "headers": _MAP,
}
DELTA_NEEDED: Final = ("namespace", "vector_id", "op", "origin", "delta_time")


def check_schema(schema: StructType) -> None:
    """Refuse a DataFrame that is neither messages nor deltas."""
    given = {field.name: field.dataType.simpleString() for field in schema}
    allowed, needed = (MESSAGE, ()) if "value" in given else (DELTA, DELTA_NEEDED)
    for name in needed:
        if name not in given:
            raise InvalidArgument(
                f"write a column value, or a delta's {', '.join(needed)}: {name} is missing",
                field=name,
            )
    for name, kind in given.items():
        if kind not in allowed.get(name, ()):
            known = ", ".join(f"{n} {' or '.join(kinds)}" for n, kinds in allowed.items())
            raise InvalidArgument(
                f"no column {name} {kind} is written: there are {known}", field=name
            )


class Columns:
    """The rows of a record batch as a message has them; `first` of them went before."""

    def __init__(
        self, batch: pa.RecordBatch, config: TopicConfig, *, producer: str, first: int
    ) -> None:
        self._batch = batch
        if "value" in batch.schema.names:
            self.payloads = _bytes(batch.column("value"), field="value")
        else:
            self.payloads = _encoded(batch, config, producer=producer, first=first)
        self.keys = None
        if "key" in batch.schema.names and config.kind is TopicKind.QUEUE:
            self.keys = _bytes(batch.column("key"), field="key", nulls=True)

    @property
    def priorities(self) -> NDArray[np.int64] | None:
        if "priority" not in self._batch.schema.names:
            return None
        found = self._batch.column("priority")
        return np.asarray(pc.fill_null(found.cast(pa.int64()), 0))

    @property
    def headers(self) -> pa.BinaryArray | None:
        if "headers" not in self._batch.schema.names:
            return None
        rows = self._batch.column("headers").to_pylist()
        return pa.array([_headers(tuple(row)) if row else None for row in rows], pa.binary())


@lru_cache(maxsize=4096)
def _headers(pairs: tuple[tuple[str, str], ...]) -> bytes:
    return msgspec.msgpack.encode(dict(pairs))


def _bytes(column: pa.Array, *, field: str, nulls: bool = False) -> pa.BinaryArray:
    if column.null_count and not nulls:
        raise InvalidArgument(f"{field} is null in some row", field=field)
    return column.cast(pa.binary())


def _encoded(
    batch: pa.RecordBatch, config: TopicConfig, *, producer: str, first: int
) -> pa.BinaryArray:
    if config.kind is not TopicKind.DELTA:
        raise InvalidArgument(
            f"{config.name} is no delta topic: write a column value", field="topic"
        )
    payloads = [
        encode(_delta(row, f"{producer}:{number}"), dimensions=config.dimensions)
        for number, row in enumerate(batch.to_pylist(), first)
    ]
    return pa.array(payloads, pa.binary())


def _delta(row: dict[str, Any], seed: str) -> Delta:
    """A row's delta. Without an id it gets one that its place in the write implies; without a
    clock it is the first of its vector from its origin."""
    origin = row["origin"]
    priority, source = row.get("priority"), row.get("source")
    clock = dict(row.get("clock") or ()) or {origin: 1}
    metadata = row.get("metadata")
    return Delta(
        delta_id=row.get("delta_id") or xxhash.xxh3_128_digest(seed.encode()),
        namespace=row["namespace"],
        vector_id=row["vector_id"],
        op=_named(Op, row["op"], "op"),
        origin=origin,
        time=row["delta_time"],
        parent=row.get("parent"),
        clock=clock,
        indices=row.get("indices"),
        values=row.get("values") or None,
        metadata=None if metadata is None else msgspec.json.decode(metadata, type=dict[str, Any]),
        priority=PriorityClass.NORMAL if priority is None else PriorityClass(priority),
        source=Source.TRANSFORM if source is None else _named(Source, source, "source"),
    )


def _named(kind: Any, name: str, field: str) -> Any:
    try:
        return kind[name.upper()]
    except (KeyError, AttributeError) as error:
        words = [member.name.lower() for member in kind]
        raise InvalidArgument(
            f"{field} is one of {', '.join(words)}, not {name}", field=field, limit=words
        ) from error
