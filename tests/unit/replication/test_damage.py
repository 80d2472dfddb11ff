"""A replica whose driver cannot read all of its log."""

import pytest
from tests.unit.replication.parts import (
    ack,
    append,
    batch,
    facts,
    fencing,
    followed,
    following,
    only,
    persist,
    record,
    replica,
    sent,
    serving,
)

from penstock.replication.effects import Fence, Fenced, Follow, Followed, Persist, Probe, TakeEpoch
from penstock.replication.facts import LogFacts
from penstock.replication.replica import LogHealth, Replica, Role


def streaming(*, committed: int) -> Replica:
    """A follower in epoch 2 that was sent the barrier, and told of a commit."""
    machine, follow = following(log=facts(1, 1), epoch=2, committed=1)
    machine.on_followed(followed(follow, 2), 0)
    machine.on_append(append(follow, committed), [batch(3, epoch=2, previous=1)], 0)
    machine.on_members({"a": 1, "b": 2, "c": 3})
    return machine


def test_a_copy_may_go_once_the_barrier_of_another_is_committed() -> None:
    assert streaming(committed=3).replaceable(0)


def test_a_copy_stays_while_what_is_committed_may_be_on_it_alone() -> None:
    assert not streaming(committed=2).replaceable(0)  # of the epoch before
    assert not replica(log=facts(1, 1), committed=2).replaceable(0)  # it follows nobody
    assert not serving().replaceable(0)
    fenced = streaming(committed=3)
    fenced.on_fence(Fence("c", 3), 0)
    assert not fenced.replaceable(0)
    silent = streaming(committed=3)
    assert not silent.replaceable(silent.options.silence_ms + 1)


def test_a_copy_stays_while_no_quorum_can_do_without_it() -> None:
    machine = streaming(committed=3)
    machine.on_members({"a": 1, "b": 2})
    assert not machine.replaceable(0)


def test_a_stream_that_is_not_open_says_nothing_of_its_source() -> None:
    machine, _ = following(log=facts(1, 1, 2), epoch=2, committed=3)
    machine.on_members({"a": 1, "b": 2, "c": 3})
    assert not machine.replaceable(0)


@pytest.mark.parametrize(("health", "answers"), [(LogHealth.DAMAGED, 1), (LogHealth.FAULTY, 0)])
def test_a_log_that_cannot_be_lent_is_promised_to_nobody(health: LogHealth, answers: int) -> None:
    machine = replica(log=facts(1))
    machine.health = health
    effects = machine.on_fence(Fence("a", 3), 0)
    assert effects == [Persist(3)]
    assert len(sent(Fenced, persist(machine, effects))) == answers
    assert machine.promised == 3


def test_a_faulty_log_is_not_lent() -> None:
    machine = replica(log=facts(1))
    persist(machine, machine.on_fence(Fence("a", 3), 0))
    machine.health = LogHealth.FAULTY
    follow = Follow("a", "a-disk", 3, 1, 0, [], 1000, 1 << 20, adopt=True)
    (answer,) = sent(Followed, machine.on_follow(follow, 0))
    assert answer.refused


def nominates_at(machine: Replica) -> int | None:
    """When a replica without a coordinator begins to ask the others."""
    machine.on_members({"a": 1, "b": 2, "c": 3})
    machine.on_record(record(1, ""), 1, 0)
    for now in range(0, 60_000, 50):
        if sent(Probe, machine.on_tick(now)):
            return now
    return None


def test_a_damaged_replica_lets_others_coordinate_first() -> None:
    sound, damaged, faulty = replica("a"), replica("a"), replica("a")
    damaged.health, faulty.health = LogHealth.DAMAGED, LogHealth.FAULTY
    assert nominates_at(sound) == 0
    assert nominates_at(damaged) == 2 * damaged.options.stagger_ms
    assert nominates_at(faulty) is None


def test_a_faulty_replica_enters_no_epoch_that_it_has_won() -> None:
    machine = replica("a")
    machine.health = LogHealth.FAULTY
    assert only(TakeEpoch, machine.on_epoch_taken(record(1, "a"), 1, 0)) == []
    assert machine.role is Role.IDLE
    assert fencing("a").role is Role.FENCING


def test_a_log_that_was_replaced_is_sound() -> None:
    machine = replica()
    machine.health = LogHealth.FAULTY
    machine.on_seeded(LogFacts(), 0, 0)
    assert machine.health is LogHealth.SOUND


def test_an_heir_counts_is_heard_and_has_all_that_is_committed() -> None:
    machine = serving(followers="b")
    coordinator = machine.coordinator
    assert coordinator is not None and coordinator.has_heir(0)
    assert not coordinator.has_heir(1_000_000)
    machine.on_staged(batch(2, epoch=1))
    machine.on_durable(2)
    assert coordinator.has_heir(0)  # nothing more is committed
    other = serving(followers="bc")
    other.on_staged(batch(2, epoch=1))
    other.on_durable(2)
    other.on_sent("b", 2, entries=1, bytes=1, now=0)
    other.on_ack(ack("b", other, durable=2), 0)
    other.on_follower_lost("b", 1)
    assert other.coordinator is not None and not other.coordinator.has_heir(0)
