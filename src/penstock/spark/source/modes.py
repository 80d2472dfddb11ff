"""What a row is: a message, a delta, a whole log batch, or only the range that one would read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidArgument
from penstock.spark.source.ranges import Ranges, ReadRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from penstock.spark.source.options import ReadOptions

RANGES: Final[dict[str, str]] = {
    "topic": "string",
    "partition": "int",
    "from": "bigint",
    "to": "bigint",
    "bytes": "bigint",
}


def columns_of(mode: str) -> dict[str, str]:
    """The columns of a mode with their types in Spark's words."""
    if mode == "ranges":
        return RANGES
    if mode == "envelopes":
        from penstock.spark.source.rows import ENVELOPES

        return ENVELOPES
    return {name: column.type for name, column in _table(mode).items()}


def schema_of(mode: str) -> str:
    return ", ".join(f"`{name}` {type_}" for name, type_ in columns_of(mode).items())


def check_schema(schema: StructType, mode: str) -> None:
    """A caller may ask for some of a mode's columns (`.schema(...)`), each with its own type."""
    known = columns_of(mode)
    for field in schema:
        kind = field.dataType.simpleString()
        if known.get(field.name) != kind:
            raise InvalidArgument(
                f"mode {mode} has no column {field.name} {kind}: it has {schema_of(mode)}",
                field="schema",
            )


def read(
    options: ReadOptions, schema: StructType, part: Any, *, namespaces: frozenset[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of one task."""
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow = to_arrow_schema(schema, timezone="UTC")
    if isinstance(part, Ranges):
        yield from _planned(part, arrow)
    if not isinstance(part, ReadRange):
        return  # Spark makes up a partition where there is nothing to read
    access = options.node.access()
    slices = access.read_range(part.topic, part.partition, part.first, part.last)
    for batches in slices:
        found = _rows(options.mode, batches, arrow, part=part, namespaces=namespaces)
        if found is not None:
            yield found


def _rows(
    mode: str, batches: Any, arrow: pa.Schema, *, part: ReadRange, namespaces: frozenset[str] | None
) -> pa.RecordBatch | None:
    if mode == "envelopes":
        from penstock.spark.source.rows import envelope_batch

        return envelope_batch(batches, arrow, topic=part.topic, first=part.first, last=part.last)
    from penstock.spark.source.rows import pieces, record_batch, source_of

    found = pieces(batches, first=part.first, last=part.last)
    if not found:
        return None
    if mode == "deltas":
        from penstock.spark.source.rows import delta_batch

        return delta_batch(found, arrow, topic=part.topic, namespaces=namespaces)
    return record_batch(_table(mode), arrow, source_of(part.topic, found))


def _planned(part: Ranges, arrow: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    if not part.rows:
        return
    values = {
        "topic": [found.topic for found, _ in part.rows],
        "partition": [found.partition for found, _ in part.rows],
        "from": [found.first for found, _ in part.rows],
        "to": [found.last for found, _ in part.rows],
        "bytes": [size for _, size in part.rows],
    }
    arrays = [pa.array(values[field.name], field.type) for field in arrow]
    yield pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _table(mode: str) -> Any:
    if mode == "deltas":
        from penstock.spark.source.rows import DELTAS

        return DELTAS
    from penstock.spark.source.rows import MESSAGES

    return MESSAGES
