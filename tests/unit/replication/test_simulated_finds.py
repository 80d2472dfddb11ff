"""Mistakes that the simulator found; docs/simulation.md names the seeds."""

from tests.unit.replication.parts import ack, disk, replica, serving

from penstock.replication.messages import Fence, Follow


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


def test_an_ack_of_more_than_was_sent_is_void() -> None:
    machine = serving(followers="b")
    machine.on_follower_lost("b", 1, 0)
    machine.on_follow(Follow("b", disk("b"), machine.epoch, 1, 0, [], 1000, 1 << 20), 0)
    machine.on_ack(ack("b", machine, durable=1), 0)  # from before the stream was lost
    assert machine.coordinator.senders["b"].durable == 0
