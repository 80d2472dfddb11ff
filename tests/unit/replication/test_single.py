"""The coordinator's rules: quorum, own epoch first, monotone commit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replication.single import Coordinator, State


def coordinator(replicas: int = 3, last: int = 10) -> Coordinator:
    return Coordinator(epoch=2, replicas=[f"n{i}" for i in range(replicas)], sequence_last=last)


def test_a_cluster_of_one_commits_with_its_own_sync() -> None:
    one = coordinator(replicas=1, last=0)
    one.on_append(1)
    committed = one.on_durable("n0", 1)
    assert committed is not None
    assert (committed.sequence, committed.began_serving) == (1, True)
    assert one.serving


def test_nothing_is_served_before_the_barrier_commits() -> None:
    three = coordinator()
    three.on_append(11)
    assert three.on_durable("n0", 11) is None
    assert not three.serving
    assert three.on_durable("n1", 11) is not None
    assert three.serving


def test_entries_of_an_earlier_epoch_commit_only_beneath_the_barrier() -> None:
    three = coordinator()
    three.on_append(11)
    assert three.on_durable("n0", 10) is None
    assert three.on_durable("n1", 10) is None
    assert three.sequence_committed == 0


def test_a_report_past_the_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="past the end"):
        coordinator().on_durable("n0", 99)


def test_an_append_must_follow_the_last() -> None:
    with pytest.raises(ValueError, match="does not follow"):
        coordinator().on_append(10)


def test_a_deposed_coordinator_neither_appends_nor_commits() -> None:
    three = coordinator()
    three.on_append(11)
    three.on_higher_epoch(3)
    assert three.state is State.DEPOSED
    assert three.on_durable("n0", 11) is None
    with pytest.raises(RuntimeError, match="deposed"):
        three.on_append(12)


@given(
    replicas=st.sampled_from([1, 2, 3, 5]),
    reports=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30))),
)
def test_commit_is_monotone_and_always_on_a_majority(
    replicas: int, reports: list[tuple[int, int]]
) -> None:
    core = coordinator(replicas=replicas, last=10)
    core.on_append(30)
    best = dict.fromkeys(range(replicas), 0)
    before = 0
    for who, sequence in reports:
        who %= replicas
        best[who] = max(best[who], sequence)
        core.on_durable(f"n{who}", sequence)
        core.validate()
        assert core.sequence_committed >= before
        before = core.sequence_committed
        holders = sum(1 for reached in best.values() if reached >= before)
        assert before == 0 or holders > replicas // 2
