"""A few rows at a time go another way than many. Nobody may be able to tell."""

import cProfile
import pstats
from itertools import pairwise
from typing import Any

import msgspec
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
    plain,
    run,
    story,
)

from penstock.demo.corpus import ALL_OPS, CorpusOptions, generate
from penstock.model.delta import Op, encode, head_of
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import sound_rows
from penstock.propagation.fold import registers
from penstock.propagation.fold.merge import VectorStates
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.fold.row_fold import DeltaRow
from penstock.propagation.fold.snapshot import digest, dump, restore
from penstock.propagation.options import PropagationOptions

ONE = {"indices": np.array([0], np.uint16), "values": np.array([1.0], np.float32)}


def by_columns(dimensions: int, bounds: PropagationOptions | None = None) -> Propagator:
    fold = Propagator(dimensions, bounds)
    fold.rows_few = -1
    return fold


def lanes(touched: list[VectorStates]) -> list[tuple[Any, ...]]:
    return [(plain(states), states.lane.tolist()) for states in touched]


def counts(outcomes: list[FeedOutcome]) -> list[dict[str, int]]:
    return [outcome.counts for outcome in outcomes]


def assert_equal(a: Propagator, b: Propagator) -> None:
    a.validate()
    b.validate()
    assert digest(a) == digest(b)
    assert plain(a.states()) == plain(b.states())
    assert digest(a) == digest(restore(b"".join(dump(b)), options=b.options))


def corpus_log(seed: int, *, rows: int = 300, **changes: Any) -> DeltaBatch:
    shape: dict[str, Any] = {
        "deltas": rows, "vectors": 40, "dimensions": 48, "components": 10, "origins": 3,
        "duplicates": 0.1, "disorder": 0.1, "concurrent": 0.2, "window": 20, "ops": ALL_OPS,
        "seed": seed, "writes_per_ms": 1,
    }  # fmt: skip
    payloads = generate(CorpusOptions(**shape | changes)).chunk(0, rows).payloads
    return DeltaBatch.of(payloads, log_times_ms=START_MS + np.arange(rows) // 3)


def pieces(luck: Luck, count: int) -> list[int]:
    ends = [0]
    while ends[-1] < count:
        ends.append(min(count, ends[-1] + luck.choice((1, 1, 2, 7, 64, 65, 150))))
    return ends


# --- properties ---


@settings(max_examples=12, deadline=None)
@given(lucks, st.sampled_from([{}, {"components": 40}, {"disorder": 0.0}, {"ops": {Op.SPARSE: 1}}]))
def test_pieces_of_any_size_fold_as_the_whole(luck: Luck, shape: dict[str, Any]) -> None:
    log = corpus_log(luck.randrange(1 << 32), **shape)
    bounds = options(operations_max=4, pending_max=20, pending_ms=luck.choice((5, 50, 30_000)))
    ends = pieces(luck, len(log))
    whole, columns, mixed = by_columns(48, bounds), by_columns(48, bounds), Propagator(48, bounds)
    expected: list[VectorStates] = []
    touched: list[VectorStates] = []
    at_once = run(whole, log, [0, len(log)])
    in_columns = run(columns, log, ends, touched=expected)
    in_pieces = run(mixed, log, ends, touched=touched)
    assert story(at_once) == story(in_pieces)
    assert (lanes(touched), counts(in_pieces)) == (lanes(expected), counts(in_columns))
    assert_equal(whole, mixed)


@settings(max_examples=10, deadline=None)
@given(lucks)
def test_one_by_one_folds_as_the_whole(luck: Luck) -> None:
    history = luck.arrivals(luck.history(40))
    log = batch_of(history, headers=luck.maybe())
    bounds = options(operations_max=luck.randint(2, 9), dedup_ms=luck.choice((0, 10, 10**6)))
    each = list(range(len(log) + 1))
    columns, single = by_columns(DIMENSIONS, bounds), Propagator(DIMENSIONS, bounds)
    wanted: list[VectorStates] = []
    touched: list[VectorStates] = []
    expected = run(columns, log, each, touched=wanted)
    outcomes = run(single, log, each, touched=touched)
    assert story(expected) == story(outcomes) and counts(expected) == counts(outcomes)
    assert lanes(touched) == lanes(wanted)
    assert_equal(columns, single)


@settings(max_examples=25, deadline=None)
@given(lucks)
def test_damaged_payloads_are_judged_alike(luck: Luck) -> None:
    rows = [bytearray(encode(d, dimensions=DIMENSIONS)) for d in luck.history(30)]
    for row in luck.sample(rows, 12):
        at = luck.choice((1, 2, 3, *range(8, 72), 104, 108, *range(112, head_of(row).names_at)))
        row[at] = luck.choice((0, 7, 127, 255))
    log = DeltaBatch.of([bytes(row) for row in rows])
    ends = luck.cuts(len(log))
    columns, rows = by_columns(DIMENSIONS), Propagator(DIMENSIONS)
    expected: list[VectorStates] = []
    touched: list[VectorStates] = []
    in_columns = run(columns, log, ends, touched=expected)
    assert counts(run(rows, log, ends, touched=touched)) == counts(in_columns)
    assert lanes(touched) == lanes(expected)
    assert story(run(by_columns(DIMENSIONS), log, ends)) == story(
        run(Propagator(DIMENSIONS), log, ends)
    )
    assert_equal(columns, rows)


@settings(max_examples=10, deadline=None)
@given(lucks)
def test_a_fold_goes_on_by_rows_after_a_snapshot(luck: Luck) -> None:
    log = corpus_log(luck.randrange(1 << 32), rows=200)
    straight, other = Propagator(48), Propagator(48)
    for a, b in pairwise(pieces(luck, len(log))):
        piece = log.take(np.arange(a, b))
        expected = straight.feed(piece, through=b, states=True)
        other = restore(b"".join(dump(other)))
        assert other.feed(piece, through=b, states=True).counts == expected.counts
        assert lanes([other.take_touched()]) == lanes([straight.take_touched()])
    assert_equal(straight, other)


# --- what goes by rows, and what does not ---


def goes_by_rows(fold: Propagator, batch: DeltaBatch) -> bool:
    times_ms = batch.log_times_ms.tolist()
    stop, _ = fold.row_fold.take(batch, batch.sequences.tolist(), times_ms)
    return stop == len(batch)


@pytest.mark.parametrize("components", [10, 40])
def test_what_comes_in_order_is_taken(components: int) -> None:
    log = corpus_log(3, duplicates=0.2, disorder=0.0, concurrent=0.0, components=components)
    fold = Propagator(48)
    fold.feed(log.take(np.arange(100)), through=100)  # all origins are known after that
    assert all(goes_by_rows(fold, log.take(np.arange(a, a + 20))) for a in range(100, 300, 20))


def test_what_waits_for_another_vector_is_no_hindrance() -> None:
    world = World()
    first, second = (world.write("a", "v", Op.SPARSE, tick=i, **ONE) for i in (1, 2))
    others = [world.write("a", "w", Op.SPARSE, tick=i, **ONE) for i in (3, 4)]
    fold = Propagator(DIMENSIONS)
    fold.feed(batch_of([others[0], second]), through=2)
    assert len(fold.waitlist) == 1 and goes_by_rows(fold, batch_of([others[1]], first=3))
    assert not goes_by_rows(fold, batch_of([first], first=4))


def test_nothing_is_taken_past_the_time_of_what_waits() -> None:
    world = World()
    _, second = (world.write("a", "v", Op.SPARSE, tick=i, **ONE) for i in (1, 2))
    others = [world.write("a", "w", Op.SPARSE, tick=i, **ONE) for i in range(3, 6)]
    fold = Propagator(DIMENSIONS)
    fold.feed(batch_of([others[0], second]), through=2)
    times_ms = [START_MS + 29_999, START_MS + 30_000]
    outcome = fold.feed(batch_of(others[1:], first=3, times_ms=times_ms), through=4)
    assert outcome.reasons == ["cause missing"] and outcome.counts["released"] == 2


def test_a_vector_may_have_many_writers() -> None:
    world = World()
    for tick in range(60):
        origin = f"o{tick % 20}"
        world.show(f"o{(tick - 1) % 20}", origin, "v")
        world.write(origin, "v", Op.SPARSE, tick=tick, **ONE)
    log = batch_of(world.deltas)
    fold, whole = Propagator(DIMENSIONS), by_columns(DIMENSIONS)
    run(whole, log, [0, 60])
    run(fold, log, list(range(21)))
    assert all(goes_by_rows(fold, log.take(np.array([row]))) for row in range(20, 60))
    fold.sequence, fold.ordinal = whole.sequence, whole.ordinal  # which `feed` would have moved
    assert_equal(whole, fold)


def test_codes_of_origins_outgrow_two_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers, "CODES_SMALL", 2)
    world = World()
    for tick, origin in enumerate("aabbccaabbcc"):
        world.write(origin, "v", Op.SPARSE, tick=tick, **ONE)
    fold, whole = Propagator(DIMENSIONS), by_columns(DIMENSIONS)
    log = batch_of(world.deltas)
    run(fold, log, list(range(13)))
    run(whole, log, [0, 12])
    assert fold.merge.registers.table["writer"].dtype == np.uint32
    assert_equal(whole, fold)


def test_headers_stay_with_their_deltas() -> None:
    world = World()
    deltas = [world.write("a", "v", Op.SPARSE, tick=i, **ONE) for i in range(4)]
    log = batch_of([*deltas[:3], deltas[1], deltas[3]], headers=True)
    fold = Propagator(DIMENSIONS)
    fold.feed(log.take(np.arange(1)), through=1)
    outcome = fold.feed(log.take(np.arange(1, 5)), through=5)
    assert outcome.counts["duplicates"] == 1 and outcome.positions.tolist() == [2, 3, 5]
    assert outcome.released.headers is not None
    assert list(outcome.released.headers) == [b"h2", b"h3", b"h5"]


def test_log_times_that_step_back_are_held() -> None:
    world = World()
    deltas = [world.write("a", "v", Op.SPARSE, tick=i, **ONE) for i in range(3)]
    log = batch_of(deltas, times_ms=[START_MS + 5, START_MS + 9, START_MS + 7])
    fold = Propagator(DIMENSIONS)
    outcomes = run(fold, log, [0, 1, 3])
    assert story(outcomes)["log_times"] == [START_MS + 5, START_MS + 9, START_MS + 9]


def test_a_small_feed_takes_few_calls() -> None:
    log = corpus_log(3, duplicates=0.0, disorder=0.0, concurrent=0.0, origins=1, ops={Op.SPARSE: 1})
    fold = Propagator(48)
    for piece in (log.take(np.arange(200)), log.take(np.arange(200, 201))):
        fold.feed(piece, through=int(piece.sequences[-1]))
    calls = []
    for size in (1, 11):
        piece = log.take(np.arange(fold.sequence, fold.sequence + size))
        profile = cProfile.Profile()
        profile.enable()
        fold.feed(piece, through=fold.sequence + size, states=False)
        profile.disable()
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert calls[0] < 90 and (calls[1] - calls[0]) / 10 < 25


def test_a_parent_must_be_of_the_same_vector() -> None:
    world = World()
    first, second, other = (world.write("a", v, Op.SPARSE, tick=1, **ONE) for v in "vvw")
    fold = Propagator(DIMENSIONS)
    fold.feed(batch_of([first, other]), through=2)
    wrong = msgspec.structs.replace(second, parent=other.delta_id)
    assert not goes_by_rows(fold, batch_of([wrong], first=3))
    assert goes_by_rows(fold, batch_of([second], first=4))


def test_causes_must_have_been_seen_though_the_parent_was() -> None:
    world = World()
    theirs = [world.write("b", "v", Op.SPARSE, tick=i, **ONE) for i in (1, 2)]
    ours = [world.write("a", "v", Op.SPARSE, tick=i, **ONE) for i in (3, 4)]
    fold = Propagator(DIMENSIONS)
    fold.feed(batch_of([theirs[0], ours[0]]), through=2)
    for counter, by_rows in ((2, False), (1, True)):
        delta = msgspec.structs.replace(ours[1], clock={"a": 2, "b": counter})
        assert goes_by_rows(fold, batch_of([delta], first=3)) == by_rows


@settings(max_examples=300)
@given(lucks, st.sampled_from([6, 40]))
def test_a_row_is_as_sound_as_its_columns(luck: Luck, dimensions: int) -> None:
    few = {"indices": np.arange(0, dimensions, 2), "values": np.ones(dimensions // 2)}
    many = {"indices": np.arange(dimensions - 1), "values": np.ones(dimensions - 1)}
    all_ = {"values": np.ones(dimensions)}
    op, content = luck.choice(
        [(Op.SPARSE, few), (Op.SPARSE, many), (Op.OFFSET, few), (Op.OFFSET, all_), (Op.DENSE, all_)]
    )
    world = World()
    row = bytearray(encode(world.write("a", "v", op, tick=1, **content), dimensions=dimensions))
    at = luck.choice((1, 2, 56, 63, *range(112, head_of(row).names_at)))
    row[at] = luck.choice((row[at], 0, 1, 5, 39, 40, 127, 128, 255))
    if luck.maybe(0.2):
        row[-6:-2] = np.float32(luck.choice((np.nan, np.inf, -np.inf, 3e38))).tobytes()
    batch = DeltaBatch.of([bytes(row)])
    assert DeltaRow(dimensions).read(batch.blob, 0) == sound_rows(batch, dimensions=dimensions)[0]


def test_what_is_late_is_left_to_the_columns() -> None:
    world = World()
    old = world.write("b", "v", Op.SPARSE, tick=0, **ONE)
    scaled = [world.write("a", "v", Op.SCALE, tick=i, values=ONE["values"]) for i in range(1, 7)]
    new = world.write("b", "w", Op.SPARSE, tick=9, **ONE)
    fold = Propagator(DIMENSIONS, options(operations_max=4))
    fold.feed(batch_of([new, *scaled]), through=7)
    assert fold.merge.operations.folds
    outcome = fold.feed(batch_of([old], first=8), through=8)
    assert outcome.reasons == ["late"] and outcome.counts["released"] == 0
