"""Orders of events that are rare, and in which a replica must not lie about its log."""

import pytest
from tests.unit.replication.parts import (
    ack,
    append,
    batch,
    disk,
    facts,
    fencing,
    follow_and_hold,
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
    Ack,
    Append,
    ChangeRecord,
    CloseStream,
    Commit,
    Fence,
    Fenced,
    Follow,
    Followed,
    OpenStream,
    Probe,
    Probed,
    Reseed,
    SteppedDown,
    TakeEpoch,
    Truncate,
    Write,
)
from penstock.replication.facts import LogFacts
from penstock.replication.replica import Replica, Role

SILENCE = 1501


def truncating() -> Replica:
    """b holds 1 2 3 of epoch 1; a, in epoch 2, has told it to forget 2 and 3."""
    machine, follow = following(log=facts(1, 1, 1), epoch=2)
    assert machine.on_followed(followed(follow, 1), 0) == [Truncate(1)]
    return machine


def test_no_stream_is_opened_while_the_log_is_cut() -> None:
    machine = truncating()
    effects = persist(machine, machine.on_record(record(3, "c"), 3, 0))
    assert only(OpenStream, effects) == []  # its tail would name entries that are going
    assert opened(machine.on_truncated(1, 0)).tail == [(1, 1)]


def test_a_fence_waits_while_the_log_is_cut() -> None:
    machine = truncating()
    assert sent(Fenced, persist(machine, machine.on_fence(Fence("c", 3), 0))) == []
    (answer,) = sent(Fenced, machine.on_truncated(1, 0))
    assert answer.end == (1, 1)


def test_a_taker_does_not_enter_while_its_log_is_cut() -> None:
    machine = truncating()
    persist(machine, machine.on_epoch_taken(record(3, "b"), 3, 0))
    machine.on_fenced(promise("c", 3), 0)
    assert machine.role is Role.FENCING
    machine.on_truncated(1, 0)
    machine.on_fenced(promise("c", 3), 0)
    assert machine.coordinator is not None
    assert machine.coordinator.sequence_barrier == 2


def test_a_taker_does_not_enter_while_its_log_is_replaced() -> None:
    machine, follow = following(log=facts(1, 1), epoch=2)
    assert machine.on_followed(followed(follow, 0, reseed=True), 0) == [Reseed("a")]
    persist(machine, machine.on_epoch_taken(record(3, "b"), 3, 0))
    machine.on_fenced(promise("c", 3), 0)
    machine.on_seeded(LogFacts(first=10, last=9, durable=9, runs=[(2, 9)]), 9, 0)
    machine.on_fenced(promise("c", 3), 0)
    assert machine.coordinator is not None
    assert machine.coordinator.sequence_barrier == 10


def lending() -> tuple[Replica, Follow]:
    """b has promised epoch 2 to a, whose log is behind, and lends it its own."""
    machine = replica(log=facts(1, 1))
    machine.on_record(record(1, "c"), 1, 0)
    persist(machine, machine.on_fence(Fence("a", 2), 0))
    follow = Follow("a", disk("a"), 2, 7, 0, [], 100, 1000, adopt=True)
    machine.on_follow(follow, 0)
    assert machine.may_send("a")
    return machine, follow


def test_a_lender_goes_on_when_the_takers_record_arrives() -> None:
    machine, _ = lending()
    persist(machine, machine.on_record(record(2, "a"), 2, 0))
    assert machine.may_send("a")


def test_a_lender_goes_on_when_the_taker_acknowledges() -> None:
    machine, follow = lending()
    machine.on_sent("a", 1, entries=1, bytes=10, now=0)
    machine.on_ack(Ack("a", disk("a"), 2, follow.stream, 1, 10, 1, 2), 0)
    assert machine.may_send("a")


def test_a_lender_goes_on_when_somebody_elses_stream_ends() -> None:
    machine, follow = lending()
    machine.on_follower_lost("c", follow.stream)
    assert machine.may_send("a")
    machine.on_follower_lost("a", follow.stream)
    assert machine.may_send("a") is None


def test_a_lender_stops_when_it_promises_another() -> None:
    machine, _ = lending()
    persist(machine, machine.on_fence(Fence("c", 3), 0))
    assert machine.may_send("a") is None


def test_a_change_of_lists_leaves_streams_open() -> None:
    machine, follow = following()
    machine.on_followed(followed(follow, 0), 0)
    assert machine.on_record(record(1, "a", learners="d"), 2, 0) == []
    assert machine.on_append(append(follow), [batch(1, epoch=1, previous=0)], 0)


def test_a_silent_stream_is_opened_again_though_nobody_reports_it_lost() -> None:
    machine, follow = following()
    assert only(OpenStream, machine.on_tick(SILENCE - 1)) == []
    assert opened(machine.on_tick(SILENCE)).stream != follow.stream


def test_streams_of_one_life_are_not_taken_for_those_of_the_next() -> None:
    _, before = following()
    machine = replica(promised=1)
    after = opened(machine.on_record(record(), 1, 5000))
    assert after.stream != before.stream


def test_an_ack_for_another_disk_does_not_count() -> None:
    machine = serving(followers="b")
    follow_and_hold(machine, "c", uuid="wiped", stream=5)
    assert machine.coordinator is not None
    machine.coordinator.senders["c"].durable = 0
    machine.on_ack(ack("c", machine, stream=5, durable=1), 0)  # of the disk that was there before
    assert machine.coordinator.senders["c"].durable == 0


def test_who_resigns_lets_the_others_try_first() -> None:
    machine = serving()
    machine.on_members({"a": 1, "b": 2, "c": 3})
    assert only(SteppedDown, machine.resign(0))
    assert sent(Probe, machine.on_tick(100)) == []
    assert len(sent(Probe, machine.on_tick(SILENCE + 100))) == 2  # nobody has taken over


def test_what_was_not_written_is_not_committed_either() -> None:
    machine, follow = following()
    machine.on_followed(followed(follow, 0), 0)
    batches = [batch(1, epoch=1, previous=0), batch(2, epoch=1)]
    effects = machine.on_append(append(follow, committed=2), batches, 0)
    assert only(Write, effects)
    assert only(Commit, effects)
    machine.on_unwritten(1, 0)
    assert machine.committed == 1
    assert opened(machine.on_tick(SILENCE)).tail == [(1, 1)]
    machine.validate()


def test_a_coordinator_never_takes_back_what_it_staged() -> None:
    machine = serving()
    with pytest.raises(RuntimeError, match="staged"):
        machine.on_unwritten(0, 0)


def test_an_entry_is_not_staged_past_a_gap() -> None:
    machine = serving()
    with pytest.raises(RuntimeError, match="follow"):
        machine.on_staged(batch(9, epoch=1))


def test_a_disk_that_no_record_names_does_not_take_over() -> None:
    machine = replica()
    nameless = record(1, "a", uuids={"a": disk("a"), "c": disk("c")})
    machine.on_record(nameless, 1, 0)
    assert not machine.counts
    alone = replica()
    alone.on_record(record(0, "", "b", uuids={}), 1, 0)
    assert alone.counts  # it has nobody to be mistaken for


def test_a_follower_vouches_at_once_for_what_it_has() -> None:
    machine, follow = following(log=facts(1, 1))
    (first,) = sent(Ack, machine.on_followed(followed(follow, 2), 0))
    assert first.durable == 2


def test_a_cut_does_not_forget_the_watermark_of_the_handshake() -> None:
    machine, follow = following(log=facts(1, 1), epoch=2)
    machine.on_followed(followed(follow, 1, committed=1), 0)
    assert only(Commit, machine.on_truncated(1, 0)) == [Commit(1)]


def test_a_coordinator_that_is_still_taking_over_is_not_silent() -> None:
    taker = fencing(epoch=2)
    (reply,) = sent(Followed, taker.on_follow(Follow("b", disk("b"), 2, 1, 0, [], 9, 9), 0))
    assert reply.refused
    machine, follow = following(epoch=2)
    machine.on_followed(Followed("a", 2, follow.stream, 0, 0, False, True, reply.waiting), 1000)
    assert not machine.lost(2000)


def test_a_broken_stream_takes_nothing_more() -> None:
    machine, follow = following()
    machine.on_followed(followed(follow, 0), 0)
    machine.on_stream_lost(follow.stream, 0)
    assert machine.on_append(append(follow), [batch(1, epoch=1, previous=0)], 0) == []


def test_agreement_that_comes_when_the_coordinator_is_back_is_void() -> None:
    machine, _ = following()
    machine.on_members({"a": 1, "b": 2, "c": 3})
    asked = machine.on_tick(SILENCE)
    assert sent(Probe, asked)
    machine.on_followed(followed(opened(asked), 0), SILENCE + 100)
    assert only(TakeEpoch, machine.on_probed(Probed("c", 1, True), SILENCE + 100)) == []


def test_an_epoch_that_came_another_way_does_not_use_old_promises() -> None:
    machine = fencing("a", epoch=2)
    machine.on_record(record(3, "a"), 3, 0)  # won by an earlier attempt, not told yet
    machine.on_fenced(promise("b", 3), 0)
    assert machine.coordinator is None


def test_a_fence_that_is_asked_twice_is_answered_once() -> None:
    machine = replica()
    effects = machine.on_fence(Fence("a", 1), 0) + machine.on_fence(Fence("a", 1), 0)
    assert len(sent(Fenced, persist(machine, effects))) == 1


def test_a_reader_whose_place_was_compacted_is_not_sent_gaps() -> None:
    machine = serving()
    machine.on_follow(Follow("b", disk("b"), 1, 9, 0, [], 1000, 1000), 0)
    machine.log.first = 2
    assert machine.may_send("b") is None
    machine.on_tick(1)
    assert machine.coordinator is not None
    assert "b" not in machine.coordinator.senders  # no sign of life: it will ask again


def test_a_log_whose_last_epoch_is_unknown_is_not_reported_as_empty() -> None:
    machine = replica(log=LogFacts(first=6, last=5, durable=5))
    with pytest.raises(RuntimeError, match="epoch"):
        persist(machine, machine.on_fence(Fence("a", 1), 0))


def test_closing_a_stream_that_is_not_open_says_nothing() -> None:
    machine = replica()
    assert only(CloseStream, machine.on_fence(Fence("a", 1), 0)) == []


def test_who_has_moved_itself_away_changes_the_record_no_more() -> None:
    machine = serving()
    effects = machine.on_record(record(1, "a", "bcd"), 2, 0)
    assert only(ChangeRecord, effects) == []
    assert only(SteppedDown, effects)


def test_a_stream_whose_answer_was_lost_is_opened_again_though_it_shows_life() -> None:
    machine, follow = following()
    for now in range(300, SILENCE, 300):
        machine.on_append(append(follow), [], now)
    assert opened(machine.on_tick(SILENCE)).stream != follow.stream


def test_a_slice_that_was_lost_on_the_way_is_missed_at_the_next_sign_of_life() -> None:
    machine, follow = following()
    machine.on_followed(followed(follow, 0), 0)
    machine.on_append(append(follow, sent=0), [], 100)
    assert only(OpenStream, machine.on_tick(400)) == []
    machine.on_append(append(follow, sent=2), [], 500)
    assert opened(machine.on_tick(500)).tail == []


def test_a_sign_of_life_tells_what_was_sent() -> None:
    machine = serving(followers="b")
    (beat,) = sent(Append, machine.on_tick(300))
    assert beat.sent == 1
