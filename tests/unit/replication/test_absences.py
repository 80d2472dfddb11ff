from tests.unit.replication.parts import disk, facts, only, record

from penstock.replication.assignment import PartitionRecord
from penstock.replication.coordinator import Coordinator, MemberStatus
from penstock.replication.effects import Ack, Effects, Follow, Warn
from penstock.replication.facts import OwnCopy, ReplicationOptions

OPTIONS = ReplicationOptions(credit_entries=4, lagging_ms=100)
LAST = 4


def coordinator(of: PartitionRecord | None = None) -> Coordinator:
    """`a`, with a log of four entries; nobody follows yet."""
    log = facts(*[2] * LAST, durable=LAST)
    own = OwnCopy("a", uuid=disk("a"), log=log, committed=0, options=OPTIONS)
    return Coordinator(own, record=of or record(2), revision=1)


def follow(machine: Coordinator, *, stream: int = 1, now: int = 0, has: int = 0) -> None:
    tail = [(2, has)] if has else []
    machine.on_follow(Follow("b", disk("b"), 2, stream, 0, tail, 4, 1000), now)


def ack(machine: Coordinator, durable: int, *, stream: int = 1, now: int = 0) -> Effects:
    return machine.on_ack(Ack("b", disk("b"), 2, stream, durable, durable, durable, 2), now)


def told(effects: Effects) -> list[tuple[str, str]]:
    return [(warning.node, warning.what) for warning in only(Warn, effects)]


def of_b(machine: Coordinator) -> MemberStatus:
    return next(standing for standing in machine.standings() if standing.node == "b")


def test_who_never_followed_holds_nothing_and_lags_in_time() -> None:
    machine = coordinator(record(2, "a", "ab"))
    assert of_b(machine) == MemberStatus("b", None, LAST, None, lagging=False)
    assert told(machine.on_tick(10)) == told(machine.on_tick(110)) == []
    assert told(machine.on_tick(111)) == [("b", "lagging")]
    assert told(machine.on_tick(112)) == []  # once
    assert of_b(machine).lagging and of_b(machine).credit_share == 0.0


def test_without_credit_and_then_without_a_stream_is_one_time() -> None:
    machine = coordinator(record(2, "a", "ab"))
    follow(machine)
    ack(machine, 0)
    machine.senders["b"].on_sent(LAST, entries=4, bytes=4, now=5)
    machine.on_tick(95)
    machine.on_follower_lost("b", 1)
    assert told(machine.on_tick(105)) == []
    assert told(machine.on_tick(106)) == [("b", "lagging")]


def test_who_had_credit_is_away_since_it_was_heard() -> None:
    machine = coordinator(record(2, "a", "ab"))
    follow(machine)
    machine.senders["b"].on_sent(2, entries=2, bytes=2, now=0)
    ack(machine, 2, now=20)
    machine.on_follower_lost("b", 1)
    assert of_b(machine) == MemberStatus("b", 2, LAST - 2, None, lagging=False)
    assert told(machine.on_tick(120)) == []
    assert told(machine.on_tick(121)) == [("b", "lagging")]


def test_asking_for_a_stream_is_not_following_but_an_acknowledgement_is() -> None:
    machine = coordinator(record(2, "a", "ab"))
    machine.on_tick(0)
    for number in range(1, 12):  # it asks and asks, and our answers are lost
        follow(machine, stream=number, now=10 * number)
        machine.on_tick(10 * number)
    assert of_b(machine).lagging
    assert told(ack(machine, 0, stream=11, now=111)) == [("b", "resumed")]
    assert not of_b(machine).lagging and of_b(machine).credit_share == 1.0


def test_who_lagged_with_a_stream_lags_without_it() -> None:
    machine = coordinator(record(2, "a", "ab"))
    follow(machine)
    ack(machine, 0)
    machine.senders["b"].on_sent(LAST, entries=4, bytes=4, now=0)
    assert told(machine.on_tick(101)) == [("b", "lagging")]
    machine.on_follower_lost("b", 1)
    assert told(machine.on_tick(102)) == [] and of_b(machine).lagging


def test_who_comes_back_holds_what_it_held() -> None:
    machine = coordinator(record(2, "a", "ab"))
    follow(machine)
    assert of_b(machine)[:3] == ("b", None, LAST)  # it has not said anything yet
    machine.senders["b"].on_sent(2, entries=2, bytes=2, now=0)
    ack(machine, 2)
    machine.on_follower_lost("b", 1)
    follow(machine, stream=2, has=3)
    assert of_b(machine)[:3] == ("b", 2, LAST - 2)
    machine.on_ack(Ack("b", disk("b"), 2, 2, 0, 0, 3, 2), 0)  # of what it had, not of what was sent
    assert of_b(machine)[:3] == ("b", 3, LAST - 3)


def test_who_comes_back_without_what_it_held_holds_nothing() -> None:
    machine = coordinator(record(2, "a", "ab"))
    follow(machine)
    machine.senders["b"].on_sent(3, entries=3, bytes=3, now=0)
    ack(machine, 3)
    machine.on_follower_lost("b", 1)
    follow(machine, stream=2)  # with an empty disk
    assert of_b(machine)[:3] == ("b", None, LAST)


def test_who_starts_over_holds_nothing_any_more() -> None:
    machine = coordinator(record(2, "a", "ab"))
    follow(machine)
    machine.senders["b"].on_sent(3, entries=3, bytes=3, now=0)
    ack(machine, 3)
    machine._log.first = 3
    follow(machine, stream=2)  # with nothing left, of which a snapshot has to be copied
    assert of_b(machine) == MemberStatus("b", None, LAST, None, lagging=False)


def test_who_is_no_member_is_forgotten() -> None:
    machine = coordinator()
    machine.on_tick(0)
    machine.on_record(record(2, "a", "ac"), 2)
    assert [standing.node for standing in machine.standings()] == ["c"]
    machine.on_tick(50)
    machine.on_record(record(2, "a", "abc"), 3)
    assert told(machine.on_tick(110)) == [("c", "lagging")]  # and b has only just come back
