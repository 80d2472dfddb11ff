"""A pipeline's sinks and its state as jobs find them while it runs or rests, and jobs on them.

**Progress.** How far a pipeline and its sinks have come is read from its store. The newest manifest
says up to which sequence every partition is folded, and a sink's cursor which trigger it holds. A
sink has *reached* a place in the log when the pipeline has folded up to there and the sink's cursor
is at that trigger.

**Replay** takes a range of the log into sinks once more. The log is folded from its beginning, for
a state is made of all of it. Of what came out, a sink gets the deltas that were released within the
window, and the states, as they are at the window's end, of the vectors those touched. Sinks compare
revisions and producer keys, so what they hold already changes nothing; what they had lost comes
back. A sink that numbers its writes by trigger (the lake) gets them under a name of the replay's
own, and knows deltas by their place in the log. If it has lost its place among the pipeline's
triggers, the last write of a replay of everything gives it back: from then on the pipeline can
serve it again.

**Reindex** empties a sink, then gives it every vector's state, deleted ones too: they leave their
tombstones. Only then is its cursor moved, to the last trigger that the states cover. Whatever
interrupts it, the cursor is where it was or the sink is full; running it again mends the rest. That
is also how a sink that is new in a pipeline gets what was before it: the change log does not go
back so far.

For both the pipeline must not run meanwhile: a sink is written to by one at a time.

**Materialise** writes the vectors as they were at a moment of the log, as a folder of Parquet files
or a Delta table. Every partition is folded up to the last batch written at or before the moment. So
for the log's end it gives what the pipeline's lake holds, and the same log gives the same files.

**Letters**, which are quarantined deltas and dead letters, wait in queue topics. They go back into
the topic that they came from: they are leased, written there and then acknowledged. The producer
key is made of the letter's place in its queue: whoever dies in between writes it again, and the
node takes it once. For this the pipeline may run.
"""

from __future__ import annotations

import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from penstock.client.client import Client
from penstock.client.queue.leases import LeasedMessage
from penstock.errors import AlreadyExists, FailedPrecondition, NotFound
from penstock.propagation.options import PropagationOptions
from penstock.sinks.lake import VECTORS, LakeSink, vectors_of
from penstock.sinks.protocol import Feed, Items, Sink, Work
from penstock.sinks.schema import chosen_rows, states_schema, winners
from penstock.sinks.topics import PREFIX
from penstock.spark.delivery.backlog import NONE, CursorFile, SinkCursor
from penstock.spark.delivery.delivery import RoutedSink, attach, node_of
from penstock.spark.delivery.worker import SinkRoutes
from penstock.spark.fold.driver import offsets_of
from penstock.spark.fold.state import ChangeLog, DriverClaim, read_identity
from penstock.spark.jobs.log_fold import (
    PartitionFold,
    fold_partitions,
    fold_whole,
    log_ranges,
    scratch,
)
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.source.access import NodeAccess, NodeTopicWriter
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import Offsets, ReadRange
from penstock.spark.store import Store

Keys = NDArray[np.bytes_]  # sixteen bytes each
KEY: Final = np.dtype("S16")
WORK_ROWS: Final = 50_000  # given to a sink at once
Progress = Callable[[float, float | None], None]
_HISTORY: Final = Feed.DELTAS | Feed.PAYLOADS
LEASED_MAX: Final = 500  # letters under way at once
Source = tuple[int, Iterator[pa.Table]]  # states, and the last trigger that they cover
# `lane` says how urgent the last trigger's changes were: nothing that a vector has.
COLUMNS: Final = [name for name in VECTORS.names if name not in ("deleted", "lane")]
SCHEMA: Final = pa.schema([VECTORS.field(name) for name in COLUMNS])


def sink_settings(settings: PipelineSettings, name: str) -> SinkSettings:
    """The sink called `name`; `NotFound` names those there are."""
    for sink in settings.sinks:
        if sink.name == name:
            return sink
    known = ", ".join(sink.name for sink in settings.sinks) or "none"
    raise NotFound(f"the pipeline has no sink {name}, but {known}", sink=name)


def keys_of(table: pa.Table | pa.RecordBatch) -> Keys:
    pairs = zip(table["namespace"].to_pylist(), table["vector_id"].to_pylist(), strict=True)
    digests = [xxhash.xxh3_128_digest(f"{space}\0{name}".encode()) for space, name in pairs]
    return np.frombuffer(b"".join(digests), KEY)


def pipeline_id(settings: PipelineSettings) -> str:
    """The id of the pipeline's numbering of triggers; its name if it never ran."""
    identity = read_identity(settings.store.open())
    return settings.name if identity is None else identity.id


def propagation_of(settings: PipelineSettings) -> PropagationOptions:
    """The bounds that the pipeline folds with: those of its first run, if there was one."""
    identity = read_identity(settings.store.open())
    return settings.propagation if identity is None else identity.propagation


@contextmanager
def folded_log(
    spark: Any,
    settings: PipelineSettings,
    *,
    until_ms: int | None = None,
    whole: bool = True,
    **told: Any,
) -> Iterator[list[PartitionFold]]:
    """The log of the pipeline's topics, folded as the pipeline folds it. A log that was cut or
    damaged is refused, unless `whole` is False; the rest is for `fold_partition`."""
    node, fold = node_of(settings), fold_whole if whole else fold_partitions
    ranges, options = log_ranges(node, settings.topics, until_ms=until_ms), propagation_of(settings)
    with scratch(settings.store.folder) as folder:
        yield fold(spark, ranges, node=node, folder=folder, options=options, **told)


@contextmanager
def opened_sink(settings: PipelineSettings, one: SinkSettings) -> Iterator[RoutedSink]:
    alone = msgspec.structs.replace(settings, sinks=(one,))
    (attached,) = attach(alone, pipeline=pipeline_id(settings), node=node_of(settings))
    attached.sink.open()
    try:
        yield attached
    finally:
        attached.sink.close()


@dataclass(frozen=True, kw_only=True)
class PipelineProgress:
    last: int  # committed trigger, -1 before the first
    offsets: Offsets  # per partition the sequence behind the last folded one
    cursors: Mapping[str, int]  # the last trigger that each sink holds

    def unfolded(self, ranges: Sequence[ReadRange]) -> int:
        ends = [self.offsets.get(one.topic, {}).get(one.partition, 1) for one in ranges]
        return sum(max(0, one.last + 1 - end) for one, end in zip(ranges, ends, strict=True))

    def reached(self, sink: str, ranges: Sequence[ReadRange]) -> bool:
        return not self.unfolded(ranges) and self.cursors.get(sink, NONE) >= self.last

    def lag(self, sink: str, ranges: Sequence[ReadRange]) -> dict[str, int]:
        behind = self.last - self.cursors.get(sink, NONE)
        return {"triggers": max(0, behind), "sequences": self.unfolded(ranges)}


def read_progress(store: Store, sinks: Sequence[str]) -> PipelineProgress:
    """How far it is now; a store that no pipeline has used yet is at the very beginning."""
    newest = ChangeLog(store).newest()
    cursors = {}
    for name in sinks:
        cursor = CursorFile(store, name).load()
        cursors[name] = NONE if cursor is None else cursor.through
    return PipelineProgress(
        last=NONE if newest is None else newest.trigger,
        offsets={} if newest is None else offsets_of(newest.heads),
        cursors=cursors,
    )


@dataclass(frozen=True, kw_only=True)
class ReplayWindow:
    """Which part of the log: by log time, both ends included; None: open."""

    from_ms: int | None = None
    to_ms: int | None = None


@dataclass(frozen=True)
class ReplayPart:
    states: pa.Table
    deltas: pa.Table


def replay(
    spark: Any, settings: PipelineSettings, sinks: Sequence[str], *, window: ReplayWindow
) -> dict[str, Any]:
    """Give the sinks what the window holds; how many rows each of them got."""
    chosen = [sink_settings(settings, name) for name in sinks] or list(settings.sinks)
    logged = folded_log(spark, settings, until_ms=window.to_ms, deltas=True, payloads=True)
    with closing(DriverClaim(settings.store)), logged as folds:
        found = {one.name: _replay(settings, one, folds, window) for one in chosen}
    return {"sinks": found}


def _replay(
    settings: PipelineSettings,
    one: SinkSettings,
    folds: Sequence[PartitionFold],
    window: ReplayWindow,
) -> dict[str, int]:
    given = {"states": 0, "deltas": 0}
    with opened_sink(settings, one) as attached:
        sink = attached.sink
        parts = [_part(fold, window, attached.routes) for fold in folds]
        for part, pipeline, trigger in _numbered(settings, sink, parts, window):
            for work in _works(sink, part, pipeline, trigger):
                sink.write(work)
                for name, table in (("states", work.states), ("deltas", work.deltas)):
                    given[name] += 0 if table is None else table.num_rows
    return {name: rows for name, rows in given.items() if rows}


def _part(fold: PartitionFold, window: ReplayWindow, routes: SinkRoutes) -> ReplayPart:
    deltas, states = fold.released(), fold.states()
    if window.from_ms is not None:
        deltas = deltas.filter(pc.field("log_time_ms") >= window.from_ms)
        states = states.filter(pa.array(np.isin(keys_of(states), keys_of(deltas))))
    return ReplayPart(routes.states(states, deltas), routes.deltas(deltas))


def _numbered(
    settings: PipelineSettings, sink: Sink, parts: Sequence[ReplayPart], window: ReplayWindow
) -> list[tuple[ReplayPart, str, int]]:
    """The parts in the order of their writing, with the name and the number that they go under."""
    name = pipeline_id(settings)
    if not (sink.feed & Feed.STATES and sink.feed & _HISTORY):
        return [(part, name, number) for number, part in enumerate(parts)]
    own = f"{name}-replay-{uuid.uuid4().hex[:12]}"
    numbered = [(part, own, number) for number, part in enumerate(parts)]
    full = [n for n, part in enumerate(parts) if part.states.num_rows and part.deltas.num_rows]
    last, held = read_progress(settings.store.open(), ()).last, sink.cursor()
    lost = last > NONE and (held is None or held < last)
    if lost and full and window == ReplayWindow():
        part, _, _ = numbered.pop(full[-1])
        numbered.append((part, name, last))
    return numbered


def _works(sink: Sink, part: ReplayPart, pipeline: str, trigger: int) -> Iterator[Work]:
    """A sink that is fed both gets both at once, as a trigger brings them."""
    empty = Work(pipeline=pipeline, first=trigger, last=trigger)
    if sink.feed & Feed.STATES and sink.feed & _HISTORY:
        yield replace(empty, states=part.states, deltas=part.deltas)
    elif sink.feed & Feed.STATES:
        yield from (replace(empty, states=piece) for piece in _pieces(part.states))
    elif sink.feed & _HISTORY:
        yield from (replace(empty, deltas=piece) for piece in _pieces(part.deltas))


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, WORK_ROWS):
        yield table.slice(start, WORK_ROWS)


def reindex(
    spark: Any,
    settings: PipelineSettings,
    sink: str,
    *,
    origin: Literal["log", "lake"] = "log",
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Empty the sink called `sink` and fill it; how many states it was given."""
    chosen, rows = sink_settings(settings, sink), 0
    with closing(DriverClaim(settings.store)) as claim:
        with opened_sink(settings, chosen) as target:
            _reject_history(target)
            source = _log_states(spark, settings) if origin == "log" else _lake(settings, sink)
            with source as (through, tables):  # only what can be filled again is emptied
                target.sink.reset()
                for piece in (p for t in tables for p in _pieces(target.routes.states(t, None))):
                    work = Work(pipeline=pipeline_id(settings), first=0, last=0, states=piece)
                    target.sink.write(work)
                    rows += piece.num_rows
                    progress(rows, None)
        file = CursorFile(settings.store.open(), sink, claim=claim.number)
        held = file.load()
        # A cursor that is ahead already stays: later triggers were taken, and are in the log.
        if through > NONE and (held is None or held.through < through):
            file.save(SinkCursor.before(through + 1, lanes=1))
    return {"sink": sink, "from": origin, "states": rows, "trigger": through}


@contextmanager
def _log_states(spark: Any, settings: PipelineSettings) -> Iterator[Source]:
    """Fold the log up to its end, which is at least as far as any trigger reaches."""
    last = read_progress(settings.store.open(), ()).last
    with folded_log(spark, settings) as folds:
        yield last, (fold.states() for fold in folds)


@contextmanager
def _lake(settings: PipelineSettings, sink: str) -> Iterator[Source]:
    """The sink will hold what the lake does, up to the lake's trigger."""
    lake = next((one for one in settings.sinks if one.kind == "lake"), None)
    if lake is None:
        raise FailedPrecondition("the pipeline has no lake to fill it from", field="from")
    cursors = read_progress(settings.store.open(), (lake.name, sink)).cursors
    if cursors[lake.name] < cursors[sink]:
        raise FailedPrecondition(
            f"{lake.name} is behind {sink}: fill it from the log, or let the lake catch up",
            field="from",
        )
    with opened_sink(settings, lake) as source:
        assert isinstance(source.sink, LakeSink)
        yield cursors[lake.name], _newest_states(source.sink)


def _newest_states(lake: LakeSink) -> Iterator[pa.Table]:
    """The lake's newest row of every vector, as STATES."""
    chosen = winners(lake.vectors.batches(["namespace", "vector_id", "revision"]))
    for batch in chosen_rows(lake.vectors.batches(VECTORS.names), chosen):
        sizes = pc.list_value_length(batch["vector"])
        for size in sorted(set(sizes.to_pylist())):
            same = batch.filter(pc.equal(sizes, size))
            yield pa.Table.from_batches([same]).cast(states_schema(size))


def _reject_history(target: RoutedSink) -> None:
    name = target.sink.name
    if target.sink.feed != Feed.STATES:
        raise FailedPrecondition(
            f"{name} keeps more than the vectors as they are: replay into it", field="sink"
        )
    if target.routes.judge_states_by_deltas:
        raise FailedPrecondition(
            f"{name} is routed by what deltas are like: its states cannot be told from a fold",
            field="sink",
        )


def replay_letters(
    access: NodeAccess,
    queue: str,
    *,
    topic: str | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Empty `queue` into `topic`, or into the topic that each letter names."""
    sent = 0
    while messages := access.run(_lease(access.client, queue)):
        for (target, partition), some in _groups(messages, queue, topic).items():
            _append(access, target, queue, partition, some)
        for message in messages:
            access.run(message.ack())
        sent += len(messages)
        progress(sent, None)
    return {"queue": queue, "replayed": sent}


async def _lease(client: Client, queue: str) -> Sequence[LeasedMessage[bytes]]:
    return await client.topic(queue, create=False).pop(limit=LEASED_MAX)


def _groups(
    messages: Sequence[LeasedMessage[bytes]], queue: str, topic: str | None
) -> dict[tuple[str, int], list[LeasedMessage[bytes]]]:
    found = defaultdict(list)
    for message in sorted(messages, key=lambda message: message.sequence):
        target = topic or message.headers.get(f"{PREFIX}topic")
        if not target:
            raise FailedPrecondition(
                f"{queue} holds a message that does not say where it comes from: give --topic",
                field="topic",
            )
        found[str(target), message.partition].append(message)
    return found


def _append(
    access: NodeAccess,
    target: str,
    queue: str,
    partition: int,
    messages: Sequence[LeasedMessage[bytes]],
) -> None:
    items = Items(
        sequences=np.array([message.sequence for message in messages], np.int64),
        payloads=pa.array([message.payload for message in messages], pa.binary()),
        priorities=np.array([message.priority for message in messages], np.int64),
        headers=pa.array([_headers(message) for message in messages], pa.binary()),
    )
    producer = f"penstock-letters-back-{queue}-{partition}"
    writer = NodeTopicWriter(lambda: access)
    writer.append(target, producer=producer, epoch=1, items=items, partition=partition)


def _headers(message: LeasedMessage[bytes]) -> bytes | None:
    """The headers that the delta came with, without what was added about its fate."""
    kept = {name: v for name, v in message.headers.items() if not name.startswith(PREFIX)}
    return msgspec.msgpack.encode(kept) if kept else None


def materialise(
    spark: Any,
    node: Connecting,
    topics: Sequence[str],
    output: Path,
    *,
    at_ms: int | None = None,
    format: Literal["parquet", "delta"] = "parquet",
    options: PropagationOptions | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the living vectors as of `at_ms` (None: now) to `output`, whole or not at all."""
    if output.exists() and not overwrite:
        raise AlreadyExists(f"{output} exists; say --overwrite to replace it", file=str(output))
    ranges = log_ranges(node, topics, until_ms=at_ms)
    output.parent.mkdir(parents=True, exist_ok=True)
    with scratch(output.parent) as folder:
        bounds = options or PropagationOptions()
        folds = fold_whole(spark, ranges, node=node, folder=folder, options=bounds)
        made = folder / "made"
        rows = (_parquet if format == "parquet" else _delta)(made, folds)
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
    return {
        "path": str(output),
        "format": format,
        "vectors": rows,
        "at_ms": at_ms,
        "partitions": [
            {"topic": r.topic, "partition": r.partition, "last": r.last, **fold.counts}
            for fold, r in zip(folds, ranges, strict=True)
        ],
    }


def _living(fold: PartitionFold) -> pa.Table:
    table = fold.states()
    return vectors_of(table.filter(pc.invert(table["deleted"]))).select(COLUMNS)


def _parquet(made: Path, folds: Sequence[PartitionFold]) -> int:
    made.mkdir()
    rows = 0
    for fold in folds:
        table = _living(fold)
        pq.write_table(table, made / f"{fold.name}.parquet", compression="zstd")
        rows += table.num_rows
    return rows


def _delta(made: Path, folds: Sequence[PartitionFold]) -> int:
    from deltalake import write_deltalake

    rows = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for fold in folds:
            table = _living(fold)
            rows += table.num_rows
            yield from table.to_batches()

    write_deltalake(str(made), pa.RecordBatchReader.from_batches(SCHEMA, batches()))
    return rows


def compact(settings: PipelineSettings, sink: str | None = None) -> dict[str, Any]:
    """Make one lake small again, or all of the pipeline's: the newest row of each vector, few
    files. The pipeline may go on writing meanwhile."""
    chosen = [sink_settings(settings, sink)] if sink else list(settings.sinks)
    found = {}
    for one in chosen:
        if one.kind != "lake":
            if sink:
                raise FailedPrecondition(f"{sink} is no lake: it is a {one.kind}", field="sink")
            continue
        with opened_sink(settings, one) as lake:
            assert isinstance(lake.sink, LakeSink)
            found[one.name] = lake.sink.compact()
    if not found:
        raise FailedPrecondition("the pipeline has no lake", field="sink")
    return {"lakes": found}
