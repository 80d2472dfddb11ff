from dataclasses import replace

from tests.unit.replication.parts import append, batch, facts, followed, only, sent

from penstock.model.batch import Batch
from penstock.replication.effects import Ack, Append, Commit, Halt, Reseed, Truncate, Write
from penstock.replication.facts import LogFacts, OwnCopy, ReplicationOptions
from penstock.replication.follower import Follower, FollowerState
from penstock.replication.sender import Credit

OPTIONS = ReplicationOptions(credit_entries=8, ack_entries=3, buffer_batches=2, buffer_ms=100)


def follower(
    log: LogFacts | None = None, *, committed: int = 0, adopt: bool = False,
    options: ReplicationOptions = OPTIONS,
) -> Follower:  # fmt: skip
    own = OwnCopy("b", uuid="b-disk", log=log or facts(), committed=committed, options=options)
    return Follower(own, source="a", epoch=2, stream=1, now=0, adopt=adopt)


def streaming(log: LogFacts | None = None, **more: object) -> Follower:
    machine = follower(log, **more)  # type: ignore[arg-type]
    machine.on_followed(followed(machine.follow(), machine._log.last), 0)
    assert machine.state is FollowerState.STREAMING
    return machine


def entries(*sequences: int) -> list[Batch]:
    return [batch(n, epoch=2, previous=0 if n == 1 else 2) for n in sequences]


def head(machine: Follower, committed: int = 0) -> Append:
    return append(machine.follow(), committed)


def test_a_request_tells_the_epochs_from_the_commit_on() -> None:
    request = follower(facts(1, 1, 2), committed=2).follow()
    assert request.tail == [(1, 2), (2, 3)]
    assert (request.entries, request.bytes) == (8, OPTIONS.credit_bytes)


def test_what_conflicts_is_forgotten_before_anything_is_written() -> None:
    machine = follower(facts(1, 1))
    assert machine.on_followed(followed(machine.follow(), 1), 0) == [Truncate(1)]
    assert machine.on_append(head(machine), [batch(2, epoch=2, previous=1)], 0) == []
    machine._log.truncate(1)
    effects = machine.on_truncated(0)
    assert [b.first for w in only(Write, effects) for b in w.batches] == [2]


def test_what_is_committed_here_is_never_forgotten() -> None:
    machine = follower(facts(1, 1), committed=2)
    effects = machine.on_followed(followed(machine.follow(), 1), 0)
    assert [type(effect) for effect in effects] == [Halt]
    assert machine.on_append(head(machine), entries(1), 0) == []


def test_who_is_too_far_behind_starts_over() -> None:
    machine = follower()
    assert machine.on_followed(followed(machine.follow(), 0, reseed=True), 0) == [Reseed("a")]
    assert machine.on_append(head(machine), entries(1), 0) == []


def test_batches_are_written_in_order_whatever_order_they_come_in() -> None:
    machine = streaming()
    assert only(Write, machine.on_append(head(machine), entries(2), 0)) == []
    (write,) = only(Write, machine.on_append(head(machine), entries(1), 0))
    assert [b.first for b in write.batches] == [1, 2]
    assert machine.matched == 2


def test_too_many_that_wait_break_the_stream() -> None:
    machine = streaming()
    machine.on_append(head(machine), entries(2, 3), 0)
    assert not machine.broken
    machine.on_append(head(machine), entries(4), 0)
    assert machine.broken
    machine.validate()


def test_waiting_too_long_breaks_the_stream() -> None:
    machine = streaming()
    machine.on_append(head(machine), entries(2), 0)
    machine.on_tick(100)
    assert not machine.broken
    machine.on_tick(101)
    assert machine.broken


def test_a_batch_of_another_history_breaks_the_stream() -> None:
    machine = streaming(facts(1))
    machine.on_append(head(machine), [batch(2, epoch=2, previous=2)], 0)
    assert machine.broken
    assert machine._log.last == 1


def test_only_what_is_synced_is_vouched_for() -> None:
    machine = streaming()
    assert sent(Ack, machine.on_append(head(machine), entries(1, 2), 0)) == []
    machine._log.durable = 1
    (ack,) = sent(Ack, machine.on_durable())
    assert (ack.durable, ack.entries) == (1, 2)
    assert machine.on_durable() == []


def test_credit_comes_back_before_the_disk_is_done() -> None:
    machine = streaming()
    (ack,) = sent(Ack, machine.on_append(head(machine), entries(1, 2, 3), 0))
    assert (ack.durable, ack.entries) == (0, 3)


def test_a_copy_that_the_network_made_is_not_counted() -> None:
    machine = streaming()
    machine.on_append(head(machine), entries(1, 1), 0)
    machine.on_append(head(machine), entries(1), 0)
    (ack,) = sent(Ack, machine.on_append(head(machine), [], 0))
    assert ack.entries == 1


def test_a_sign_of_life_is_answered() -> None:
    machine = streaming()
    assert len(sent(Ack, machine.on_append(head(machine), [], 5))) == 1
    assert machine.heard_ms == 5


def test_a_commit_is_known_up_to_what_has_arrived() -> None:
    machine = streaming()
    effects = machine.on_append(head(machine, committed=9), entries(1, 2), 0)
    assert only(Commit, effects) == [Commit(2)]
    assert only(Commit, machine.on_append(head(machine, committed=1), [], 0)) == []


def test_what_is_adopted_is_not_committed_by_it() -> None:
    machine = streaming(adopt=True)
    assert only(Commit, machine.on_append(head(machine, committed=1), entries(1), 0)) == []


def test_other_streams_and_epochs_are_not_heard() -> None:
    machine = streaming()
    late = head(machine)
    for stray in (Append("a", 2, 9, 5), Append("a", 1, late.stream, 5)):
        assert machine.on_append(stray, entries(1), 0) == []


def test_acknowledgements_come_at_half_a_small_window() -> None:
    machine = streaming(options=replace(OPTIONS, credit_entries=2, ack_entries=100))
    assert sent(Ack, machine.on_append(head(machine), entries(1), 0))


def test_a_slow_disk_is_given_two_windows_and_no_more() -> None:
    size = batch(1, epoch=2).size
    options = replace(OPTIONS, credit_entries=1000, credit_bytes=10 * size)
    machine, sender = streaming(options=options), Credit(entries=1000, bytes=10 * size)
    sequence = 0
    while sequence < 100 and not sender.exhausted:  # what it acknowledges lets the sender go on
        sequence += 1
        sender.on_sent(1, size)
        for ack in sent(Ack, machine.on_append(head(machine), entries(sequence), 0)):
            sender.on_received(ack.entries, ack.bytes)
    assert 10 < sequence <= 20
    machine._log.durable = sequence
    (ack,) = sent(Ack, machine.on_durable())
    assert (ack.entries, ack.durable) == (sequence, sequence)
