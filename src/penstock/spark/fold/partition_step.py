"""One partition's step in a trigger: from a range of the log to a change file and a new head.

The *head* is where the fold of a partition stands, by the newest manifest: up to which sequence it
is folded, and the snapshots to begin from. The state itself, columns of many megabytes, lies in a
folder of the executor that folded last (`local_state`). A task that lands on another executor, or
comes again after a failure, makes the state of its head anew: from the state that it finds if that
is not beyond the head, else from the snapshots, and from there through the log. Folding is a
function of the log alone, not of how it is cut into ranges, so every way leads to the same state
and the same file.

A snapshot has what changed since the one before it, so that saving a large state costs what its
changes do. A new base is written when the increments have become as large as the last one.

Parents that are asked back (`Propagator.missing`) are looked for in the log. Retention may delete
what was found there between one fold and the next, so the answers since the last snapshot are part
of the head: making a state anew never asks again.

What a fold returns becomes the sections of a change file. STATES, a section per lane and a row per
vector: one that was touched more than once stands there once, as it is at the end, in the most
urgent lane of all that touched it. DELTAS in the order of release. QUARANTINE has the columns of
DELTAS, with the payload, and why each is there; its ordinal counts the quarantined deltas of the
partition.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import Corruption
from penstock.model.delta import NO_ID
from penstock.model.delta_batch import DeltaBatch
from penstock.node.observe.logs import get_logger
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.fold.snapshot import dump, restore
from penstock.propagation.options import PropagationOptions
from penstock.sinks.protocol import SHARDS_MAX, Feed, shards_of
from penstock.sinks.schema import DELTAS, deltas_table, states_table
from penstock.spark.fold.local_state import (
    LocalState,
    LocalStateLost,
    StateCache,
    executor_folder,
    local_state,
)
from penstock.spark.fold.state import (
    LANES,
    ChangePart,
    ChangeWriter,
    FoldHead,
    FoldSnapshots,
    add_counts,
)
from penstock.spark.source.access import Check, NodeAccess
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import ReadRange
from penstock.spark.source.rows import BatchPiece, deltas_of, pieces
from penstock.spark.store import StoreAddress

log = get_logger(__name__)
FEED_BYTES_MAX: Final = 512 << 20  # of log batches that are joined
SNAPSHOT_MS: Final = 600_000  # of log time, after which a snapshot is due however few deltas came
INCREMENTS_SHARE: Final = 1  # a base is due when its increments have as many bytes …
INCREMENTS_MAX: Final = 64  # … or are this many
SHARDED_ROWS: Final = 4096  # fewer states of a lane are not worth a section for each shard
FOUND_MAX: Final = 256  # answers that a head carries; past it a snapshot is due
Answer = Callable[[Iterable[bytes]], Set[bytes]]
STATES: Final[StateCache] = {}  # of this process
QUARANTINE: Final = pa.schema(
    [
        *DELTAS,
        pa.field("reason", pa.utf8(), nullable=False),
        pa.field("missing", pa.binary(16)),  # the parent that never came
    ]
)


def read_deltas(
    access: NodeAccess,
    topic: str,
    partition: int,
    *,
    first: int,
    last: int,
    check: Check | None = None,
    bytes_max: int = FEED_BYTES_MAX,
) -> Generator[tuple[DeltaBatch, int]]:
    """The deltas of `[first, last]`, each time with the sequence up to which they reach. A range
    within `bytes_max` comes in one piece. The last piece reaches to `last`, with no deltas in it if
    the log ends in other records. `check` is shown every batch, of all kinds."""
    held: list[BatchPiece] = []
    size = 0
    for ready in access.read_range(topic, partition, first, last, check=check):
        held += pieces(ready, first=first, last=last)
        size += sum(batch.size for batch in ready)
        if size >= bytes_max:
            yield deltas_of(held), min(ready[-1].last, last)
            held, size = [], 0
    yield deltas_of(held), last


def fold_deltas(
    state: Propagator, feeds: Iterable[tuple[DeltaBatch, int]], *, answer: Answer, states: bool
) -> Iterator[FeedOutcome]:
    """What comes of what was read; `answer` says which parents the log holds."""
    for deltas, through in feeds:
        yield state.feed(deltas, through=through, states=states)
        while wanted := state.missing():
            yield state.resolve(answer(wanted))


def find_forgotten(access: NodeAccess, topic: str, partition: int, state: Propagator) -> set[bytes]:
    """Those of the parents that a paused fold asks for which the log holds from before the fold's
    memory of ids. What came later the fold would know, had it been released."""
    horizon = access.find_time(topic, partition, state.ledger.time_ms - state.options.dedup_ms)
    first = access.log_status(topic)[partition].sequence_first
    wanted, found = set(state.missing()), set[bytes]()
    for deltas, _ in read_deltas(access, topic, partition, first=first, last=horizon - 1):
        found |= wanted & set(deltas.delta_ids())
        if found == wanted:
            break
    return found


class FoldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What every task of a pipeline is told; it travels to the workers."""

    pipeline: str  # id
    node: Connecting
    state: StoreAddress
    claim: int  # of the driver
    dimensions: dict[str, int]  # by topic
    options: PropagationOptions
    snapshot_deltas: int
    feed: Feed = Feed.STATES | Feed.DELTAS  # what the sinks make use of; nothing else is written
    sharded: bool = False  # whether a sink has shards: then states are written by shard


class PartitionStep:
    """`root` is the folder in which workers share states; by default the executor's."""

    def __init__(
        self, plan: FoldPlan, part: ReadRange, *, cache: StateCache = STATES,
        root: Path | None = None,
    ) -> None:  # fmt: skip
        self._plan, self._range, self._cache = plan, part, cache
        self._place: dict[str, Any] = {"topic": part.topic, "partition": part.partition}
        self._key = (plan.pipeline, part.topic, part.partition)
        self._root = root or executor_folder(self._key)
        self._access = plan.node.access()
        self._store = plan.state.open()
        self._snapshots = FoldSnapshots(self._store, claim=plan.claim)

    def run(self, head: FoldHead | None) -> tuple[FoldHead, ChangePart]:
        """The head after this range, and what came out; durable when it returns."""
        if head is None:
            head = FoldHead(start=self._range.first, sequence=self._range.first - 1)
        self._check_follows(head)
        try:
            return self._run(head, self._root)
        except LocalStateLost as full:
            log.warning("a state is kept in memory", folder=str(self._root), error=str(full))
            return self._run(head, None)

    def _run(self, head: FoldHead, root: Path | None) -> tuple[FoldHead, ChangePart]:
        options = self._plan.options
        with local_state(self._key, options, cache=self._cache, root=root) as local:
            state = self._state_of(head, local)
            head, part = self._fold(state, head)
            local.settle(state)
        return head, part

    def _fold(self, state: Propagator, head: FoldHead) -> tuple[FoldHead, ChangePart]:
        found: set[bytes] = set()

        def ask(_: Iterable[bytes]) -> set[bytes]:
            held = find_forgotten(self._access, **self._place, state=state)
            found.update(held)
            return held

        first, last = self._range.first, self._range.last
        feeds = read_deltas(self._access, **self._place, first=first, last=last)
        states = Feed.STATES in self._plan.feed
        outcomes = list(fold_deltas(state, feeds, answer=ask, states=states))
        part = self._write(outcomes, state, quarantined=head.quarantined)
        known = (*head.found, *sorted(id_.hex() for id_ in found))
        head = self._advanced(msgspec.structs.replace(head, found=known), state, part)
        return head, part

    def _check_follows(self, head: FoldHead) -> None:
        if self._range.first != head.sequence + 1:
            raise Corruption(
                f"{self._range} does not follow {head.sequence}, up to which the state is folded",
                sequence=head.sequence,
            )

    # --- making a state ---

    def state_at(self, head: FoldHead) -> Propagator:
        """The state at a head, in the memory of this process alone, for whoever looks at it."""
        with local_state(self._key, self._plan.options, cache={}, root=None) as local:
            return self._state_of(head, local)

    def _state_of(self, head: FoldHead, local: LocalState) -> Propagator:
        """The state at exactly the head's sequence."""
        state = local.found()
        if state is None or not head.snapshot_sequence <= state.sequence <= head.sequence:
            state = self._restored(head, local)
        first = max(state.sequence + 1, head.start)
        if first <= head.sequence:
            known = frozenset(map(bytes.fromhex, head.found))
            feeds = read_deltas(self._access, **self._place, first=first, last=head.sequence)
            for _ in fold_deltas(state, feeds, answer=known.intersection, states=False):
                pass  # its outcome was written when these ranges were first folded
        return state

    def _restored(self, head: FoldHead, local: LocalState) -> Propagator:
        options, space = self._plan.options, local.fresh_space()
        if not head.snapshots:
            return Propagator(self._plan.dimensions[self._range.topic], options, space=space)
        read = (self._snapshots.read(name) for name in head.snapshots)
        state = restore(*read, options=options, space=space)
        if state.sequence != head.snapshot_sequence:
            raise Corruption(
                f"{head.snapshots[-1]} is of sequence {state.sequence},"
                f" not {head.snapshot_sequence}"
            )
        return state

    # --- what is kept ---

    def _write(
        self, outcomes: list[FeedOutcome], state: Propagator, *, quarantined: int
    ) -> ChangePart:
        """Write what the plan's feed names, and the quarantine; so many of it came before."""
        feed, place, counts = self._plan.feed, self._place, dict[str, int]()
        writer = ChangeWriter(self._store, claim=self._plan.claim, **place)
        if Feed.STATES in feed:
            states = states_table(state.take_touched(), **place)
            write_states(writer, states, sharded=self._plan.sharded)
        if Feed.DELTAS in feed:
            payloads = Feed.PAYLOADS in feed
            tables = [released_table(outcome, **place, payloads=payloads) for outcome in outcomes]
            writer.add("deltas", pa.concat_tables(tables))
        writer.add("quarantine", _quarantine(outcomes, first=quarantined + 1, **place))
        for outcome in outcomes:
            add_counts(counts, outcome.counts)
        return writer.finish(first=self._range.first, last=self._range.last, counts=counts)

    def _advanced(self, head: FoldHead, state: Propagator, part: ChangePart) -> FoldHead:
        newest = max((s.log_time_ms_max for s in part.sections), default=head.newest_ms)
        head = msgspec.structs.replace(
            head,
            sequence=part.last,
            newest_ms=newest,
            snapshot_ms=head.snapshot_ms or newest,
            unsaved=head.unsaved + part.counts.get("read", 0),
            quarantined=head.quarantined + part.counts.get("quarantined", 0),
        )
        due = head.unsaved >= self._plan.snapshot_deltas
        old = head.unsaved > 0 and newest - head.snapshot_ms >= SNAPSHOT_MS
        if not (due or old or len(head.found) > FOUND_MAX):
            return head
        return self._saved(head, state)

    def _saved(self, head: FoldHead, state: Propagator) -> FoldHead:
        """The head with one more snapshot. What is noted as changed in a state may reach back
        further than the head's snapshots, and never less far, or it is not an increment to them."""
        base = (
            not head.snapshots
            or state.saved > head.snapshot_sequence
            or head.increment_bytes * INCREMENTS_SHARE >= head.base_bytes
            or len(head.snapshots) > INCREMENTS_MAX
        )
        name, size = self._snapshots.write(
            dump(state, increment=not base),
            kind="base" if base else "increment",
            **self._place,
            sequence=head.sequence,
        )
        state.on_saved()
        return msgspec.structs.replace(
            head,
            snapshots=(name,) if base else (*head.snapshots, name),
            snapshot_sequence=head.sequence,
            base_bytes=size if base else head.base_bytes,
            increment_bytes=0 if base else head.increment_bytes + size,
            snapshot_ms=head.newest_ms,
            unsaved=0,
            found=(),
        )


def write_states(writer: ChangeWriter, states: pa.Table, *, sharded: bool) -> None:
    """A section for each lane, and of a large one, where a sink has shards, for each shard."""
    lanes = states["lane"].to_numpy()
    for lane in range(LANES):
        mine = lanes == lane
        table = states if mine.all() else states.filter(pa.array(mine))
        if not sharded or table.num_rows < SHARDED_ROWS:
            writer.add("states", table, lane=lane)
            continue
        owners = shards_of(table)
        for shard in range(SHARDS_MAX):
            writer.add("states", table.filter(pa.array(owners == shard)), lane=lane, shard=shard)


def released_table(outcome: FeedOutcome, *, topic: str, partition: int, payloads: bool) -> pa.Table:
    return deltas_table(
        outcome.released,
        positions=outcome.positions,
        ordinals=outcome.ordinals,
        topic=topic,
        partition=partition,
        payloads=payloads,
    )


def _quarantine(
    outcomes: Sequence[FeedOutcome], *, first: int, topic: str, partition: int
) -> pa.Table:
    batch = DeltaBatch.concat([outcome.quarantined for outcome in outcomes])
    table = deltas_table(
        batch,
        positions=batch.sequences,
        ordinals=np.arange(first, first + len(batch), dtype=np.uint64),
        topic=topic,
        partition=partition,
        payloads=True,
    )
    reasons = [reason for outcome in outcomes for reason in outcome.reasons]
    missing = [id_ if id_ != NO_ID else None for outcome in outcomes for id_ in outcome.missing]
    told = pa.array(reasons, pa.utf8()), pa.array(missing, pa.binary(16))
    return pa.table([*table.columns, *told], schema=QUARANTINE)
