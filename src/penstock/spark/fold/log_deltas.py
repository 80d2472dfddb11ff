"""The deltas of a range of the log, read from a node as the columns that the kernels take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Final

from penstock.model.batch import Batch
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.decisions import Decisions
from penstock.spark.source.rows import BatchPiece, deltas_of, pieces

FEED_BYTES_MAX: Final = 512 << 20  # of log batches that are joined
Answer = Callable[[Iterable[bytes]], Set[bytes]]


def read_deltas(
    access: NodeAccess,
    topic: str,
    partition: int,
    *,
    first: int,
    last: int,
    check: Callable[[Sequence[Batch]], None] | None = None,
    bytes_max: int = FEED_BYTES_MAX,
) -> Iterator[tuple[DeltaBatch, int]]:
    """The deltas of `[first, last]`, each time with the sequence up to which they reach.

    A range within `bytes_max` comes in one piece. The last piece reaches to `last`, with no deltas
    in it if the log ends in other records. `check` is shown every batch, of all kinds.
    """
    decisions = Decisions(last)
    held: list[BatchPiece] = []
    size = 0
    for batches in access.read_log(topic, partition, first, last, decisions=decisions):
        if check is not None:
            check(batches)
        ready = decisions.feed(batches)
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
