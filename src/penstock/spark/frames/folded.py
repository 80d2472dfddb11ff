"""Released deltas and vectors: rows that are made by folding a partition's log.

The fold is a function of the log alone, not of how it is cut into ranges. So a task that is given a
range needs nothing from Spark but the range: it makes the state at the range's start, folds the
range, and what comes out are its rows. Run again, here or elsewhere, it gives the same rows. Ranges
are never split: one task folds all that a trigger takes of a partition.

The state at a start comes from wherever it costs least:

    executor   what its workers folded last for the query, if that is not beyond the start
    snapshot   the newest one that is not beyond the start, in the store that `state` names
    log        from its beginning

and from there through the log. A log whose beginning retention has deleted gives no state, and
that is an error unless the reader was told to go on without what is lost.

**What an executor folded last** for a stream lies in files that all its Python workers share
(`local_state`), under the query, its mode and the topic's id. A task works on it where it lies, and
leaves a note there of what is not in a fold (`FoldNote`). Batch reads make a state in their own
memory, and leave none.

**Snapshots** are written by tasks of streams, at the end of a range:

    folds/<topic id>/<partition>/<sequence>-<query>-<mode>.fold

A head (version, the log's hash up to the sequence, how the fold was told to fold), then the
kernel's own bytes. Whoever folds the partition may begin from any of them. A query removes only its
own, and keeps the two newest: a trigger writes at most one of a partition, at its end, so when it
has to be run again there is one from before it.

**Whose log it is** is proved by the hash chain: the first batch that is read behind a state must
follow from the last one that went into it. Otherwise the state is that of another log, a node that
was set up anew, say, which gives out the same topic ids again.

Parents that a fold asks back are looked for in the log (`find_forgotten`). What retention leaves of
it may change by the next time, so a range in which some were found ends with a snapshot.

**The change feed.** Of a vector that a range touched the feed says how it is at the range's end.
Which word stands beside it depends on whether it was alive at the range's start, so a task notes
which vectors are, one byte each, before it folds the range. A vector that came and went within the
range is not told.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from penstock.errors import Corruption, FailedPrecondition, InvalidArgument, NotFound
from penstock.model.batch import Batch, verify_chain
from penstock.node.observe.logs import get_logger
from penstock.propagation.fold.merge import VectorStates
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.fold.snapshot import dump, restore
from penstock.propagation.fold.table import Space
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold.local_state import (
    LocalState,
    LocalStateLost,
    StateCache,
    StateKey,
    executor_folder,
    local_state,
)
from penstock.spark.fold.partition_step import (
    SNAPSHOT_MS,
    find_forgotten,
    fold_deltas,
    read_deltas,
)
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import FoldRange, LogBounds, ReadRange, between
from penstock.spark.source.reader import PenstockReader, PenstockStreamReader, SelectiveReader
from penstock.spark.source.rows import (
    ReleasedDeltaRows,
    VectorRows,
    arrow_schema,
    columns_of,
    is_among,
    record_batch,
)
from penstock.spark.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

log = get_logger(__name__)
# A snapshot's bytes are spread over the deltas between two of them: a large state is saved less
# often, so that saving never costs more than a share of folding.
SNAPSHOT_BYTES_PER_DELTA: Final = 100
FEED_BYTES: Final = 64 << 20  # of the log given to the kernels at once
BATCH_VALUES: Final = 4 << 20  # components of the vectors of one record batch
SNAPSHOTS_KEPT: Final = 2
VERSION: Final = 1
INSERT, UPDATE, DELETE = "insert", "update_postimage", "delete"
SELECTABLE: Final = frozenset({"topic", "partition", "namespace"})
_MAGIC: Final = b"PNSTFOLD"
_PREFIX: Final = struct.Struct("<8sIQ")  # magic, length of the head, its xxh3
_NAME: Final = re.compile(r"(\d+)-(.+)\.fold")
_QUERY: Final = "sql.streaming.queryId"


class SnapshotMark(NamedTuple):
    """The newest snapshot of a query that its fold knows of."""

    sequence: int = 0  # 0: there is none
    time_ms: int = 0  # of the log
    bytes: int = 0


class VectorChanges(NamedTuple):
    states: VectorStates
    kinds: NDArray[np.str_]  # what has become of each
    news: NDArray[np.bool_]  # which are: a vector that was not there and is not there is none


class FoldNote(msgspec.Struct):
    """What a task must know of a state that is not in the fold."""

    chain: int | None = 0  # the log's hash up to the fold's sequence; None: it is inside a batch
    saved: SnapshotMark = SnapshotMark()
    unsaved: int = 0  # deltas folded since that snapshot
    answered: bool = False  # with parents that the log held, since then


class FoldedPartition:
    """The state of one partition at some sequence."""

    def __init__(self, fold: Propagator, note: FoldNote | None = None) -> None:
        self.fold, self.note = fold, note or FoldNote()

    @property
    def sequence(self) -> int:
        return self.fold.sequence

    def advance(
        self, access: NodeAccess, part: ReadRange, *, first: int, last: int, states: bool = False
    ) -> Iterator[FeedOutcome]:
        """Fold `[first, last]` of the log. It must be iterated to its end. `states`: for a feed,
        which is told of the vectors that are touched."""
        note = self.note
        follower = _Follower(note.chain if first == self.sequence + 1 else None, part, first, last)

        def ask(_: Iterable[bytes]) -> set[bytes]:
            found = find_forgotten(access, part.topic, part.partition, self.fold)
            note.answered = note.answered or bool(found)
            return found

        feeds = read_deltas(
            access, part.topic, part.partition, first=first, last=last, check=follower.follow,
            bytes_max=FEED_BYTES,
        )  # fmt: skip
        with closing(feeds):  # a fold that fails reads no further
            for outcome in fold_deltas(self.fold, feeds, answer=ask, states=states):
                note.unsaved += outcome.counts["read"]
                yield outcome
        note.chain = follower.chain

    def take_changes(self, living: NDArray[np.bool_]) -> VectorChanges:
        """What was touched since the time at which `living` said which vectors were there."""
        states = self.fold.take_touched()
        before = np.zeros(len(states), np.bool_)
        known = states.number < len(living)
        before[known] = living[states.number[known]]
        kinds = np.where(states.deleted, DELETE, np.where(before, UPDATE, INSERT))
        return VectorChanges(states, kinds, before | ~states.deleted)

    def is_due(self, options: ReadOptions) -> bool:
        """Whether a snapshot is worth its while."""
        note, saved, time_ms = self.note, self.note.saved, self.fold.ledger.time_ms
        if not note.unsaved or self.sequence <= saved.sequence:
            return False
        if not saved.sequence or note.answered or time_ms - saved.time_ms >= SNAPSHOT_MS:
            return True
        spread = saved.bytes // SNAPSHOT_BYTES_PER_DELTA
        return self.sequence - saved.sequence >= max(options.snapshot_deltas, spread)

    def mark(self, *, size: int, sequence: int | None = None) -> None:
        """There is a snapshot: of now, or of an earlier sequence, by another worker."""
        note = self.note
        note.saved = SnapshotMark(sequence or self.sequence, self.fold.ledger.time_ms, size)
        if not sequence:
            note.unsaved, note.answered = 0, False


class _Follower:
    """Is shown the batches of a range as they are read."""

    def __init__(self, chain: int | None, part: ReadRange, first: int, last: int) -> None:
        self._before, self._part, self._first, self._last = chain, part, first, last
        self.chain: int | None = None  # up to `last`

    def follow(self, batches: Sequence[Batch]) -> None:
        before, self._before = self._before, None
        if before is not None and batches[0].first == self._first:
            try:
                verify_chain(batches[0], before)
            except Corruption as error:
                raise FailedPrecondition(
                    f"{self._part.topic}/{self._part.partition}: the log does not go on from what"
                    f" was folded up to {self._first - 1}, so that was another log: name another"
                    " state, or begin with another checkpoint",
                    field="state",
                ) from error
        for batch in batches:
            if batch.last == self._last:
                self.chain = batch.chain


class SnapshotHead(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    chain: int | None
    propagation: PropagationOptions


class FoldStore:
    """The snapshots of one partition."""

    def __init__(self, store: Store, part: FoldRange) -> None:
        self._store, self._folder = store, f"folds/{part.topic_id}/{part.partition}"

    def names(self, owner: str | None = None) -> dict[int, str]:
        """By sequence, ascending; only those of an owner, if one is named."""
        found = [m for m in map(_NAME.fullmatch, self._store.names(self._folder)) if m]
        return {int(m[1]): m[0] for m in sorted(found, key=_sequence) if owner in (None, m[2])}

    def read(
        self, name: str, propagation: PropagationOptions, *, space: Callable[[], Space]
    ) -> FoldedPartition:
        """The state of a snapshot, in a space that is asked for when its bytes are there."""
        where = f"{self._store.url}/{self._folder}/{name}"
        data = memoryview(self._store.read(f"{self._folder}/{name}"))
        head, content = _opened(data, where)
        if head.propagation != propagation:
            raise FailedPrecondition(
                f"{where} was folded with {head.propagation}, which cannot be changed: name another"
                " state",
                field="propagation",
            )
        fold = restore(content, options=propagation, space=space())
        found = FoldedPartition(fold, FoldNote(chain=head.chain))
        if str(found.sequence) != name.split("-", 1)[0]:
            raise Corruption(f"{where} is of sequence {found.sequence}")
        found.mark(size=len(data))
        return found

    def write(self, state: FoldedPartition, owner: str) -> int:
        """Make a snapshot durable and remove those of the owner that it does without; its size."""
        head = msgspec.msgpack.encode(
            SnapshotHead(chain=state.note.chain, propagation=state.fold.options)
        )
        prefix = _PREFIX.pack(_MAGIC, len(head), xxhash.xxh3_64_intdigest(head))
        content = [prefix, head, *dump(state.fold)]
        self._store.write(f"{self._folder}/{state.sequence}-{owner}.fold", content)
        own = list(self.names(owner).values())[:-SNAPSHOTS_KEPT]
        self._store.delete([f"{self._folder}/{name}" for name in own])
        return sum(memoryview(buffer).nbytes for buffer in content)


def _sequence(name: re.Match[str]) -> int:
    return int(name[1])


def _opened(data: memoryview, where: str) -> tuple[SnapshotHead, memoryview]:
    if len(data) < _PREFIX.size:
        raise Corruption(f"{where} is cut short")
    magic, size, digest = _PREFIX.unpack_from(data)
    head = data[_PREFIX.size : _PREFIX.size + size]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(head) != digest:
        raise Corruption(f"{where} is not a snapshot of a fold")
    version = msgspec.msgpack.decode(head)["version"]
    if version != VERSION:
        raise FailedPrecondition(
            f"{where} has version {version}, this Penstock reads version {VERSION}: name another"
            " state",
            field="state",
        )
    return msgspec.msgpack.decode(head, type=SnapshotHead), data[_PREFIX.size + size :]


FOLDS: Final[StateCache] = {}  # the states that this process has at hand


class FoldTask:
    """What one task does with a range."""

    def __init__(
        self, options: ReadOptions, part: FoldRange, *, owner: str | None,
        cache: StateCache = FOLDS, root: Path | None = None,
    ) -> None:  # fmt: skip
        """`owner`: the query and its mode, for which states are kept; None: a batch read. `root` is
        the folder in which workers share states; by default the executor's."""
        self._options, self._part, self._owner = options, part, owner
        self._key: StateKey = (owner or "", str(part.topic_id), part.partition)
        self._cache = {} if owner is None else cache
        self._root = None if owner is None else root or executor_folder(self._key)
        self._access = options.node.access()
        self._store = None if options.state is None else FoldStore(options.state.open(), part)

    def released(self) -> Iterator[ReleasedDeltaRows]:
        """What the range releases. Where the executor's folder loses the state on the way, the
        range is folded again in memory, and what was given out before is left out."""
        given = 0  # the last ordinal
        try:
            for rows in self._released(self._root):
                yield rows
                given = int(rows.ordinals[-1]) if len(rows.ordinals) else given
        except LocalStateLost as full:
            self._warn(full)
        else:
            return
        for rows in self._released(None):
            yield rows.take(rows.ordinals > given)

    def _released(self, root: Path | None) -> Iterator[ReleasedDeltaRows]:
        part = self._part
        with self._local(root) as local:
            state = self._state_at(part.first - 1, local)
            for found in state.advance(self._access, part, first=part.first, last=part.last):
                yield ReleasedDeltaRows(
                    found.released, found.positions, found.ordinals,
                    topic=part.topic, partition=part.partition,
                )  # fmt: skip
            self._keep(state, local)

    def changes(self) -> VectorChanges:
        """What has become of the vectors that the range touched."""
        try:
            return self._changes(self._root)
        except LocalStateLost as full:
            self._warn(full)
        return self._changes(None)

    def _changes(self, root: Path | None) -> VectorChanges:
        part = self._part
        with self._local(root) as local:
            state = self._state_at(part.first - 1, local)
            living, place = state.fold.living(), {"first": part.first, "last": part.last}
            for _ in state.advance(self._access, part, **place, states=True):
                pass  # the vectors that it touches are noted
            found = state.take_changes(living)
            self._keep(state, local)
        return found

    def vectors(self) -> VectorChanges:
        """All vectors at the range's end: those that live are new to whoever begins there."""
        with self._local(None) as local:
            states = self._state_at(self._part.last, local).fold.states()
        return VectorChanges(states, np.full(len(states), INSERT), ~states.deleted)

    def _local(self, root: Path | None) -> AbstractContextManager[LocalState]:
        return local_state(self._key, self._options.propagation, cache=self._cache, root=root)

    def _warn(self, full: LocalStateLost) -> None:
        log.warning("a state is kept in memory", folder=str(self._root), error=str(full))

    # --- making a state ---

    def _state_at(self, sequence: int, local: LocalState) -> FoldedPartition:
        state = self._nearest(sequence, local)
        if state.sequence < sequence:
            first = self._readable(state.sequence + 1)
            if first <= sequence:
                for _ in state.advance(self._access, self._part, first=first, last=sequence):
                    pass  # its rows are those of earlier ranges
        return state

    def _nearest(self, sequence: int, local: LocalState) -> FoldedPartition:
        """The state closest to a sequence, and not beyond it, that is there."""
        state = _left(local)
        if state is not None and state.sequence > sequence:
            state = None  # it is of no use any more
        if state is not None and state.sequence == sequence:
            return state
        behind = 0 if state is None else state.sequence
        found = self._restored(behind, sequence, local) or state
        if found is not None:
            return found
        dimensions, options = self._dimensions(), self._options.propagation
        return FoldedPartition(Propagator(dimensions, options, space=local.fresh_space()))

    def _restored(self, behind: int, sequence: int, local: LocalState) -> FoldedPartition | None:
        """From the newest snapshot of `(behind, sequence]`."""
        if self._store is None:
            return None
        for found, name in reversed(self._store.names().items()):
            if not behind < found <= sequence:
                continue
            try:
                state = self._store.read(name, self._options.propagation, space=local.fresh_space)
            except NotFound:
                continue  # its owner has just removed it
            if not name.endswith(f"-{self._owner}.fold"):
                state.note.saved = SnapshotMark()  # its owner will remove it some day
            return state
        return None

    def _readable(self, first: int) -> int:
        """Where the log can be read from, to be folded from `first` on."""
        part = self._part
        found = self._access.log_status(part.topic)[part.partition].sequence_first
        if found <= first:
            return first
        if self._options.fail_on_data_loss:
            raise FailedPrecondition(
                f"{part.topic}/{part.partition}: retention deleted the sequences {first} to"
                f" {found - 1}, which the state at {part.first} is made of, and there is no"
                " snapshot behind them (failOnDataLoss=false goes on without what they held)",
                sequence_first=found,
            )
        return found

    def _dimensions(self) -> int:
        """Asked for anew: a topic of that name may have been there before."""
        rows = self._access.run(self._access.client.topics())
        for row in rows:
            if row["id"] == self._part.topic_id:
                return int(row["dimensions"])
        raise NotFound(f"{self._part.topic} was deleted while it was read")

    # --- keeping it ---

    def _keep(self, state: FoldedPartition, local: LocalState) -> None:
        if self._owner is None:
            return
        if self._store is not None and state.is_due(self._options):
            self._save(self._store, state, self._owner)
        local.settle(state.fold, note=msgspec.to_builtins(state.note))

    def _save(self, store: FoldStore, state: FoldedPartition, owner: str) -> None:
        """Write a snapshot, unless another worker has made that unnecessary."""
        newest = max(store.names(owner), default=0)
        if newest > state.note.saved.sequence:
            state.mark(size=state.note.saved.bytes, sequence=newest)
        if state.is_due(self._options):
            state.mark(size=store.write(state, owner))


def _left(local: LocalState) -> FoldedPartition | None:
    """The state that the last task of the query has left."""
    fold = local.found()
    return None if fold is None else FoldedPartition(fold, msgspec.convert(local.note, FoldNote))


def read(
    options: ReadOptions,
    schema: StructType,
    part: Any,
    *,
    owner: str | None,
    namespaces: frozenset[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a range: of a stream, if its query is named."""
    if not isinstance(part, FoldRange):
        return  # Spark makes up a partition where there is nothing to read
    task, columns, shape = (
        FoldTask(options, part, owner=owner),
        columns_of(options),
        arrow_schema(schema),
    )
    if options.mode == "released":
        for rows in task.released():
            found = rows if namespaces is None else rows.take(rows.mask(namespaces))
            if len(found.batch):
                yield record_batch(columns, shape, found)
        return
    states, kinds, news = task.vectors() if owner is None else task.changes()
    place: dict[str, Any] = {"topic": part.topic, "partition": part.partition}
    step = max(1, BATCH_VALUES // max(1, states.values.shape[1]))
    for low in range(0, len(states), step):
        chunk = VectorRows(states, kinds, low=low, high=min(low + step, len(states)), **place)
        mask = news[chunk.rows]
        if namespaces is not None:
            mask = mask & is_among(chunk.texts(states.namespace), namespaces)
        if mask.any():
            yield record_batch(columns, shape, chunk).filter(mask)


class FoldedReader(PenstockReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.mode == "vectors" and (options.starting, options.starting_ms) != (
            "earliest",
            None,
        ):
            raise InvalidArgument(
                "a batch read of vectors has them as they are at its end, and takes no start",
                field="startingOffsets",
            )
        super().__init__(options, schema)

    def _ranges(self, bounds: LogBounds) -> Iterable[ReadRange]:
        if self._options.mode == "vectors":
            return between({}, bounds.end())
        return super()._ranges(bounds)

    def _selectable(self) -> Iterable[str]:
        """A delta may be released, and change its vector, long after its own place in the log."""
        return SELECTABLE.intersection(super()._selectable())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        namespaces = self._selection.among.get("namespace")
        return read(self._options, self._schema, partition, owner=None, namespaces=namespaces)


class SelectiveFoldedReader(SelectiveReader, FoldedReader):
    """A batch read that takes conditions on itself."""


class FoldedStreamReader(PenstockStreamReader):
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self._options, self._schema, partition, owner=_owner(self._options.mode))


def _owner(mode: str) -> str:
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty(_QUERY)
    if query is None:
        raise FailedPrecondition("Spark does not say which query this is")
    return f"{query}-{mode}"
