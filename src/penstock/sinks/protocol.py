"""What a sink is, the ports that sinks are handed, and how one is made of a `[[sink]]` table.

The pipeline numbers its triggers 0, 1, 2 … and hands each sink their changes as `Work`. It keeps a
durable cursor per sink and moves it after `write` returned; so after a crash a sink sees the last
work again, perhaps cut differently. The rules that make its effect happen once:

- `write` is durable when it returns. Writing a trigger again, or an older one after a newer one,
  changes nothing.
- Of two states of a vector the one with the higher revision wins, in whatever order they come. A
  deleted vector does not come back by a late, older state.
- Rows that can never be taken are reported by `SinkRejected` *after* all the others were written;
  the pipeline takes them to the dead letters and goes on. Every other error means that the work is
  offered again later.

One thread calls a sink's methods; they block.

**Tasks.** On Spark a sink may write in many places at once. A `TaskSink` says what runs in a task
(`write_part`, whose answer is a *receipt*) and what is done once, where the receipts come together
(`commit`). Each task has a sink of its own, made of the same table. Rows of one log partition, or
of one hash shard of the vectors, come to one task. `commit` also leaves the pipeline's *mark* in
the sink's own store (`SinkMark`). A sink that was emptied, or restored from a copy, is known by its
mark. A sink without these methods is written by one thread of the driver.

Messages on their way to a topic are `Items`: columns in, requests out, each with its producer keys
inside. A message's key is (producer, epoch, sequence), and it must lead to the same partition every
time it is sent, for that is where it is recognised.

A sink's options are the keyword parameters of its class; their annotations say what they take.
Three parameters are filled in here: `name`, `pipeline` (the numbering of triggers that the sink
will see), and `writer`, for a sink that writes to topics: then the table may also say which node
(`url`, `api_key` or `api_key_file`, `ca`); without, it is the pipeline's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from importlib import import_module
from importlib.metadata import entry_points
from operator import lt
from pathlib import Path
from typing import Any, Final, Protocol, cast, get_type_hints, runtime_checkable

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.columns import RUNS_MAX, Binary, Buffer
from penstock.model.delta import vector_hash
from penstock.model.entries import BATCH_ENTRIES_MAX, ENQ
from penstock.model.ids import partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind
from penstock.propagation.fold.releases import ReleasedRows


class Feed(Flag):
    """What a sink wants to be handed."""

    STATES = auto()
    DELTAS = auto()
    PAYLOADS = auto()  # deltas with their original bytes
    ROWS = auto()  # deltas in the kernels' own columns; only for sinks that a node hosts


@dataclass(frozen=True, kw_only=True)
class Work:
    """The changes of the triggers `first` to `last`; more than one when the sink is behind.

    `pipeline` names one numbering of triggers: a pipeline whose state was thrown away has a new
    name, or its first triggers would be taken for old ones. Deltas stand in the order of release
    within each log partition, states at most once per vector. Feeds nobody asked for are None.
    """

    pipeline: str
    first: int
    last: int
    states: pa.Table | None = None
    deltas: pa.Table | None = None
    rows: ReleasedRows | None = None
    # Of the oldest of them, by the node's performance counter; None where that is not known, as
    # in what was read back from the log.
    committed_at: float | None = None


@runtime_checkable
class Sink(Protocol):
    """One destination. `ordered` sinks get triggers one after the other and all lanes together;
    the others may get a trigger's lanes apart, the urgent ones of later triggers first.

    A sink that only a node hosts may say two things more, by attributes that are True. `volatile`:
    it loses what it holds with its process, and is filled from the beginning of the log each time.
    It may have a method `forget`, called with each partition that has moved to another node.
    `inline`: its `write` never blocks and takes no longer than the rest of a commit, so it is
    called in the step of the node's loop that released the rows."""

    name: str
    feed: Feed
    ordered: bool

    def open(self) -> None:
        """Connect, create what is missing. Raises `Unavailable`; may be called again then."""
        ...

    def write(self, work: Work) -> None: ...

    def cursor(self) -> int | None:
        """The last trigger that it durably holds, if it knows by itself."""
        ...

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Its living vectors, each once: namespace, vector_id, vector, metadata, revision. A sink
        that keeps no state raises `Unsupported`."""
        ...

    def reset(self) -> None:
        """Empty it, before it is filled anew."""
        ...

    def close(self) -> None: ...


class SinkMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink's own store says of a pipeline: it holds all rows of each lane up to `position`.

    An *incarnation* is the time in which a store loses nothing, named by a random id. A driver
    begins one when it opens a store that has no mark of the pipeline, or a mark that is not what
    the driver was told. So a mark that is gone, that is of another incarnation, or that is older
    than what was told means that rows have gone.

    *Claims* keep a driver that was overtaken from spoiling this. It may sleep before it writes its
    mark, for any time, so that no look at the store beforehand would help. Therefore each driver
    has a mark of its own, under its claim, and the mark of the greatest claim counts. What an
    overtaken driver writes is never taken for an older copy of what its successor wrote. An older
    copy of the store, however, has an older mark of the same claim, or none but those of earlier
    drivers. A driver removes the marks of earlier ones when it leaves its own."""

    position: tuple[int, ...]
    claim: int = 0  # of the driver that left it; 0 in a store that knows of no drivers
    incarnation: str = ""  # empty in a store that keeps none

    def kept_by(self, held: SinkMark | None) -> bool:
        """Whether a store whose mark is `held` still has all that it had with this mark."""
        if held is None or held.incarnation != self.incarnation:
            return False
        if held.claim != self.claim:
            return held.claim > self.claim
        lanes = max(len(held.position), len(self.position))
        return not any(map(lt, held.in_lanes(lanes), self.in_lanes(lanes)))

    def in_lanes(self, lanes: int) -> tuple[int, ...]:
        """The position for another number of lanes: as far as all of them are."""
        same = len(self.position) == lanes
        return self.position if same else (min(self.position),) * lanes


@dataclass(frozen=True, kw_only=True)
class SinkCommit:
    """What is made visible at once: the triggers `first` to `last`, after which the sink holds all
    rows of each lane up to `position`. A commit without receipts only leaves the mark."""

    pipeline: str
    first: int
    last: int
    position: tuple[int, ...]
    claim: int = 0
    incarnation: str = ""
    # The mark that the driver has just read; None if there need not be one. A store that can
    # compare and write in one step refuses to write a mark when it no longer has this one.
    after: SinkMark | None = None

    @property
    def mark(self) -> SinkMark:
        return SinkMark(position=self.position, claim=self.claim, incarnation=self.incarnation)


@runtime_checkable
class TaskSink(Sink, Protocol):
    """A sink whose rows are written by tasks. `write` of such a sink does both halves at once, for
    whoever hosts it in one process.

    `shards` is 0 for a sink that takes the rows of any log partitions together. Else every vector
    belongs to one of so many shards (`shards_of`), and a shard is written by one task at a time."""

    shards: int

    def write_part(self, work: Work) -> Any:
        """Write, as `write` does, what may be written by many at a time. What it returns travels to
        `commit`; a task that is repeated leaves a receipt that nobody asks for."""
        ...

    def commit(self, receipts: Sequence[Any], commit: SinkCommit) -> None:
        """Make what was written visible, durably, and leave the mark. Done again, it changes
        nothing."""
        ...

    def mark(self) -> SinkMark | None:
        """The mark of the last commit, as the sink's own store has it, and not as this process
        remembers it. Of several drivers' marks it is that of the greatest claim. None: never a
        commit of this pipeline, or the store was emptied since."""
        ...


@runtime_checkable
class PiecedSink(Sink, Protocol):
    """A sink that many can read at a time, each a piece of it."""

    def pieces(self) -> Sequence[Any]:
        """What it holds now, cut into pieces; they travel to the tasks that read them."""
        ...

    def scan_piece(self, piece: Any) -> Iterator[pa.RecordBatch]:
        """As `scan`. A sink that keeps several revisions of a vector has a column `deleted`
        besides: of all pieces, the row with the highest revision is how the vector is."""
        ...


class InTasks:
    """The tasks' half of a sink whose every write is visible at once, and that keeps no mark."""

    shards = 0

    def write_part(self, work: Work) -> None:
        cast(Sink, self).write(work)

    def commit(self, receipts: Sequence[Any], commit: SinkCommit) -> None:
        return

    def mark(self) -> SinkMark | None:
        return None


SHARDS_MAX: Final = 64  # a power of two, as every number of shards is


def shards_of(table: pa.Table | pa.RecordBatch) -> NDArray[np.int64]:
    """The shard of each row's vector if there were SHARDS_MAX of them. Its remainder by a smaller
    number of shards is its shard among those."""
    pairs = zip(table["namespace"].to_pylist(), table["vector_id"].to_pylist(), strict=True)
    lowest = bytes(vector_hash(namespace, vector_id)[-1] for namespace, vector_id in pairs)
    return np.frombuffer(lowest, np.uint8).astype(np.int64) % SHARDS_MAX


@dataclass(frozen=True, kw_only=True)
class Items:
    """Messages of one producer, in the order of their sequences."""

    sequences: NDArray[np.int64]  # strictly ascending from 1 on; gaps are what a route left out
    payloads: pa.BinaryArray
    priorities: NDArray[np.int64] | None = None  # None: 0
    keys: pa.BinaryArray | None = None  # ordering keys, null: none
    headers: pa.BinaryArray | None = None  # msgpack maps, null or empty: none

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: NDArray[np.int64]) -> Items:
        return self._each(lambda column: column.take(rows))

    def slice(self, start: int, end: int) -> Items:
        return self._each(lambda column: column[start:end])

    def _each(self, cut: Callable[[Any], Any]) -> Items:
        return replace(self, **{n: cut(one) for n, one in vars(self).items() if one is not None})


@runtime_checkable
class TopicWriter(Protocol):
    """A node's topics, as a sink writes to them.

    Exactly once rests on the node's producer keys, which hold per *destination* partition: a
    message is known there by (producer, epoch, sequence). A sink names one producer per *source*
    partition and numbers its messages by the delta's ordinal, so that the key is a function of the
    log. It must also always lead to the same place: the writer puts a delta where its vector's
    hash says (in a topic of kind `delta`), any other message into `partition`, modulo the topic's
    partitions. A topic's partitions never change, so every key has one home, and every resend is
    recognised there. Neighbouring ordinals in the same partition make one run; a run starts anew
    at each gap.
    """

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        """Durable on return; any number of items (the writer cuts requests to the limits).

        `partition` is the source's. Raises `InvalidArgument` if the node refuses one of the items
        for what it is: then some of the others may not be written either. Anything else: unknown,
        say it again.
        """
        ...

    def close(self) -> None: ...


REQUEST_BYTES: Final = 4 << 20  # small enough that several are under way, large enough to be few
Part = tuple[int, int, Buffer]  # partition, entries, ENQ body


def requests(
    items: Items, targets: NDArray[np.int64], *, producer: str, epoch: int
) -> Iterator[list[Part]]:
    gathered: list[Part] = []
    entries = size = 0
    for part in _parts(items, targets, producer=producer.encode(), epoch=epoch):
        if gathered and (
            size + len(part[2]) > REQUEST_BYTES or entries + part[1] > BATCH_ENTRIES_MAX
        ):
            yield gathered
            gathered, entries, size = [], 0, 0
        gathered.append(part)
        entries += part[1]
        size += len(part[2])
    if gathered:
        yield gathered


def _parts(
    items: Items, targets: NDArray[np.int64], *, producer: bytes, epoch: int
) -> Iterator[Part]:
    found = np.unique(targets)
    for target in found.tolist():
        own = items if len(found) == 1 else items.take(np.flatnonzero(targets == target))
        for piece in _pieces(own):
            yield target, len(piece), _body(piece, producer=producer, epoch=epoch)


def _pieces(items: Items) -> Iterator[Items]:
    ends = binary(items.payloads).offsets
    breaks = np.cumsum(np.concatenate(([0], np.diff(items.sequences) != 1)))
    start = 0
    while start < len(items):
        end = min(start + BATCH_ENTRIES_MAX, len(items))
        fits = int(np.searchsorted(ends, ends[start] + REQUEST_BYTES, "right")) - 1
        runs = int(np.searchsorted(breaks, breaks[start] + RUNS_MAX, "left"))
        end = max(start + 1, min(end, fits, runs))
        yield items.slice(start, end)
        start = end


def _body(items: Items, *, producer: bytes, epoch: int) -> bytes:
    starts = np.flatnonzero(np.concatenate(([True], np.diff(items.sequences) != 1)))
    runs = len(starts)
    columns: dict[str, Any] = {
        "payload": binary(items.payloads),
        "priority": items.priorities,
        "key": None if items.keys is None else binary(items.keys),
        "headers": None if items.headers is None else binary(items.headers),
        "run_count": np.diff(np.append(starts, len(items))),
        "run_epoch": np.full(runs, epoch, np.uint64),
        "run_sequence": items.sequences[starts],
        "run_producer": [producer] * runs,
    }
    return ENQ.encode(len(items), columns, runs=runs)


def binary(array: pa.Array) -> Binary:
    """An Arrow column as the log lays it out, without a copy of its bytes; null becomes empty."""
    if array.null_count:
        array = pc.fill_null(array, b"")
    _, offsets, blob = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    low, high = int(ends[0]), int(ends[-1])
    data = memoryview(b"") if blob is None else memoryview(blob)[low:high]
    return Binary(ends - np.int32(low), data)


def item_requests(
    items: Items, config: TopicConfig, *, producer: str, epoch: int, partition: int
) -> Iterator[list[Part]]:
    """What a sink appends to a topic, as `TopicWriter` says where it goes, in requests."""
    if config.kind is TopicKind.DELTA:
        targets = delta_targets(items.payloads, config.partitions)
    else:
        targets = np.full(len(items), partition % config.partitions, np.int64)
    return requests(items, targets, producer=producer, epoch=epoch)


def delta_targets(payloads: pa.BinaryArray, partitions: int) -> NDArray[np.int64]:
    return partitions_of_deltas(binary(payloads).tolist(), partitions)


KINDS: Final = {
    "lake": "penstock.sinks.lake:LakeSink",
    "index": "penstock.sinks.index:IndexSink",
    "memory": "penstock.sinks.memory_index:MemoryIndexSink",
    "cache": "penstock.sinks.cache:CacheSink",
    "remote": "penstock.sinks.topics:RemoteSink",
    "notify": "penstock.sinks.topics:NotifySink",
}
GROUP: Final = "penstock.sinks"  # of entry points
_GIVEN: Final = frozenset({"self", "name", "pipeline", "writer", "now_ms"})
_NODE: Final = ("url", "api_key", "api_key_file", "ca")


class OpenWriter(Protocol):
    """Reaches a node for a sink that writes to topics; `url` None is the pipeline's node."""

    def __call__(self, *, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter: ...


def build_sink(table: Mapping[str, Any], *, pipeline: str, open_writer: OpenWriter) -> Sink:
    """The sink that `table` describes, not yet opened. Raises `InvalidArgument`."""
    options = dict(table)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or not kind:
        raise InvalidArgument("a sink needs a kind", field="kind", limit=sorted(KINDS))
    name = options.pop("name", kind)
    make = sink_class(kind)
    parameters = inspect.signature(make).parameters
    given: dict[str, Any] = {}
    if "writer" in parameters:
        node = {option: options.pop(option, None) for option in _NODE}
        given["writer"] = _writer(node, open_writer)
    if "pipeline" in parameters:
        given["pipeline"] = pipeline
    sink = make(name, **_checked(make, parameters, options, kind=kind), **given)
    return cast(Sink, sink)


def sink_class(kind: str) -> Any:
    """The class behind a kind: built in, an entry point, or `module:Class`."""
    target = KINDS.get(kind)
    if target is None:
        found = entry_points(group=GROUP, name=kind)
        target = next(iter(found)).value if found else kind
    module, _, attribute = target.partition(":")
    if not attribute:
        raise InvalidArgument(
            f"no sink is called {kind}: use one of {sorted(KINDS)}, or module:Class",
            field="kind",
            limit=sorted(KINDS),
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        extra = f" (install penstock[{kind}])" if kind in KINDS else ""
        raise InvalidArgument(
            f"the sink {kind} cannot be loaded: {error}{extra}", field="kind"
        ) from error


def _checked(
    make: Any, parameters: Mapping[str, inspect.Parameter], options: dict[str, Any], *, kind: str
) -> dict[str, Any]:
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return options
    hints = get_type_hints(make.__init__)
    known = parameters.keys() - _GIVEN
    for name in options:
        if name not in known:
            raise InvalidArgument(
                f"a {kind} sink has no option {name}, but {sorted(known)}",
                field=name,
                limit=sorted(known),
            )
    for name in known - options.keys():
        if parameters[name].default is inspect.Parameter.empty:
            raise InvalidArgument(f"a {kind} sink needs {name}", field=name)
    return {name: _converted(name, value, hints.get(name, Any)) for name, value in options.items()}


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{name}: {error}", field=name) from error


def _writer(node: dict[str, Any], open_writer: OpenWriter) -> TopicWriter:
    texts = {name: _converted(name, value, str | None) for name, value in node.items()}
    if texts["api_key"] is not None and texts["api_key_file"] is not None:
        raise InvalidArgument("give api_key or api_key_file, not both", field="api_key_file")
    key = texts["api_key"]
    if texts["api_key_file"] is not None:
        try:
            key = Path(texts["api_key_file"]).read_text("utf-8").strip()
        except OSError as error:
            raise InvalidArgument(
                f"cannot read {texts['api_key_file']}: {error.strerror}", field="api_key_file"
            ) from error
    return open_writer(url=texts["url"], api_key=key, ca=texts["ca"])
