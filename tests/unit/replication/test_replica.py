import msgspec
import pytest
from tests.unit.replication.parts import (
    ack,
    append,
    batch,
    disk,
    facts,
    fencing,
    followed,
    following,
    only,
    opened,
    persist,
    promise,
    record,
    replica,
    sent,
    serving,
)

from penstock.replication.effects import (
    Append,
    AppendBarrier,
    BeganServing,
    CloseStream,
    Fence,
    Fenced,
    Followed,
    Halt,
    Persist,
    Probe,
    Probed,
    Retire,
    Send,
    SteppedDown,
    TakeEpoch,
)
from penstock.replication.replica import Role


def test_a_replica_follows_once_its_promise_is_on_disk() -> None:
    machine = replica()
    assert machine.on_record(record(), 1, 0) == [Persist(1)]
    assert machine.role is Role.FOLLOWING
    assert opened(machine.on_persisted(1, 0)).epoch == 1


def test_a_record_that_is_not_newer_is_void() -> None:
    machine, _ = following()
    assert machine.on_record(record(2, "c"), 1, 0) == []


def test_who_is_no_member_holds_nothing() -> None:
    machine, _ = following()
    effects = machine.on_record(record(2, "a", "acd"), 2, 0)
    assert only(CloseStream, effects)
    assert only(Retire, effects)
    assert machine.role is Role.IDLE


def test_a_fence_below_the_promise_is_refused_with_the_promise() -> None:
    machine = replica(promised=5)
    (answer,) = sent(Fenced, machine.on_fence(Fence("a", 4), 0))
    assert answer.promised == 5


def test_a_promise_names_what_is_synced() -> None:
    machine = replica(log=facts(1, 2, durable=1))
    (answer,) = sent(Fenced, persist(machine, machine.on_fence(Fence("a", 3), 0)))
    assert (answer.promised, answer.end, answer.uuid) == (3, (1, 1), disk("b"))


def test_a_fence_ends_the_tenure_before_it_is_answered() -> None:
    machine = serving()
    effects = machine.on_fence(Fence("b", 2), 0)
    assert effects == [SteppedDown(1), Persist(2)]


def test_after_a_promise_the_old_coordinator_is_not_heard() -> None:
    machine, follow = following()
    machine.on_followed(followed(follow, 0), 0)
    machine.on_fence(Fence("c", 2), 0)
    assert machine.on_append(append(follow), [batch(1, epoch=1, previous=0)], 0) == []
    assert machine.on_durable(1) == []


def test_a_taker_asks_for_promises_after_its_own() -> None:
    machine = replica("a")
    assert machine.on_epoch_taken(record(), 1, 0) == [Persist(1)]
    assert {e.to for e in only(Send, machine.on_persisted(1, 0))} == {"b", "c"}


def test_a_majority_of_promises_and_the_best_log_is_enough() -> None:
    machine = fencing(epoch=2, log=facts(1))
    effects = machine.on_fenced(promise("b", 2, (1, 1)), 0)
    assert effects == [AppendBarrier(2)]
    assert machine.role is Role.ENTERING


def test_promises_that_do_not_count() -> None:
    machine = fencing(epoch=2)
    machine.on_fenced(promise("b", 1), 0)  # of an epoch before
    machine.on_fenced(Fenced("b", "another", 2, 0, 0, 0), 0)  # of another disk
    assert machine.role is Role.FENCING
    machine.on_fenced(promise("b", 3), 0)  # somebody is ahead of us
    assert machine.role is Role.IDLE


def test_time_begins_where_the_clocks_of_a_quorum_have_arrived() -> None:
    machine = fencing(epoch=2)
    machine.on_fenced(msgspec.structs.replace(promise("b", 2), time_ms=5000), 100)
    assert machine.quorum_ms(3_605_000, 100) == 5000
    assert machine.quorum_ms(3_605_250, 350) == 5250, "its clock went on meanwhile"
    assert machine.quorum_ms(4000, 100) == 4000
    machine = fencing(epoch=2)
    machine.on_fenced(promise("b", 2), 100)
    assert machine.quorum_ms(7000, 100) == 7000, "one that does not say is no reason to wait"


def test_who_is_barred_asks_nobody_and_enters_nothing() -> None:
    machine = replica("b")
    machine.barred = True
    machine.on_record(record(1, "a"), 1, 0)
    machine.on_members({"b": 1, "c": 2})
    assert sent(Probe, machine.on_tick(10_000)) == []
    machine.on_epoch_taken(record(2, "b"), 2, 10_000)
    assert machine.role is Role.IDLE
    machine.barred = False
    assert len(sent(Probe, machine.on_tick(10_100))) == 2


def test_a_better_log_is_copied_before_the_epoch_is_entered() -> None:
    machine = fencing(epoch=3, log=facts(1, 1))
    follow = opened(machine.on_fenced(promise("b", 3, (2, 2)), 0))
    assert (follow.adopt, follow.tail, machine.role) == (True, [(1, 2)], Role.ADOPTING)
    machine.on_followed(Followed("b", 3, follow.stream, 1, 0), 0)
    machine.on_truncated(1, 0)
    head = Append("b", 3, follow.stream, 0)
    effects = machine.on_append(head, [batch(2, epoch=2, previous=1)], 0)
    assert only(AppendBarrier, effects) == [AppendBarrier(3)]
    assert machine.log.end == (2, 2)


def test_fencing_is_tried_again() -> None:
    machine = fencing(epoch=2)
    assert machine.on_tick(699) == []
    assert len(sent(Fence, machine.on_tick(700))) == 2


def test_a_lender_that_goes_silent_is_not_waited_for() -> None:
    machine = fencing(epoch=3)
    machine.on_fenced(promise("b", 3, (2, 1)), 0)
    assert machine.role is Role.ADOPTING
    machine.on_tick(1500)
    assert machine.role is Role.FENCING
    follow = opened(machine.on_fenced(promise("c", 3, (1, 1)), 1500))
    assert follow.adopt
    assert machine.follower is not None
    assert machine.follower.source == "c"


def test_serving_begins_when_the_barrier_is_committed() -> None:
    machine = fencing()
    machine.on_fenced(promise("b", 1), 0)
    machine.on_staged(batch(1, epoch=1, previous=0))
    machine.on_durable(1)
    assert machine.writable(0) is not None
    machine.on_follow(following()[1], 0)
    machine.on_sent("b", 1, entries=1, bytes=1, now=0)
    assert machine.coordinator is not None
    stream = machine.coordinator.senders["b"].stream
    effects = machine.on_ack(ack("b", machine, stream=stream, durable=1), 0)
    assert only(BeganServing, effects)
    assert machine.writable(0) is None
    machine.validate()


def test_who_does_not_coordinate_refuses_followers() -> None:
    machine, _ = following()
    (reply,) = sent(Followed, machine.on_follow(following("c")[1], 0))
    assert reply.refused
    assert not reply.waiting


def test_an_acknowledgement_under_a_later_promise_ends_the_tenure() -> None:
    machine = serving()
    late = msgspec.structs.replace(ack("b", machine, durable=1), promised=2)
    assert only(SteppedDown, machine.on_ack(late, 0))


def test_a_broken_rule_stops_everything() -> None:
    machine, follow = following(log=facts(1), committed=1)
    assert only(Halt, machine.on_followed(followed(follow, 0), 0))
    assert machine.role is Role.HALTED
    assert machine.on_tick(9999) == []
    assert machine.on_record(record(2, "c"), 2, 0) == []


def test_a_lost_coordinator_is_replaced_after_the_others_agree() -> None:
    machine, _ = following()
    machine.on_members({"b": 2, "c": 3})  # a's registration has ended
    assert len(sent(Probe, machine.on_tick(10))) == 2
    assert machine.on_probed(Probed("c", 1, True), 20) == [TakeEpoch()]


def test_a_probe_is_answered_by_what_we_hear() -> None:
    machine, follow = following()
    machine.on_followed(followed(follow, 0), 0)
    for now, silent in ((1500, False), (1501, True)):
        (answer,) = sent(Probed, machine.on_probe(Probe("c", 1), now))
        assert answer.silent is silent
    (answer,) = sent(Probed, serving().on_probe(Probe("c", 1), 0))
    assert not answer.silent  # who coordinates is not lost


def test_a_coordinator_says_goodbye() -> None:
    machine = serving()
    effects = machine.resign(0)
    assert {m.resigned for m in sent(Append, effects)} == {True}
    follower, follow = following()
    follower.on_followed(followed(follow, 0), 0)
    follower.on_append(append(follow, resigned=True), [], 10)
    assert follower.lost(11)


def test_who_listens_there_no_more_need_not_be_waited_for() -> None:
    machine, follow = following()
    machine.on_stream_lost(follow.stream, 10, gone=True)
    assert machine.lost(11)


def test_who_stepped_down_commits_and_sends_nothing_more() -> None:
    machine = serving()
    late = ack("b", machine, durable=1)
    assert machine.resign(0)[-1] == SteppedDown(1)
    assert machine.resign(0) == [] and machine.on_ack(late, 0) == []
    assert machine.may_send("b") is None and not machine.serving


def test_a_role_is_not_skipped() -> None:
    machine = replica("a")
    for role in (Role.SERVING, Role.ENTERING, Role.ADOPTING):
        with pytest.raises(RuntimeError, match="illegal"):
            machine._become(role)
    assert machine.role is Role.IDLE


def test_what_a_coordinator_appends_is_one_run_of_its_epoch() -> None:
    machine = serving(log=facts(1, 1), epoch=2)
    machine.on_staged(batch(4, epoch=2, count=3))
    assert machine.log.tail(0) == [(1, 2), (2, 6)]
    assert machine.log.end == (2, 6)
