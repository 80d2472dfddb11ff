"""A user's step between the fold and the sinks: a DataFrame of changed vectors in, one out.

    sections ─► DataFrame of STATES ─► the user's function ─► tasks write ─► receipts
      tasks read        (Spark plans all of it as one job)       the sink

The function gets the columns of STATES, with vectors as arrays of floats and metadata as JSON, and
must give them back; it may change rows, leave some out, or give more. A row that it leaves out is
not written, and the sink keeps what it had of that vector: to remove it there, say `deleted`. The
same rows must give the same rows again, as a write that failed is repeated and an audit compares.

Deltas pass it by: a history tells what was written, not what was made of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from penstock.errors import InvalidArgument
from penstock.sinks.protocol import shards_of
from penstock.sinks.schema import STATE_FIELDS, states_by_dimensions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Transform = Callable[["DataFrame"], "DataFrame"]
# STATES as Spark has them: it knows no size of a list.
STATES_IN_SPARK: Final = pa.schema(
    [
        pa.field("namespace", pa.utf8()),
        pa.field("vector_id", pa.utf8()),
        pa.field("vector", pa.list_(pa.float32())),
        *(field.with_nullable(True) for field in STATE_FIELDS),
    ]
)
_DDL: Final = (
    "namespace string, vector_id string, vector array<float>, metadata string, deleted boolean,"
    " revision bigint, time bigint, sequence bigint, partition int, topic string,"
    " log_time_ms bigint, lane tinyint"
)
ROWS: Final = 10_000  # of a batch on its way through Spark
_SHARD: Final = "_shard"


def transform_named(text: str, *, field: str) -> Transform:
    """The function that `module:function` names. What it has executors do travels there with the
    code of its module, which they need not have."""
    from pyspark import cloudpickle

    module, _, name = text.partition(":")
    try:
        loaded = import_module(module)
        found = getattr(loaded, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(f"{text} cannot be loaded: {error}", field=field) from error
    if not callable(found):
        raise InvalidArgument(f"{text} is no function", field=field)
    cloudpickle.register_pickle_by_value(loaded)  # type: ignore[no-untyped-call]
    transform: Transform = found
    return transform


def changed_states(
    tasks: DataFrame, transform: Transform, *, read: Callable[[Any], Iterable[pa.Table]]
) -> DataFrame:
    """What a function makes of the states that `read` gives of each task, which `tasks` has pickled
    in its rows; with the columns that STATES has."""
    changed = transform(tasks.mapInArrow(partial(_read, read), _DDL))
    check_columns(dict(changed.dtypes))
    return changed.select(*STATES_IN_SPARK.names)


def frame_of(session: SparkSession, tasks: Sequence[Any]) -> DataFrame:
    """A row for each task, in partitions of their own as far as Spark will have it."""
    rows = [(bytearray(pickle.dumps(task)),) for task in tasks]
    return session.createDataFrame(rows, "task binary").repartition(len(rows))


def transformed(
    tasks: DataFrame,
    transform: Transform,
    *,
    read: Callable[[Any], Iterable[pa.Table]],
    write: Callable[[Iterator[pa.Table]], Any],
    shards: int,
    slots: int,
) -> list[Any]:
    """Run a write through a user's function; the answers of `write`, each of one task.

    `tasks` and `read` are as for `changed_states`. `write` is given the rows of
    one partition of what the function returned; a shard's rows are all in one.
    """
    changed = changed_states(tasks, transform, read=read)
    if shards > 1:
        sharded = changed.mapInArrow(partial(_with_shard, shards), f"{_DDL}, {_SHARD} int")
        changed = sharded.repartition(slots, _SHARD).drop(_SHARD)
    else:
        changed = changed.coalesce(1 if shards else slots)
    answers = changed.mapInArrow(partial(_write, write), "answer binary").collect()
    return [pickle.loads(row.answer) for row in answers]


def check_columns(given: Mapping[str, str]) -> None:
    wanted = dict(column.strip().rsplit(" ", 1) for column in _DDL.split(","))
    for name, kind in wanted.items():
        if given.get(name) != kind:
            raise InvalidArgument(
                f"the transform gives {name} as {given.get(name, 'nothing')}, must be {kind}",
                field="transform",
                limit=kind,
            )


def _read(
    read: Callable[[Any], Iterable[pa.Table]], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for task in batch["task"].to_pylist():
            for table in read(pickle.loads(task)):
                rows = table.select(STATES_IN_SPARK.names).cast(STATES_IN_SPARK)
                yield from rows.to_batches(max_chunksize=ROWS)


def _with_shard(shards: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.append_column(_SHARD, pa.array(shards_of(batch) % shards, pa.int32()))


def _write(
    write: Callable[[Iterator[pa.Table]], Any], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    answer = write(states_of(batches))
    yield pa.record_batch({"answer": pa.array([pickle.dumps(answer)], pa.binary())})


def states_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Rows from Spark as STATES, those of one number of dimensions together."""
    for batch in batches:
        if batch["vector"].null_count:
            raise InvalidArgument("the transform gives a vector that is null", field="transform")
        yield from states_by_dimensions(pa.Table.from_batches([batch]))
