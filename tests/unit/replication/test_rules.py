from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.replication.parts import facts

from penstock.replication import rules
from penstock.replication.rules import End, Fit


def test_the_greater_epoch_wins_then_the_longer_log_then_ones_own() -> None:
    assert rules.best_log({"a": End(1, 9), "b": End(2, 1)}, "a") == "b"
    assert rules.best_log({"a": End(2, 1), "b": End(2, 2)}, "a") == "b"
    assert rules.best_log({"a": End(2, 2), "b": End(2, 2)}, "a") == "a"


@pytest.mark.parametrize(("epoch", "accepted"), [(1, False), (2, True), (3, True)])
def test_an_epoch_below_the_promise_is_refused(epoch: int, accepted: bool) -> None:
    assert rules.accepts(2, epoch) is accepted


def test_nothing_below_the_barrier_is_committed_by_count() -> None:
    assert rules.commit(4, committed=2, barrier=5) == 2
    assert rules.commit(5, committed=2, barrier=5) == 5


def test_a_follower_knows_of_commits_up_to_what_it_compared() -> None:
    assert rules.follower_commit(9, matched=4, committed=2) == 4
    assert rules.follower_commit(3, matched=4, committed=2) == 3
    assert rules.follower_commit(1, matched=4, committed=2) == 2


def test_vouched_for_is_what_is_both_synced_and_equal() -> None:
    assert rules.acknowledged(5, matched=3) == 3
    assert rules.acknowledged(2, matched=3) == 2


def test_what_is_committed_is_not_truncated() -> None:
    assert rules.may_truncate(3, committed=3)
    assert not rules.may_truncate(2, committed=3)


@pytest.mark.parametrize(
    ("first", "last", "epoch", "previous", "expected"),
    [
        (4, 5, 2, 2, Fit.NEXT),
        (4, 5, 3, 1, Fit.CONFLICT),  # written after another entry than our last
        (5, 5, 2, 2, Fit.GAP),
        (3, 3, 2, 1, Fit.KNOWN),
        (3, 3, 3, 1, Fit.CONFLICT),
        (3, 4, 2, 1, Fit.CONFLICT),  # reaches past our end from within
    ],
)
def test_how_a_batch_fits(first: int, last: int, epoch: int, previous: int, expected: Fit) -> None:
    log = facts(1, 1, 2)
    how = rules.fit(
        first, last, epoch=epoch, epoch_previous=previous, end=log.end, epoch_at=log.epoch_at
    )
    assert how is expected


def histories() -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """Two logs as replication leaves them: a common part, then epochs that only one of them has.
    An epoch has one writer, so behind the common part the epochs of the two are disjoint, but for
    the one that was under way: of that, one may have more."""

    def build(
        common: list[int], more: int, one: list[int], other: list[int]
    ) -> tuple[list[int], list[int]]:
        common.sort()
        top = common[-1] if common else 0
        ours = [top] * (more if top else 0) + sorted(top + 2 * epoch + 1 for epoch in one)
        theirs = sorted(top + 2 * epoch + 2 for epoch in other)
        return common + ours, common + theirs

    epochs = st.lists(st.integers(0, 3), max_size=4)
    return st.builds(
        build, st.lists(st.integers(1, 4), max_size=5), st.integers(0, 2), epochs, epochs
    )


@given(histories(), st.booleans(), st.data())
def test_logs_meet_exactly_where_they_part(
    logs: tuple[list[int], list[int]], swapped: bool, data: st.DataObject
) -> None:
    mine, other = reversed(logs) if swapped else logs
    equal = 0
    while equal < min(len(mine), len(other)) and mine[equal] == other[equal]:
        equal += 1
    committed = data.draw(st.integers(0, equal))  # what is committed is in both
    met = rules.meet(facts(*other).tail(committed), last_of=facts(*mine).last_of)
    assert (met or 0) == equal


def test_logs_of_one_lineage_meet_exactly_by_brute_force() -> None:
    """Every pair of logs of three epochs that match wherever they share an epoch."""
    logs = [
        log for n in range(4) for log in product((1, 2, 3), repeat=n) if list(log) == sorted(log)
    ]
    compared = 0
    for one, other in product(logs, logs):
        agreeing = [i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] == pair[1]]
        equal = len(agreeing)
        shared = set(one[equal:]) & set(other[equal:])
        if agreeing != list(range(equal)) or shared:
            continue  # no execution leaves such a pair: an epoch has one writer
        met = rules.meet(facts(*other).tail(0), last_of=facts(*one).last_of)
        assert (met or 0) == equal, (one, other)
        compared += 1
    assert compared > 100
