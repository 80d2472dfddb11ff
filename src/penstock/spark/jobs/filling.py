"""Jobs that fill sinks: replay and reindex. Rows are made in tasks and written in tasks.

    log ── a task per partition: fold ──► states, deltas ──► a task per partition or shard: write
    lake ── a task per piece: read ──► a task per share: newest ──► states ──►    "

What is to be written is made first and kept on the executors' disks: a log that is damaged, or a
lake that cannot be read, is found before a sink is touched. Then each sink is written by tasks, as
the pipeline writes it (`TaskSink`): the rows of one log partition by one task, or those of one
shard. The driver collects receipts and commits once. A sink that has no part in tasks is written by
the driver, which then sees the rows a piece at a time.

**Replay** takes a range of the log into sinks once more. A sink gets the deltas that were released
within the window, and the states, as they are at the window's end, of the vectors those touched.
Sinks compare revisions and producer keys, so what they hold already changes nothing; what they had
lost comes back. A sink that numbers its writes by trigger (the lake) gets them under a name of the
replay's own, and knows deltas by their place in the log. If it has lost its place among the
pipeline's triggers, a replay of everything is written as the last of them: from then on the
pipeline can serve it again.

The fold begins from the pipeline's snapshot where that is early enough, else from the log's
beginning: what was released before a snapshot cannot be told from it. Where the log no longer
reaches back, a lake of the pipeline gives what it holds of the partition instead.

**Reindex** empties a sink, then gives it every vector's state, deleted ones too: they leave their
tombstones. Only then its mark is set and its cursor moved, to the last trigger that the states
cover. Whatever interrupts it, running it again mends it. A sink that is new in a pipeline, or whose
store was emptied, needs no job: the pipeline fills it by itself.

For both the pipeline must not run meanwhile: a sink is written to by one at a time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import FailedPrecondition, SinkRejected
from penstock.sinks.lake import VECTORS, LakePiece, LakeSink
from penstock.sinks.protocol import Feed, Sink, SinkCommit, SinkMark, TaskSink, Work, shards_of
from penstock.sinks.schema import dimensions_of, newest_of, states_by_dimensions
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec, node_of, transforms_of
from penstock.spark.delivery.backlog import NONE, CursorFile, SinkCursor
from penstock.spark.delivery.lakes import lake_for, lake_position, opened_lake
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.fold.state import DriverClaim
from penstock.spark.jobs.digests import keys_of, shares_of_keys
from penstock.spark.jobs.lake_fold import fold_of, planned_with_lake
from penstock.spark.jobs.log_fold import (
    FoldOrder,
    Origin,
    PlannedFold,
    fold_tasks,
    log_ranges,
    reject_lost,
)
from penstock.spark.jobs.stores import (
    opened_in_task,
    opened_sink,
    order_of,
    pipeline_id,
    read_progress,
    sink_settings,
    spec_of,
)
from penstock.spark.jobs.takers import Takers, taken_by
from penstock.spark.jobs.tasks import (
    Parcel,
    Parcels,
    Tasks,
    parcel,
    shared_out,
    shares_for,
    table_of,
)
from penstock.spark.settings import PipelineSettings, SinkSettings

WORK_ROWS: Final = 50_000  # given to a sink at once
SHARE_ROWS: Final = 100_000  # of a lake among which the newest are found at once
Progress = Callable[[float, float | None], None]
_HISTORY: Final = Feed.DELTAS | Feed.PAYLOADS
STATES, DELTAS = range(2)  # what the rows of a parcel are
RowParcel = tuple[int, tuple[int, bytes]]  # the shard of SHARDS_MAX, what they are, the rows


@dataclass(frozen=True, kw_only=True)
class ReplayWindow:
    """Which part of the log: by log time, both ends included; None: open."""

    from_ms: int | None = None
    to_ms: int | None = None


# --- making rows, in tasks ---


class RowOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What every task is told that folds for sinks."""

    fold: FoldOrder
    routes: tuple[tuple[str, ...], ...]  # of each sink
    feed: Feed  # of all of them
    from_ms: int | None = None

    @property
    def by_deltas(self) -> bool:
        """Whether anything but the states has to be looked at."""
        judged = any(SinkRoutes.parse(one).judge_states_by_deltas for one in self.routes)
        return bool(self.feed & _HISTORY) or self.from_ms is not None or judged


def folded_rows(order: RowOrder, task: PlannedFold) -> Iterator[RowParcel]:
    """One task: the rows of one log partition with their takers, in the order of release."""
    fold, takers = fold_of(order.fold, task), Takers(order.routes)
    touched = _Touched(order.from_ms)
    if not order.by_deltas:
        fold.drain()
    else:
        for deltas in fold.released(payloads=bool(order.feed & Feed.PAYLOADS)):
            rows = touched.chosen(deltas)
            marked = _marked(rows, takers.of_deltas(rows))
            if order.feed & _HISTORY:
                yield from _packed(marked)
    fold.reject_damage()
    if order.feed & Feed.STATES:
        for states in fold.states():
            rows = touched.states(states)
            yield from _by_shard(_marked(rows, takers.of_states(rows)))


class _Touched:
    """The deltas of a window, and the vectors that they touched."""

    def __init__(self, from_ms: int | None) -> None:
        self._from_ms = from_ms
        self._keys = np.empty(0, "S16")

    def chosen(self, deltas: pa.Table) -> pa.Table:
        if self._from_ms is None:
            return deltas
        rows = deltas.filter(pc.field("log_time_ms") >= self._from_ms)
        self._keys = np.unique(np.concatenate([self._keys, keys_of(rows)]))
        return rows

    def states(self, states: pa.Table) -> pa.Table:
        if self._from_ms is None:
            return states
        return states.filter(pa.array(np.isin(keys_of(states), self._keys)))


def _marked(rows: pa.Table, takers: NDArray[np.int64]) -> pa.Table:
    """Only what somebody takes, and who."""
    return rows.append_column("takers", pa.array(takers)).filter(pa.array(takers != 0))


def _packed(deltas: pa.Table) -> Iterator[RowParcel]:
    for start in range(0, deltas.num_rows, WORK_ROWS):
        share, data = parcel(deltas.slice(start, WORK_ROWS))
        yield share, (DELTAS, data)


def _by_shard(states: pa.Table) -> Iterator[RowParcel]:
    if states.num_rows:
        for shard, data in shared_out(states, shards_of(states)):
            yield shard, (STATES, data)


def lake_rows(spec: SinkSpec, shares: int, piece: LakePiece) -> Iterator[Parcel]:
    """One task: a piece of a lake's vectors, by the hashes of their names."""
    with opened_in_task(spec) as lake:
        assert isinstance(lake, LakeSink)
        for batch in lake.vectors.read_piece(piece, VECTORS.names):
            if batch.num_rows:
                rows = pa.Table.from_batches([batch])
                yield from shared_out(rows, shares_of_keys(keys_of(rows), shares))


def newest_rows(spec: SinkSpec, parcels: Iterable[Parcel]) -> Iterator[RowParcel]:
    """One task: of its share of a lake's rows the newest of each vector, as STATES."""
    tables = [table_of(one) for one in parcels]
    if not tables:
        return
    for same in states_by_dimensions(newest_of(pa.concat_tables(tables))):
        chosen = spec.routes.states(same, None)
        yield from _by_shard(_marked(chosen, np.ones(chosen.num_rows, np.int64)))


# --- writing rows ---


@dataclass(kw_only=True)
class Written:
    """What a sink was given; receipts are for its commit."""

    states: int = 0
    deltas: int = 0
    rejected: int = 0
    receipts: list[Any] = field(default_factory=list)

    def add(self, other: Written) -> None:
        self.states += other.states
        self.deltas += other.deltas
        self.rejected += other.rejected
        self.receipts += other.receipts

    def to_dict(self) -> dict[str, int]:
        counts = {"states": self.states, "deltas": self.deltas, "rejected": self.rejected}
        return {name: rows for name, rows in counts.items() if rows}


class WriteOrder(msgspec.Struct, frozen=True, kw_only=True):
    taker: int  # the sink's number among the takers
    pipeline: str
    trigger: int


class SinkFiller:
    """Gathers rows to works of a good size, and gives them to a sink."""

    def __init__(self, sink: Sink, order: WriteOrder) -> None:
        self._sink, self._order = sink, order
        self._held: dict[tuple[int, int], list[pa.Table]] = {}  # by what they are, and dimensions
        self._written = Written()

    def take(self, packed: RowParcel) -> None:
        what, data = packed[1]
        rows = table_of((0, data))
        rows = rows.filter(pa.array(taken_by(rows["takers"].to_numpy(), self._order.taker)))
        wanted = Feed.STATES if what == STATES else _HISTORY
        if not rows.num_rows or not self._sink.feed & wanted:
            return
        rows = rows.drop_columns(["takers"])
        key = what, dimensions_of(rows) if what == STATES else 0
        held = self._held.setdefault(key, [])
        held.append(rows)
        if sum(table.num_rows for table in held) >= WORK_ROWS:
            self._give(key)

    def finish(self) -> Written:
        for key in list(self._held):
            self._give(key)
        return self._written

    def _give(self, key: tuple[int, int]) -> None:
        rows, order = pa.concat_tables(self._held.pop(key)), self._order
        work = Work(pipeline=order.pipeline, first=order.trigger, last=order.trigger)
        if key[0] == STATES:
            rows = newest_of(rows, topics=True)
            self._write(replace(work, states=rows))
            self._written.states += rows.num_rows
        else:
            self._write(replace(work, deltas=rows))
            self._written.deltas += rows.num_rows

    def _write(self, work: Work) -> None:
        receipt: Any = None
        try:
            if isinstance(self._sink, TaskSink):
                receipt = self._sink.write_part(work)
            else:
                self._sink.write(work)
        except SinkRejected as refused:
            self._written.rejected += len(refused.rows)
            receipt = refused.receipt
        if receipt is not None:
            self._written.receipts.append(receipt)


def write_rows(spec: SinkSpec, order: WriteOrder, rows: Iterator[RowParcel]) -> Iterator[Written]:
    """One task: all rows of its place into the sink."""
    with opened_in_task(spec) as sink:
        filler = SinkFiller(sink, order)
        for one in rows:
            filler.take(one)
        yield filler.finish()


class RowWriter:
    """Writes rows that tasks have made into sinks, by tasks where it can be."""

    def __init__(self, tasks: Tasks, rows: Parcels) -> None:
        self._tasks, self._rows = tasks, rows

    def write(self, target: RoutedSink, order: WriteOrder) -> Written:
        sink, found = target.sink, Written()
        if isinstance(sink, TaskSink) and target.spec is not None:
            work = partial(write_rows, target.spec, order)
            for one in self._tasks.answers(work, self._placed(sink.shards)):
                found.add(one)
            return found
        filler = SinkFiller(sink, order)
        for packed in self._tasks.stream(self._rows):
            filler.take(packed)
        return filler.finish()

    def _placed(self, shards: int) -> Parcels:
        if not shards:
            return self._rows
        return self._tasks.by_share(self._rows.map(lambda one: (one[0] % shards, one[1])), shards)


@contextmanager
def kept(tasks: Tasks, rows: Parcels) -> Iterator[RowWriter]:
    """Make the rows now, and keep them on the executors' disks."""
    from pyspark import StorageLevel

    rows = rows.persist(StorageLevel.DISK_ONLY)
    try:
        tasks.collected(rows.mapPartitions(_counted))
        yield RowWriter(tasks, rows)
    finally:
        rows.unpersist()


def _counted(rows: Iterator[Any]) -> Iterator[int]:
    yield sum(1 for _ in rows)


# --- replay ---


def replay(
    spark: Any, settings: PipelineSettings, sinks: Sequence[str], *, window: ReplayWindow
) -> dict[str, Any]:
    """Give the sinks what the window holds; how many rows each of them got."""
    chosen = [sink_settings(settings, name) for name in sinks] or list(settings.sinks)
    for one in chosen:
        if settings.transform_of(one):
            raise FailedPrecondition(
                f"{one.name} has a transform, which a replay would pass by: reindex it",
                field="sink",
            )
    with closing(DriverClaim(settings.store)):
        feed = reduce(or_, (_feed_of(settings, one) for one in chosen))
        tasks = Tasks(spark, f"replay of {settings.name}")
        names = [one.name for one in chosen]
        planned, lake = _replay_tasks(settings, window, feed=feed, names=names)
        order = RowOrder(
            fold=msgspec.structs.replace(order_of(settings), lake=lake),
            routes=tuple(one.route for one in chosen),
            feed=feed,
            from_ms=window.from_ms,
        )
        with kept(tasks, tasks.make(partial(folded_rows, order), planned)) as writer:
            found = {
                one.name: _replay_into(writer, settings, one, number, window).to_dict()
                for number, one in enumerate(chosen)
            }
    return {"sinks": found}


def _feed_of(settings: PipelineSettings, one: SinkSettings) -> Feed:
    with opened_sink(settings, one) as target:
        return target.sink.feed


def _replay_tasks(
    settings: PipelineSettings, window: ReplayWindow, *, feed: Feed, names: Sequence[str]
) -> tuple[list[PlannedFold], SinkSpec | None]:
    """What is folded for the sinks of these names, and the lake that stands in for what is lost. A
    snapshot serves if nothing that is wanted was released before it."""
    node, progress = node_of(settings), read_progress(settings.store.open(), ())
    access, planned = node.access(), list[PlannedFold]()
    ranges = log_ranges(node, settings.topics, until_ms=window.to_ms)
    for task in fold_tasks(ranges, progress.heads, use="always"):
        wanted = 1 if feed & _HISTORY else task.begin
        if window.from_ms is not None:
            wanted = access.find_time(task.range.topic, task.range.partition, window.from_ms)
        early = task.begin <= wanted
        planned.append(task if early else PlannedFold(range=task.range, head=task.head))
    return planned_with_lake(planned, settings, progress, feed=feed, but=names)


def _replay_into(
    writer: RowWriter,
    settings: PipelineSettings,
    one: SinkSettings,
    number: int,
    window: ReplayWindow,
) -> Written:
    with opened_sink(settings, one) as target:
        pipeline, trigger = _name_of_replay(settings, target.sink, window)
        order = WriteOrder(taker=number, pipeline=pipeline, trigger=trigger)
        found = writer.write(target, order)
        if found.receipts and isinstance(target.sink, TaskSink):
            held = target.sink.mark() or SinkMark(position=(NONE,))
            commit = SinkCommit(
                pipeline=pipeline, first=trigger, last=trigger, **msgspec.structs.asdict(held)
            )
            target.sink.commit(found.receipts, commit)
    return found


def _name_of_replay(
    settings: PipelineSettings, sink: Sink, window: ReplayWindow
) -> tuple[str, int]:
    """Under which name and number its writes go."""
    name = pipeline_id(settings)
    if not (sink.feed & Feed.STATES and sink.feed & _HISTORY):
        return name, 0
    last, held = read_progress(settings.store.open(), ()).last, sink.cursor()
    lost = last > NONE and (held is None or held < last)
    if lost and window == ReplayWindow():
        return name, last
    return f"{name}-replay-{uuid.uuid4().hex[:12]}", 0


# --- reindex ---


def reindex(
    spark: Any,
    settings: PipelineSettings,
    sink: str,
    *,
    origin: Literal["log", "lake"] | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Empty the sink called `sink` and fill it; how many states it was given. `origin` None is the
    log, or a lake for those partitions where the log does not reach."""
    chosen, tasks = sink_settings(settings, sink), Tasks(spark, f"reindex of {sink}")
    with closing(DriverClaim(settings.store)) as claim, opened_sink(settings, chosen) as target:
        _reject_history(target)
        if transforms_of(settings, [target]):
            return _left_to_the_pipeline(settings, target, claim)
        through, rows, found_in = (
            _lake_states(tasks, settings, target)
            if origin == "lake"
            else _log_states(tasks, settings, target, alone=origin == "log")
        )
        with kept(tasks, rows) as writer:  # only what can be filled again is emptied
            target.sink.reset()
            order = WriteOrder(taker=0, pipeline=pipeline_id(settings), trigger=max(through, 0))
            found = writer.write(target, order)
        progress(found.states, None)
        if through > NONE:
            file = CursorFile(settings.store.open(), sink, claim=claim.number)
            _settle(target.sink, file, found, order, claim=claim.number)
    document = {"sink": sink, "from": found_in, "states": found.states, "trigger": through}
    return document | ({"rejected": found.rejected} if found.rejected else {})


def _left_to_the_pipeline(
    settings: PipelineSettings, target: RoutedSink, claim: DriverClaim
) -> dict[str, Any]:
    """Empty a sink that has a transform. The pipeline notices when it runs, and fills it by way of
    that, as it fills a new one."""
    target.sink.reset()
    file = CursorFile(settings.store.open(), target.sink.name, claim=claim.number)
    file.save(SinkCursor.before(0, lanes=1))
    return {"sink": target.sink.name, "from": "pipeline", "states": 0, "trigger": NONE}


def _settle(sink: Sink, file: CursorFile, found: Written, order: WriteOrder, *, claim: int) -> None:
    """Let the sink's mark and its cursor agree that it holds everything up to the trigger."""
    told, through = None, order.trigger
    if isinstance(sink, TaskSink):
        commit = SinkCommit(
            pipeline=order.pipeline,
            first=0,
            last=through,
            position=(through,),
            claim=claim,
            incarnation=uuid.uuid4().hex,
        )
        sink.commit(found.receipts, commit)
        told = sink.mark()
    held = file.load()
    started = through + 1 if held is None else held.started
    file.save(SinkCursor(position=(through,), started=started, told=told))


def _log_states(
    tasks: Tasks, settings: PipelineSettings, target: RoutedSink, *, alone: bool
) -> tuple[int, Parcels, Origin]:
    """Fold the log up to its end, which is at least as far as any trigger reaches. What is lost of
    it a lake may give, unless the log is asked for `alone`."""
    assert target.spec is not None, "it is made of settings"
    progress, lake = read_progress(settings.store.open(), ()), None
    planned = fold_tasks(
        log_ranges(node_of(settings), settings.topics), progress.heads, use="always"
    )
    if alone:
        reject_lost(planned)
    else:
        planned, lake = planned_with_lake(
            planned, settings, progress, feed=Feed.STATES, routes=target.routes
        )
    order = RowOrder(
        fold=msgspec.structs.replace(order_of(settings), lake=lake),
        routes=(target.spec.settings.route,),
        feed=Feed.STATES,
    )
    rows = tasks.make(partial(folded_rows, order), planned)
    return progress.last, rows, "log" if lake is None else "lake"


def _lake_states(
    tasks: Tasks, settings: PipelineSettings, target: RoutedSink
) -> tuple[int, Parcels, Origin]:
    """The sink will hold what the lake does, up to the lake's trigger."""
    assert target.spec is not None, "it is made of settings"
    sink, store = target.sink.name, settings.store.open()
    lake = spec_of(settings, lake_for(settings, feed=Feed.STATES, routes=target.routes))
    held, wanted = lake_position(store, lake), read_progress(store, (sink,)).cursors[sink]
    if held < wanted:
        raise FailedPrecondition(
            f"{lake.settings.name} is behind {sink}: fill it from the log, or let the lake catch"
            " up",
            field="from",
        )
    with opened_lake(lake) as source:
        pieces = source.vectors.pieces()
    rows = sum(piece.rows for piece in pieces)
    shares = shares_for(rows, each=SHARE_ROWS, least=tasks.parallelism)
    read = tasks.make(partial(lake_rows, lake, shares), pieces)
    newest = partial(newest_rows, target.spec)
    return held, tasks.by_share(read, shares).mapPartitions(newest), "lake"


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
