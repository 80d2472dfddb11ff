from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.placement import (
    Candidate,
    Move,
    Place,
    Policy,
    place,
    plan_drain,
    plan_rebalance,
)
from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.replication.assignment import PartitionRecord

NAMES = "abcdefghi"
Records = dict[Place, PartitionRecord]


def flat(count: int) -> list[Candidate]:
    return [Candidate(name) for name in NAMES[:count]]


def records_of(placed: Iterable[tuple[str, ...]]) -> Records:
    return {(1, n): PartitionRecord(voters=voters) for n, voters in enumerate(placed)}


def after(records: Mapping[Place, PartitionRecord], moves: Iterable[Move]) -> Records:
    """What is there once the moves are done."""
    done = dict(records)
    for move in moves:
        done[move.topic, move.partition] = PartitionRecord(voters=move.target)
    return done


def held(records: Records, nodes: Iterable[Candidate]) -> list[int]:
    counts = Counter(node for record in records.values() for node in record.voters)
    return [counts[node.id] for node in nodes]


def firsts(records: Records, nodes: Iterable[Candidate]) -> list[int]:
    counts = Counter(record.voters[0] for record in records.values())
    return [counts[node.id] for node in nodes]


def moved(records: Records, moves: Iterable[Move]) -> int:
    """How many copies have to be made."""
    return sum(len(set(m.target) - set(records[m.topic, m.partition].voters)) for m in moves)


def spread(counts: list[int]) -> int:
    return max(counts) - min(counts)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Candidate], int]:
    """Nodes in zones, and a number of replicas that they can hold."""
    zones = draw(st.lists(st.sampled_from(["x", "y", "z", ""]), min_size=1, max_size=9))
    nodes = [Candidate(name, zone) for name, zone in zip(NAMES, zones, strict=False)]
    return nodes, draw(st.integers(1, min(5, len(nodes))))


@st.composite
def uneven(draw: st.DrawFn) -> tuple[list[Candidate], Records]:
    """Partitions with equally many replicas anywhere on nodes of one zone."""
    nodes = flat(draw(st.integers(2, 6)))
    replicas = draw(st.integers(1, min(3, len(nodes))))
    ids = [node.id for node in nodes]
    sets = st.permutations(ids).map(lambda order: tuple(order[:replicas]))
    return nodes, records_of(draw(st.lists(sets, min_size=1, max_size=20)))


def zone_counts(voters: Iterable[str], nodes: list[Candidate]) -> Counter[str]:
    zones = {node.id: node.zone or node.id for node in nodes}
    return Counter(zones[node] for node in voters)


def assert_well_spread(records: Records, nodes: list[Candidate]) -> None:
    """No replica could go to a zone that has two fewer of its partition."""
    for record in records.values():
        counts = zone_counts(record.voters, nodes)
        free = [node for node in nodes if node.id not in record.voters]
        least = min((counts[node.zone or node.id] for node in free), default=99)
        assert max(counts.values()) - least <= 1
        assert len(set(record.voters)) == len(record.voters)


@given(clusters(), st.integers(1, 30))
def test_new_partitions_meet_all_wishes(
    cluster: tuple[list[Candidate], int], partitions: int
) -> None:
    nodes, replicas = cluster
    records = records_of(place(partitions, replicas=replicas, nodes=nodes))
    assert {len(record.voters) for record in records.values()} == {replicas}
    assert_well_spread(records, nodes)
    assert spread(firsts(records, nodes)) <= 1


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 40))
def test_without_zones_replicas_are_even(count: int, replicas: int, partitions: int) -> None:
    nodes = flat(max(count, replicas))
    records = records_of(place(partitions, replicas=replicas, nodes=nodes))
    assert spread(held(records, nodes)) <= 1


def test_new_partitions_go_where_there_is_little() -> None:
    existing = [PartitionRecord(voters=("a", "b"))] * 4
    placed = place(3, replicas=1, nodes=flat(3), existing=existing)
    assert placed == [("c",), ("b",), ("c",)]


def test_a_draining_node_gets_nothing() -> None:
    nodes = [*flat(3), Candidate("x", draining=True)]
    placed = place(12, replicas=3, nodes=nodes)
    assert all("x" not in voters for voters in placed)
    with pytest.raises(FailedPrecondition, match="4 replicas"):
        place(1, replicas=4, nodes=nodes)
    with pytest.raises(InvalidArgument):
        place(1, replicas=0, nodes=nodes)


def test_the_oldest_comes_first_if_that_is_the_policy() -> None:
    nodes = [Candidate("a", age=9), Candidate("b", age=3), Candidate("c", age=5)]
    placed = place(4, replicas=3, nodes=nodes, policy=Policy.OLDEST)
    assert placed == [("b", "c", "a")] * 4
    records = records_of([("a", "b", "c")] * 4)
    assert plan_rebalance(records, nodes, policy=Policy.OLDEST) == []


@given(uneven())
def test_a_rebalance_is_even_and_moves_no_more_than_it_must(
    case: tuple[list[Candidate], Records],
) -> None:
    nodes, records = case
    moves = plan_rebalance(records, nodes)
    done = after(records, moves)
    assert spread(held(done, nodes)) <= 1
    assert spread(firsts(done, nodes)) <= 1
    before, total = held(records, nodes), sum(held(records, nodes))
    low, high = total // len(nodes), -(-total // len(nodes))
    least = max(sum(max(0, n - high) for n in before), sum(max(0, low - n) for n in before))
    assert moved(records, moves) == least
    assert plan_rebalance(done, nodes) == []


@given(clusters(), st.integers(1, 20), st.randoms(use_true_random=False))
def test_a_rebalance_spreads_over_zones(
    cluster: tuple[list[Candidate], int], partitions: int, random: Random
) -> None:
    nodes, replicas = cluster
    ids = [node.id for node in nodes]
    sets = [tuple(random.sample(ids, replicas)) for _ in range(partitions)]
    records = records_of(sets)
    done = after(records, plan_rebalance(records, nodes))
    assert_well_spread(done, nodes)
    assert plan_rebalance(done, nodes) == []


def test_a_new_node_gets_its_share_and_no_more() -> None:
    records = records_of(place(30, replicas=3, nodes=flat(5)))
    moves = plan_rebalance(records, flat(6))
    assert moved(records, moves) == 90 // 6
    assert {node for m in moves for node in m.target} - set("abcde") == {"f"}


def test_coordinators_are_evened_out_without_moving_a_replica() -> None:
    records = records_of([("a", "b", "c")] * 9)
    moves = plan_rebalance(records, flat(3))
    assert moved(records, moves) == 0 and len(moves) == 6
    assert firsts(after(records, moves), flat(3)) == [3, 3, 3]


def test_places_are_handed_on_in_chains() -> None:
    """a cannot hand anything to c directly, only through b."""
    records = records_of([("a", "b"), ("a", "b"), ("b", "c"), ("c", "a")])
    records |= {(2, n): PartitionRecord(voters=("a", "b")) for n in range(2)}
    nodes = flat(3)
    done = after(records, plan_rebalance(records, nodes))
    assert firsts(done, nodes) == [2, 2, 2]


@given(clusters(), st.integers(1, 20))
def test_a_drain_moves_what_the_node_has_and_nothing_else(
    cluster: tuple[list[Candidate], int], partitions: int
) -> None:
    nodes, replicas = cluster
    records = records_of(place(partitions, replicas=replicas, nodes=nodes))
    if replicas == len(nodes):
        with pytest.raises(FailedPrecondition):
            plan_drain("a", records, nodes)
        return
    moves = plan_drain("a", records, nodes)
    has = {key for key, record in records.items() if "a" in record.voters}
    assert {(m.topic, m.partition) for m in moves} == has
    assert moved(records, moves) == len(has)
    done = after(records, moves)
    assert all("a" not in record.voters for record in done.values())
    assert_well_spread({key: done[key] for key in has}, [node for node in nodes if node.id != "a"])


def test_nodes_that_are_no_longer_wanted_are_left() -> None:
    records = records_of([("a", "b", "x"), ("x", "a", "b")])
    done = after(records, plan_rebalance(records, flat(3)))
    assert all(set(record.voters) == {"a", "b", "c"} for record in done.values())


def test_what_is_under_way_is_not_planned_again() -> None:
    record = PartitionRecord(voters=("a", "b", "c"), target=("a", "b", "d"))
    records = {(1, 0): record}
    assert plan_drain("c", records, flat(4)) == []
    assert plan_drain("d", records, flat(5)) == [Move(1, 0, ("a", "b", "c"))]
