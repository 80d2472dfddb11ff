from dataclasses import replace

import msgspec
import pytest
from tests.unit.replication.parts import disk, facts, only, record, sent

from penstock.errors import Backpressure, QuorumUnavailable
from penstock.replication.assignment import PartitionRecord
from penstock.replication.coordinator import Coordinator
from penstock.replication.effects import (
    Ack,
    AnswerUnknown,
    Append,
    BeganServing,
    ChangeRecord,
    Commit,
    Effects,
    Follow,
)
from penstock.replication.facts import OwnCopy, ReplicationOptions

OPTIONS = ReplicationOptions(credit_entries=10, silence_ms=100, backpressure_ms=50)


def coordinator(*epochs: int, of: PartitionRecord | None = None, durable: int = 0) -> Coordinator:
    """`a` enters epoch 2 with this log, and its barrier is staged."""
    log = facts(*epochs, durable=durable)
    own = OwnCopy("a", uuid=disk("a"), log=log, committed=0, options=OPTIONS)
    machine = Coordinator(own, record=of or record(2), revision=1)
    log.extend(epoch=2, last=len(epochs) + 1)
    return machine


def hold(machine: Coordinator, node: str, durable: int, *, uuid: str = "") -> Effects:
    """A follower streams from the beginning and has synced so much."""
    uuid = uuid or disk(node)
    if node not in machine.senders:
        machine.on_follow(Follow(node, uuid, 2, 1, 0, [], 10, 1000), 0)
    sender = machine.senders[node]
    more = machine._log.last + 1 - sender.next
    if more:
        sender.on_sent(machine._log.last, entries=more, bytes=more, now=0)
    done = sender.credit.entries_sent
    return machine.on_ack(Ack(node, uuid, 2, 1, done, done, durable, 2), 0)


def sync(machine: Coordinator) -> Effects:
    machine._log.durable = machine._log.last
    return machine.advance()


def serving(of: PartitionRecord | None = None) -> Coordinator:
    machine = coordinator(of=of)
    sync(machine)
    hold(machine, "b", 1)
    assert machine.serving
    return machine


def change(effects: Effects) -> PartitionRecord:
    (wanted,) = only(ChangeRecord, effects)
    return wanted.record


def test_the_barrier_commits_what_lies_beneath_it() -> None:
    machine = coordinator(1, 1)
    assert sync(machine) == []
    assert hold(machine, "b", 2) == []  # two of three hold the old entries: that is not enough
    assert hold(machine, "b", 3) == [Commit(3), BeganServing(2)]
    machine.validate()


def test_followers_may_be_ahead_of_the_coordinators_own_disk() -> None:
    machine = coordinator()
    hold(machine, "b", 1)
    assert only(Commit, hold(machine, "c", 1)) == [Commit(1)]


def test_a_cluster_of_one_commits_by_its_own_disk() -> None:
    machine = coordinator(of=record(2, "a", "a"))
    assert sync(machine) == [Commit(1), BeganServing(2)]


def test_a_disk_that_the_record_does_not_name_does_not_count() -> None:
    machine = coordinator()
    sync(machine)
    assert hold(machine, "b", 1, uuid="another") == []


def test_a_new_disk_is_named_once_it_has_caught_up() -> None:
    machine = serving()
    assert change(hold(machine, "c", 1, uuid="new")).uuids["c"] == "new"
    assert hold(machine, "c", 1, uuid="new") == []  # one change at a time
    machine.on_change_lost()
    assert only(ChangeRecord, machine.on_tick(1))


def test_an_acknowledgement_of_another_stream_is_void() -> None:
    machine = coordinator()
    sync(machine)
    machine.on_follow(Follow("b", disk("b"), 2, 7, 0, [], 10, 1000), 0)
    machine.senders["b"].on_sent(1, entries=1, bytes=1, now=0)
    assert machine.on_ack(Ack("b", disk("b"), 2, 6, 1, 1, 1, 2), 0) == []
    assert machine.on_ack(Ack("b", disk("b"), 1, 7, 1, 1, 1, 2), 0) == []


def test_reassignment_goes_by_learner_and_joint_record() -> None:
    machine = serving()
    wish = msgspec.structs.replace(machine.record, target=("b", "c", "d"))
    learning = change(machine.on_record(wish, 2))
    assert learning.learners == ("d",)
    machine.on_record(learning, 3)
    joint = change(hold(machine, "d", 1))
    assert (joint.joint, joint.uuids["d"]) == (("b", "c", "d"), disk("d"))
    final = change(machine.on_record(joint, 4))
    assert (final.voters, final.joint, final.target) == (("b", "c", "d"), (), ())
    assert "a" not in final.uuids


def test_the_joint_record_stays_until_the_new_set_holds_what_is_committed() -> None:
    joint = record(2, "a", "abc", joint="cde", target="cde")
    machine = serving(of=record(2))
    effects = machine.on_record(joint, 2)
    assert only(ChangeRecord, effects) == []
    hold(machine, "c", 1)
    assert change(hold(machine, "d", 1)).voters == ("c", "d", "e")


def test_a_wish_that_comes_while_the_set_is_joint_is_the_next_step() -> None:
    machine = serving(of=record(2))
    joint = record(2, "a", "abc", joint="abd", target="abd")
    left = change(machine.on_record(msgspec.structs.replace(joint, target=("a", "b")), 2))
    assert (left.voters, left.joint, left.target) == (("a", "b", "d"), (), ("a", "b"))
    assert change(machine.on_record(left, 3)).joint == ("a", "b")


@pytest.mark.parametrize(
    ("target", "joint", "kept"),
    [("", "", ""), ("abc", "", ""), ("abe", "", "e"), ("abe", "abe", "e")],
)
def test_a_learner_that_is_not_wanted_any_more_is_let_go(
    target: str, joint: str, kept: str
) -> None:
    machine = serving()
    learning = record(2, "a", "abc", learners="d" + kept, target=target, joint=joint)
    left = change(machine.on_record(learning, 2))
    assert (left.learners, left.voters, left.target) == (
        tuple(kept),
        learning.voters,
        tuple(target),
    )
    assert "d" not in left.members


def test_nothing_is_reassigned_before_the_barrier_commits() -> None:
    wish = record(2, "a", "abc", target="abd")
    machine = coordinator(of=wish)
    assert machine.on_tick(0) == []


def test_an_idle_stream_shows_a_sign_of_life() -> None:
    machine = serving()
    assert sent(Append, machine.on_tick(OPTIONS.heartbeat_ms - 1)) == []
    (beat,) = sent(Append, machine.on_tick(OPTIONS.heartbeat_ms))
    assert beat.committed == 1


def test_without_a_live_majority_writes_are_refused() -> None:
    machine = serving()
    assert machine.writable(100) is None
    assert isinstance(machine.writable(101), QuorumUnavailable)


def unheard(machine: Coordinator, *, from_ms: int, to_ms: int) -> list[int]:
    """The ticks, one in 50 ms, with which a coordinator has those who wait told."""
    ticks = range(from_ms, to_ms + 1, 50)
    return [now for now in ticks if only(AnswerUnknown, machine.on_tick(now))]


def test_who_waits_without_a_quorum_is_told_after_a_while_that_nobody_knows() -> None:
    machine = serving()
    machine._log.extend(epoch=2, last=2)
    assert unheard(machine, from_ms=50, to_ms=400) == [350, 400]
    assert machine.serving
    sync(machine)
    assert only(Commit, hold(machine, "b", 2)) == [Commit(2)]


def test_nobody_is_told_who_does_not_wait() -> None:
    assert unheard(serving(), from_ms=50, to_ms=1000) == []


def test_a_quorum_that_is_heard_again_ends_the_doubt() -> None:
    machine = serving()
    machine._log.extend(epoch=2, last=2)
    assert unheard(machine, from_ms=50, to_ms=350) == [350]
    machine.senders["b"].heard_ms = 380
    assert unheard(machine, from_ms=400, to_ms=650) == []


def test_a_coordinator_that_slept_listens_first() -> None:
    machine = serving()
    machine._log.extend(epoch=2, last=2)
    assert unheard(machine, from_ms=9000, to_ms=9150) == []


def test_one_without_credit_is_no_reason_to_wait_but_a_majority_is() -> None:
    machine = serving()
    hold(machine, "c", 1)
    for node in "cb":
        assert machine.writable(90) is None
        machine._log.extend(epoch=2, last=machine._log.last + 10)
        machine.senders[node].on_sent(machine._log.last, entries=10, bytes=1, now=10)
    assert isinstance(machine.writable(90), Backpressure)


def test_a_member_that_left_is_streamed_to_no_more() -> None:
    machine = serving()
    machine.on_record(record(2, "a", "acd"), 2)
    assert "b" not in machine.senders


def test_options_decide_when_a_learner_has_caught_up() -> None:
    machine = serving()
    machine._options = replace(OPTIONS, caught_up_entries=0)
    machine._log.extend(epoch=2, last=2)
    assert only(ChangeRecord, hold(machine, "c", 1, uuid="new")) == []
    assert only(ChangeRecord, hold(machine, "c", 2, uuid="new"))


def test_a_learner_copies_what_it_found_and_follows_the_rest() -> None:
    machine = serving(record(2, learners="d", target="abd"))
    machine.on_follow(Follow("d", disk("d"), 2, 1, 0, [], 10, 1000), 0)
    machine._log.extend(epoch=2, last=2)
    found = machine.may_send("d")
    assert found is not None and (found.first, found.copying) == (1, True)
    machine.senders["d"].on_sent(1, entries=1, bytes=1, now=0)
    new = machine.may_send("d")
    assert new is not None and (new.first, new.copying) == (2, False)


def test_whoever_counts_copies_nothing() -> None:
    machine = serving(record(2, joint="abd"))
    for node in "cd":
        machine.on_follow(Follow(node, disk(node), 2, 1, 0, [], 10, 1000), 0)
        window = machine.may_send(node)
        assert window is not None and not window.copying


def test_a_learner_that_becomes_a_voter_is_waited_for() -> None:
    machine = serving(record(2, learners="d", target="abd"))
    machine.on_follow(Follow("d", disk("d"), 2, 1, 0, [], 10, 1000), 0)
    machine.on_record(record(2, joint="abd"), 2)
    window = machine.may_send("d")
    assert window is not None and not window.copying
