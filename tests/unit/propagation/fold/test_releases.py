from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.propagation.world import (
    DIMENSIONS,
    START_MS,
    Luck,
    World,
    batch_of,
    lucks,
    options,
    sizes,
)

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.delta import Op
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.releases import ReleasedRows, Releases


def corpus(luck: Luck, size: int) -> tuple[DeltaBatch, Propagator]:
    """A log with gaps, duplicates, late and lost deltas, and a fold that turns some out."""
    arrivals = luck.arrivals(luck.history(size))
    lost = luck.sample(arrivals, min(len(arrivals) - 1, luck.randrange(4)))
    kept = [delta for delta in arrivals if delta not in lost] or arrivals
    times_ms = START_MS + np.cumsum([luck.randrange(40) for _ in kept])
    log = batch_of(kept, times_ms=times_ms.tolist(), headers=luck.maybe())
    gaps = np.cumsum([luck.choice((1, 1, 1, 4)) for _ in kept]).astype(np.uint64)
    log.sequences[:] = gaps
    bounds = options(
        pending_ms=luck.randint(1, 400), pending_max=luck.randint(1, 8),
        dedup_ms=luck.randrange(600), operations_max=luck.randint(2, 5),
    )  # fmt: skip
    return log, Propagator(DIMENSIONS, bounds)


def feed(
    index: Releases, fold: Propagator, log: DeltaBatch, ends: list[int], found: set[bytes]
) -> ReleasedRows:
    parts = []
    for a, b in pairwise(ends):
        piece = log.take(np.arange(a, b))
        outcomes = [fold.feed(piece, through=int(piece.sequences[-1]))]
        while missing := fold.missing():
            outcomes.append(fold.resolve(found & set(missing)))
        index.on_feed(piece.sequences, *outcomes)
        index.validate()
        parts += [ReleasedRows(o.released, o.positions, o.ordinals) for o in outcomes]
    return ReleasedRows.concat(parts)


def told(rows: ReleasedRows) -> list[tuple[Any, ...]]:
    headers = list(rows.batch.headers) if rows.batch.headers else [b""] * len(rows)
    ordinals, positions = rows.ordinals.tolist(), rows.positions.tolist()
    sequences, payloads = rows.batch.sequences.tolist(), list(rows.batch.payloads)
    return list(zip(ordinals, positions, sequences, payloads, headers, strict=True))


def read(index: Releases, log: DeltaBatch, first: int, last: int) -> ReleasedRows:
    """As one who is behind reads: a slice of the log, and what had waited before it."""
    late = log.take(np.isin(log.sequences, index.late_sequences(first, last)))
    within = (log.sequences >= first) & (log.sequences <= last)
    return index.rows(log.take(within), first, last, late)


@settings(max_examples=80)
@given(lucks, sizes)
def test_slices_of_the_log_give_the_order_of_the_fold(luck: Luck, size: int) -> None:
    log, fold = corpus(luck, size)
    index = Releases()
    found = set(log.delta_ids()) if luck.maybe() else set()
    released = feed(index, fold, log, luck.cuts(len(log)), found)
    assert index.ordinal == fold.ordinal
    last = int(log.sequences[-1])
    cuts = luck.cuts(last)
    parts = [read(index, log, a + 1, b) for a, b in pairwise(cuts)]
    assert told(ReleasedRows.concat(parts)) == told(released)
    for cut in cuts:
        assert index.ordinal_at(cut) == int((released.positions <= cut).sum())


@settings(max_examples=30)
@given(lucks, sizes)
def test_what_is_trimmed_is_forgotten_and_nothing_else(luck: Luck, size: int) -> None:
    log, fold = corpus(luck, size)
    index = Releases()
    cuts = luck.cuts(len(log))
    parts, below = [], 1
    for a, b in pairwise(cuts):
        parts.append(feed(index, fold, log, [a, b], set()))
        below = max(below, luck.randint(1, int(log.sequences[b - 1]) + 1))
        index.trim(below)
        index.validate()
    released = ReleasedRows.concat(parts)
    last = int(log.sequences[-1])
    expected = released.take(released.positions >= below)
    assert told(read(index, log, below, last)) == told(expected)
    if below > 1:
        with pytest.raises(FailedPrecondition):
            read(index, log, below - 1, last)


def test_a_log_in_order_leaves_nothing_to_keep() -> None:
    log = batch_of(Luck(3).history(40))
    index, fold = Releases(), Propagator(DIMENSIONS)
    feed(index, fold, log, list(range(41)), set())
    assert (index._runs.count, index._turns.count, index._late.count) == (1, 0, 0)
    with pytest.raises(InvalidArgument):
        index.on_feed(log.sequences)


@settings(max_examples=40)
@given(lucks, sizes, st.integers(1, 60))
def test_from_where_on_the_rest_of_a_log_is_enough(luck: Luck, size: int, first: int) -> None:
    log, fold = corpus(luck, size)
    index = Releases()
    feed(index, fold, log, [0, len(log)], set())
    whole = index.whole_from(first)
    lost = index.late_sequences(whole, index.through)
    assert whole >= first and not (lost < first).any()
    if whole > first:
        assert (index.late_sequences(whole - 1, index.through) < first).any()


def test_a_late_delta_that_the_log_has_lost_is_missed() -> None:
    world = World()
    deltas = [world.write("a", "v", Op.DELETE, tick=tick) for tick in range(2)]
    index, fold = Releases(), Propagator(DIMENSIONS)
    log = batch_of(deltas[::-1])
    feed(index, fold, log, [0, 2], set())
    assert index.late_sequences(2, 2).tolist() == [1]
    with pytest.raises(FailedPrecondition):
        index.rows(log.take(np.array([1])), 2, 2, DeltaBatch.empty())
