from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.propagation.world import (
    DIMENSIONS,
    START_MS,
    Luck,
    World,
    batch_of,
    lucks,
    options,
    plain,
    reference,
    run,
    sizes,
    story,
)

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.delta import Delta, Op, encode
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.merge import VectorStates
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest, dump, restore

ONE = np.array([1.0], np.float32)


def sparse(world: World, origin: str, vector: str, tick: int, value: float = 1.0) -> Delta:
    return world.write(
        origin, vector, Op.SPARSE, tick=tick, indices=np.array([0], np.uint16),
        values=np.array([value], np.float32),
    )  # fmt: skip


def folded(deltas: list[Delta], **changes: int) -> tuple[Propagator, list[Any]]:
    fold = Propagator(DIMENSIONS, options(**changes))
    return fold, run(fold, batch_of(deltas), [0, len(deltas)])


# --- properties ---


@settings(max_examples=50)
@given(lucks, sizes)
def test_arrival_order_and_duplicates_change_nothing(luck: Luck, size: int) -> None:
    deltas = luck.history(size)
    shuffled = luck.arrivals(deltas)
    fold, outcomes = folded(shuffled)
    assert not fold.waitlist.by_id and sum(len(o.released) for o in outcomes) == len(deltas)
    expected = {
        vector: (values, msgspec.msgpack.encode(m) if m is not None else b"", gone, revision, time)
        for vector, (values, m, gone, revision, time) in reference(deltas).items()
    }
    assert plain(fold.states(), log=False) == expected


@settings(max_examples=50)
@given(lucks, sizes)
def test_cutting_the_log_elsewhere_changes_nothing(luck: Luck, size: int) -> None:
    shuffled = luck.arrivals(luck.history(size))
    # Some deltas never come, waits are short and few: all refusals happen.
    lost = luck.sample(shuffled, min(len(shuffled) - 1, luck.randrange(4)))
    log_deltas = [delta for delta in shuffled if delta not in lost] or shuffled
    times_ms = START_MS + np.cumsum([luck.randrange(40) for _ in log_deltas])
    log = batch_of(log_deltas, times_ms=times_ms.tolist(), headers=luck.maybe())
    bounds = options(
        pending_ms=luck.randint(1, 400), pending_max=luck.randint(1, 8),
        dedup_ms=luck.randrange(600), operations_max=luck.randint(2, 5),
    )  # fmt: skip
    found = {delta.delta_id for delta in lost} if luck.maybe() else set()
    whole, pieces = Propagator(DIMENSIONS, bounds), Propagator(DIMENSIONS, bounds)
    at_once = run(whole, log, [0, len(log)], found=found)
    in_pieces = run(pieces, log, luck.cuts(len(log)), found=found)
    assert story(at_once) == story(in_pieces)
    assert digest(whole) == digest(pieces)
    assert plain(whole.states()) == plain(pieces.states())


@settings(max_examples=50)
@given(lucks, sizes)
def test_a_restored_fold_has_the_same_future(luck: Luck, size: int) -> None:
    log = batch_of(luck.arrivals(luck.history(size)), headers=True)
    ends = luck.cuts(len(log))
    bounds = options(operations_max=3, pending_max=4)
    straight, other = Propagator(DIMENSIONS, bounds), Propagator(DIMENSIONS, bounds)
    wanted: list[VectorStates] = []
    touched: list[VectorStates] = []
    expected = run(straight, log, ends, touched=wanted)
    outcomes = []
    for a, b in pairwise(ends):
        other = restore(b"".join(dump(other)), options=bounds)
        other.validate()
        outcomes += run(other, log, [a, b], touched=touched)
    assert story(outcomes) == story(expected)
    assert [plain(states) for states in touched] == [plain(states) for states in wanted]
    assert [s.lane.tolist() for s in touched] == [s.lane.tolist() for s in wanted]
    assert [o.counts for o in outcomes] == [o.counts for o in expected]
    assert digest(other) == digest(straight)


@settings(max_examples=30)
@given(lucks, sizes)
def test_a_parent_is_released_before_its_children(luck: Luck, size: int) -> None:
    deltas = luck.history(size)
    log = batch_of(luck.arrivals(deltas))
    seen: dict[tuple[str, str], int] = {}
    released: set[bytes] = set()
    for outcome in run(Propagator(DIMENSIONS), log, luck.cuts(len(log))):
        for delta in outcome.released.decoded():
            assert delta.parent is None or delta.parent in released
            for origin, counter in delta.clock.items():
                own = origin == delta.origin
                assert seen.get((delta.vector_id, origin), 0) >= counter - own
            seen[delta.vector_id, delta.origin] = delta.clock[delta.origin]
            released.add(delta.delta_id)
    assert len(released) == len(deltas)


@settings(max_examples=30)
@given(lucks, sizes)
def test_states_of_touched_vectors_add_up_to_all(luck: Luck, size: int) -> None:
    log = batch_of(luck.arrivals(luck.history(size)))
    fold = Propagator(DIMENSIONS)
    latest: dict[str, tuple[Any, ...]] = {}
    touched: list[VectorStates] = []
    run(fold, log, luck.cuts(len(log)), touched=touched)
    for states in touched:
        latest |= plain(states)
        sequences = states.sequence.tolist()
        assert sequences == sorted(sequences)
    assert latest == plain(fold.states())


@settings(max_examples=50)
@given(lucks, sizes)
def test_damaged_payloads_are_set_aside(luck: Luck, size: int) -> None:
    deltas = luck.history(size)
    payloads = [bytearray(encode(delta, dimensions=DIMENSIONS)) for delta in deltas]
    for _ in range(luck.randint(1, 4)):
        victim = luck.choice(payloads)
        victim[luck.randrange(len(victim))] ^= luck.randint(1, 255)
    fold = Propagator(DIMENSIONS)
    try:
        log = DeltaBatch.of([bytes(payload) for payload in payloads])
    except InvalidArgument:
        return
    outcome = fold.feed(log, through=len(log))
    while fold.missing():
        outcome = fold.resolve([])
    fold.validate()
    assert np.isfinite(fold.states().values).all()
    assert outcome.counts["read"] in (0, len(log))


# --- single cases ---


def test_a_release_is_followed_by_what_waited_oldest_first() -> None:
    world = World()
    first = sparse(world, "a", "v", 1)
    world.show("a", "b", "v")
    world.show("a", "c", "v")
    second, third = sparse(world, "c", "v", 2), sparse(world, "b", "v", 3)
    other = sparse(world, "a", "w", 4)
    _, (outcome,) = folded([third, second, other, first])
    expected = [other, first, third, second]
    assert outcome.released.delta_ids() == [delta.delta_id for delta in expected]
    assert outcome.positions.tolist() == [3, 4, 4, 4]
    assert outcome.ordinals.tolist() == [1, 2, 3, 4]


def test_a_counter_used_twice_is_refused() -> None:
    world, twin = World(), World()
    one = sparse(world, "a", "v", 1)
    two = msgspec.structs.replace(sparse(twin, "a", "v", 2), delta_id=b"other" + bytes(11))
    fold, (outcome,) = folded([one, two, one])
    assert outcome.reasons == ["counter reused"] and outcome.counts["duplicates"] == 1
    assert outcome.quarantined.delta_ids() == [two.delta_id]
    assert fold.states().revision.tolist() == [1]


def orphan(missing: bytes = b"m" * 16, **changes: Any) -> Delta:
    world = World()
    return msgspec.structs.replace(sparse(world, "a", "v", 1), parent=missing, **changes)


def test_a_parent_that_never_comes_is_asked_for_and_named() -> None:
    fold = Propagator(DIMENSIONS)
    later = sparse(World(), "b", "w", 2)
    log = batch_of([orphan(), later], times_ms=[START_MS, START_MS + 30_000])
    outcome = fold.feed(log, through=9)
    assert len(outcome.released) == 0 and fold.missing() == [b"m" * 16] and fold.sequence == 0
    with pytest.raises(FailedPrecondition):
        fold.feed(DeltaBatch.empty(), through=9)
    with pytest.raises(FailedPrecondition):
        dump(fold)
    outcome = fold.resolve([])
    assert outcome.reasons == ["parent missing"] and outcome.missing == [b"m" * 16]
    assert len(outcome.released) == 1 and fold.sequence == 9 and not fold.missing()


def test_a_parent_that_the_log_has_releases_its_child() -> None:
    fold = Propagator(DIMENSIONS)
    log = batch_of([orphan()] * 2, times_ms=[START_MS, START_MS + 30_000])
    fold.feed(log, through=2)
    outcome = fold.resolve([b"m" * 16])
    assert outcome.counts["released"] == outcome.counts["duplicates"] == 1
    assert outcome.positions.tolist() == [2]


def test_nothing_is_overdue_a_millisecond_early() -> None:
    fold = Propagator(DIMENSIONS)
    later = sparse(World(), "b", "w", 2)
    log = batch_of([orphan(), later], times_ms=[START_MS, START_MS + 29_999])
    outcome = fold.feed(log, through=2)
    assert fold.missing() == [] and outcome.counts["pending"] == 1
    assert outcome.counts["pending_oldest_ms"] == 29_999


def test_a_parent_of_another_vector_is_no_parent() -> None:
    world = World()
    parent = sparse(world, "a", "w", 1)
    child = orphan(parent.delta_id, delta_id=b"c" * 16)
    late = sparse(world, "a", "w", 2)
    log = batch_of([parent, child, late], times_ms=[START_MS, START_MS, START_MS + 30_000])
    (outcome,) = run(Propagator(DIMENSIONS), log, [0, 3])
    assert outcome.reasons == ["parent of another vector"]
    assert outcome.missing == [parent.delta_id] and len(outcome.released) == 2


def test_a_lost_cause_is_refused_and_can_be_sent_again() -> None:
    world = World()
    one, two, end = (sparse(world, "a", v, t) for v, t in (("v", 1), ("v", 2), ("w", 3)))
    fold = Propagator(DIMENSIONS)
    log = batch_of([two, end, one, two], times_ms=[START_MS] + [START_MS + 30_000] * 3)
    (outcome,) = run(fold, log, [0, 4])
    assert outcome.reasons == ["cause missing"] and outcome.missing == [one.delta_id]
    assert outcome.released.delta_ids() == [d.delta_id for d in (end, one, two)]


def test_too_many_pending_make_the_eldest_leave() -> None:
    waiting = [orphan(bytes([i + 1]) * 16, delta_id=bytes([99, i]) * 8) for i in range(4)]
    _, outcomes = folded(waiting, pending_max=3)
    assert [o.reasons for o in outcomes] == [[], ["parent missing"]]
    assert outcomes[-1].missing == [b"\x01" * 16] and outcomes[-1].counts["pending"] == 3


def test_a_parent_older_than_the_ids_is_known_as_a_head() -> None:
    world = World()
    one, two = sparse(world, "a", "v", 1), sparse(world, "a", "v", 2)
    log = batch_of([one, two], times_ms=[START_MS, START_MS + 10_000_000])
    (outcome,) = run(Propagator(DIMENSIONS, options(dedup_ms=1000)), log, [0, 2])
    assert outcome.counts["released"] == 2


def test_a_duplicate_past_its_time_is_not_merged_again() -> None:
    one = sparse(World(), "a", "v", 1)
    log = batch_of([one, one], times_ms=[START_MS, START_MS + 1001])
    (outcome,) = run(Propagator(DIMENSIONS, options(dedup_ms=1000)), log, [0, 2])
    assert outcome.reasons == ["counter reused"] and outcome.counts["released"] == 1


@pytest.mark.parametrize("ends", [[0, 3], [0, 1, 3], [0, 2, 3]])
def test_a_duplicate_does_not_prolong_an_ids_time(ends: list[int]) -> None:
    one = sparse(World(), "a", "v", 1)
    log = batch_of([one] * 3, times_ms=[START_MS, START_MS + 900, START_MS + 1001])
    outcomes = run(Propagator(DIMENSIONS, options(dedup_ms=1000)), log, ends)
    assert [r for o in outcomes for r in o.reasons] == ["counter reused"]


def test_an_own_later_change_wins_though_the_clock_stepped_back() -> None:
    world = World()
    sparse(world, "a", "v", 9, value=1.0)
    sparse(world, "a", "v", 3, value=2.0)
    fold, _ = folded(world.deltas)
    assert fold.states().values[0, 0] == 2.0


def test_a_delta_from_before_a_fold_is_late() -> None:
    world = World()
    old = sparse(world, "b", "v", 0)
    for tick in range(1, 7):
        world.write("a", "v", Op.SCALE, tick=tick, values=ONE)
    newer = sparse(world, "b", "v", 20, value=5.0)
    fold, (outcome,) = folded([*world.deltas[1:7], old, newer], operations_max=4)
    assert outcome.reasons == ["late"] and outcome.quarantined.delta_ids() == [old.delta_id]
    assert fold.states().values[0, 0] == 5.0 and fold.states().revision.tolist() == [7]


def test_a_fold_keeps_the_value() -> None:
    world, rng = World(), np.random.default_rng(5)
    for tick in range(200):
        op = (Op.SCALE, Op.OFFSET, Op.SPARSE)[tick % 3]
        named = {} if op == Op.SCALE else {"indices": np.array([1, 4], np.uint16)}
        values = rng.normal(size=1 if op == Op.SCALE else 2).astype(np.float32)
        world.write("a", "v", op, tick=tick, values=values, **named)
    few, many = folded(world.deltas, operations_max=5)[0], folded(world.deltas)[0]
    assert few.states().values.tobytes() == many.states().values.tobytes()
    assert few.merge.operations.folds and not many.merge.operations.folds


def test_feeds_must_follow_each_other() -> None:
    fold, _ = folded([sparse(World(), "a", "v", 1)])
    again = batch_of([sparse(World(), "a", "v", 1)])
    for deltas, through in ((again, 1), (batch_of([orphan()], first=2), 1)):
        with pytest.raises(InvalidArgument):
            fold.feed(deltas, through=through)
    assert fold.feed(DeltaBatch.empty(), through=7).counts["read"] == 0 and fold.sequence == 7


@pytest.mark.parametrize("dimensions", [0, 4097])
def test_dimensions_have_bounds(dimensions: int) -> None:
    with pytest.raises(InvalidArgument, match="dimensions"):
        Propagator(dimensions)


@pytest.mark.parametrize(
    "bad", [{"pending_ms": 0}, {"pending_max": 0}, {"dedup_ms": -1}, {"operations_max": 1}]
)
def test_options_have_bounds(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        options(**bad).validate()


@settings(max_examples=30)
@given(lucks, sizes)
def test_a_feed_without_states_folds_the_same(luck: Luck, size: int) -> None:
    log = batch_of(luck.arrivals(luck.history(size)))
    half = len(log) // 2
    told, quiet = Propagator(DIMENSIONS), Propagator(DIMENSIONS)
    for piece in (log.take(np.arange(half)), log.take(np.arange(half, len(log)))):
        through = int(piece.sequences[-1]) if len(piece) else 0
        noted = luck.maybe()
        expected = told.feed(piece, through=through, states=True)
        outcome = quiet.feed(piece, through=through, states=noted)
        assert story([outcome]) == story([expected]) and outcome.counts == expected.counts
        touched, wanted = quiet.take_touched(), told.take_touched()
        if noted:
            assert plain(touched) == plain(wanted)
            assert touched.lane.tolist() == wanted.lane.tolist()
    assert digest(quiet) == digest(told)


def test_states_that_were_left_out_are_not_there() -> None:
    fold = Propagator(DIMENSIONS)
    fold.feed(batch_of([orphan()]), through=1)
    assert plain(fold.take_touched()) == {}


def test_ids_past_their_time_are_forgotten() -> None:
    ledger = Propagator(DIMENSIONS, options(dedup_ms=1000, pending_ms=1000)).ledger
    low, high = np.arange(1, 40_001, dtype=np.uint64), np.zeros(40_000, np.uint64)
    for time_ms in (1000, 2000, 3000, 4000, 9000):
        entries = ledger.ids.add(low + np.uint64(time_ms << 32), high)
        ledger.ids.table["vector"][entries] = 1
        ledger.ids.table["log_time_ms"][entries] = ledger.time_ms = time_ms
        ledger.sweep()
    assert len(ledger.ids) == 40_000
