from itertools import chain, combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replication.assignment import PartitionRecord, decode_record, encode_record

NODES = ("a", "b", "c", "d", "e")
nodes = st.lists(st.sampled_from(NODES), unique=True).map(tuple)
voters = nodes.filter(bool)
records = st.builds(PartitionRecord, voters=voters, joint=nodes, learners=nodes)


def subsets() -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(NODES, n) for n in range(len(NODES) + 1)))


@pytest.mark.parametrize(("count", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_majority_is_more_than_half(count: int, needed: int) -> None:
    record = PartitionRecord(voters=NODES[:count])
    assert record.majority(NODES[:needed])
    assert not record.majority(NODES[: needed - 1])


def test_strangers_and_learners_do_not_count() -> None:
    record = PartitionRecord(voters=("a", "b", "c"), learners=("d", "e"))
    assert not record.majority({"a", "d", "e", "x"})
    assert record.majority({"a", "b", "x"})


def test_a_joint_record_needs_both_majorities() -> None:
    record = PartitionRecord(voters=("a", "b", "c"), joint=("c", "d", "e"))
    assert not record.majority({"a", "b"})
    assert not record.majority({"d", "e"})
    assert record.majority({"a", "c", "d"})  # c counts in both


@given(voters, voters)
def test_quorums_intersect_over_a_change(old: tuple[str, ...], new: tuple[str, ...]) -> None:
    steps = [
        PartitionRecord(voters=old),
        PartitionRecord(voters=old, joint=new),
        PartitionRecord(voters=new),
    ]
    for before, after in (*pairwise(steps), *zip(steps, steps, strict=True)):
        quorums = [set(acks) for acks in subsets() if after.majority(acks)]
        assert all(
            set(acks) & other for acks in subsets() if before.majority(acks) for other in quorums
        )


@given(records, st.dictionaries(st.sampled_from(NODES), st.integers(0, 9)))
def test_committed_is_the_highest_that_a_quorum_holds(
    record: PartitionRecord, durable: dict[str, int]
) -> None:
    def held(sequence: int) -> bool:
        return record.majority([n for n in NODES if durable.get(n, 0) >= sequence])

    committed = record.committed(durable)
    assert held(committed) and not held(committed + 1)


def test_who_is_missing_has_nothing() -> None:
    record = PartitionRecord(voters=("a", "b", "c"))
    assert record.committed({"a": 9}) == 0
    assert record.committed({"a": 9, "c": 4}) == 4
    assert record.committed({"a": 9, "b": 7, "c": 4, "x": 99}) == 7


def test_members_are_named_once() -> None:
    record = PartitionRecord(
        voters=("a", "b"), joint=("b", "c"), learners=("c", "d"), target=("e",)
    )
    assert record.members == ("a", "b", "c", "d")
    assert [n for n in NODES if record.is_voter(n)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "fields",
    [{"voters": ()}, {"voters": ("a", "a")}, {"voters": ("a",), "epoch": -1}],
    ids=["nobody", "twice", "negative"],
)
def test_a_record_that_cannot_be_is_refused(fields: dict) -> None:
    with pytest.raises(ValueError):
        PartitionRecord(**fields)
    with pytest.raises(msgspec.ValidationError):
        decode_record(msgspec.json.encode(fields))


def test_the_json_is_stable() -> None:
    record = PartitionRecord(
        epoch=3, coordinator="b", voters=("b", "a"), uuids={"b": "2", "a": "1"}
    )
    assert encode_record(record) == (
        b'{"epoch":3,"coordinator":"b","voters":["b","a"],"joint":[],"learners":[],"target":[],'
        b'"uuids":{"a":"1","b":"2"}}'
    )
    assert decode_record(encode_record(record)) == record


def test_a_newer_or_shorter_form_is_read() -> None:
    assert decode_record(b'{"voters":["a"],"colour":"red"}') == PartitionRecord(voters=("a",))
