"""Mistakes that the simulator found; docs/simulation.md names the seeds."""

from tests.unit.replication.parts import (
    ack,
    append,
    batch,
    disk,
    fencing,
    followed,
    only,
    opened,
    promise,
    replica,
    serving,
)

from penstock.replication.effects import Ack, AppendBarrier, Fence, Follow, SteppedDown
from penstock.replication.replica import Role


def test_a_copied_follow_does_not_begin_the_stream_anew() -> None:
    machine = serving(followers="b")
    follow = Follow("b", disk("b"), machine.epoch, 1, 0, [], 1000, 1 << 20)
    sender = machine.coordinator.senders["b"]
    assert machine.on_follow(follow, 0) == []  # what was sent and acknowledged still counts
    assert machine.coordinator.senders["b"] is sender


def test_a_copied_follow_of_a_taker_does_not_begin_the_stream_anew() -> None:
    machine = replica("b")
    machine.on_fence(Fence("a", 3), 0)
    machine.on_persisted(3, 0)
    follow = Follow("a", disk("a"), 3, 1, 0, [], 1000, 1 << 20, adopt=True)
    assert len(machine.on_follow(follow, 0)) == 1
    assert machine.on_follow(follow, 0) == []


def test_an_ack_of_more_than_was_sent_ends_the_stream() -> None:
    machine = serving(followers="b")
    committed = machine.coordinator.sequence_committed
    machine.on_follower_lost("b", 1)
    machine.on_follow(Follow("b", disk("b"), machine.epoch, 1, 0, [], 1000, 1 << 20), 0)
    machine.on_ack(ack("b", machine, durable=1), 0)  # from before the stream was lost
    assert "b" not in machine.coordinator.senders
    assert machine.coordinator.sequence_committed == committed
    machine.on_follow(Follow("b", disk("b"), machine.epoch, 2, 0, [], 1000, 1 << 20), 0)
    assert machine.coordinator.senders["b"].stream == 2


def test_a_taker_that_acknowledges_more_than_was_sent_is_lent_no_more() -> None:
    machine = replica("b")
    machine.on_fence(Fence("a", 3), 0)
    machine.on_persisted(3, 0)
    follow = Follow("a", disk("a"), 3, 1, 0, [], 1000, 1 << 20, adopt=True)
    machine.on_follow(follow, 0)
    machine.on_ack(Ack("a", disk("a"), 3, 1, entries=5, bytes=500, durable=0, promised=3), 0)
    assert len(machine.on_follow(follow, 0)) == 1  # it begins anew


def test_a_taker_without_room_for_the_adopted_log_gives_the_epoch_up() -> None:
    machine = fencing("a", epoch=2)
    follow = opened(machine.on_fenced(promise("b", 2, (1, 1)), 0))
    machine.on_followed(followed(follow, 0), 0)
    effects = machine.on_append(append(follow), [batch(1, epoch=1, previous=0)], 0)
    assert only(AppendBarrier, effects)  # decided before the disk had its say
    assert only(SteppedDown, machine.on_unwritten(0, 0))
    assert (machine.role, machine.log.last) == (Role.IDLE, 0)
