import msgspec
import numpy as np
import pytest

from penstock.errors import Corruption, InvalidArgument, StaleProducer
from penstock.heap.machine import DeadLetter, Heap
from penstock.heap.table import MessageState
from penstock.model.batch import DeadReason, Kind


def array(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def plan(log, *tokens: int, delay_ms: int | None = None, counted: bool = True):
    return log.heap.plan_return(array(*tokens), log.now, delay_ms=delay_ms, counted=counted)


# --- new messages ---


def test_messages_come_out_by_priority_then_age(log) -> None:
    log.put(5, 1, 5, -3)
    log.put(1)
    assert log.select() == [4, 2, 5, 1, 3]


def test_max_reverses_the_priority_not_the_age(log_of) -> None:
    log = log_of(mode="max")
    log.put(5, 1, 5, -3, (1 << 63) - 1, -(1 << 63))
    assert log.select() == [5, 1, 3, 2, 4, 6]


def test_a_delayed_message_waits_for_its_time(log) -> None:
    log.put(1, 2, 3, delay_ms=[500, 0, 100])
    assert (log.heap.ready, log.heap.delayed) == (1, 2)
    assert log.select() == [2]
    assert log.heap.next_wakeup() == log.now + 100
    log.now += 100
    assert log.select() == [2, 3]
    assert log.heap.next_wakeup() == log.now + 400
    log.now += 400
    assert log.select() == [1, 2, 3]
    assert log.heap.next_wakeup() is None


def test_a_single_delayed_message_waits_too(log) -> None:
    log.put(1, delay_ms=[500])
    assert log.select() == []
    log.now += 500
    assert log.select() == [1]


def test_an_enqueue_counts(log) -> None:
    applied = log.write(Kind.ENQ, 3, {"priority": [1, 1, 1], "delay_ms": [0, 9, 0]})
    assert (applied.enqueued, log.heap.ready) == (3, 2)
    assert log.heap.sequence_enqueued == 3


def test_a_retry_returns_the_first_messages(log) -> None:
    first = log.put_runs((b"p", 1, 0, 5))
    found = log.heap.dedup.admit(log.body((b"p", 1, 0, 5)))
    assert found == [(i, first + i, log.now) for i in range(5)]


def test_a_retry_that_overlaps_returns_only_the_duplicates(log) -> None:
    first = log.put_runs((b"p", 1, 0, 5))
    assert log.heap.dedup.admit(log.body((b"p", 1, 3, 5))) == [
        (0, first + 3, log.now),
        (1, first + 4, log.now),
    ]


def test_several_runs_are_admitted_each_for_itself(log) -> None:
    first = log.put_runs((b"p", 1, 0, 2), (b"", 0, 0, 3), (b"q", 7, 50, 2))
    found = log.heap.dedup.admit(log.body((b"q", 7, 49, 2), (b"", 0, 0, 4), (b"p", 1, 1, 2)))
    assert found == [(1, first + 5, log.now), (6, first + 1, log.now)]


def test_without_a_producer_nothing_is_a_duplicate(log) -> None:
    log.put_runs((b"", 0, 0, 3))
    assert log.heap.dedup.admit(log.body((b"", 0, 0, 3))) == []
    log.put(1)
    assert not log.heap.dedup.producers


def test_an_old_epoch_is_refused_a_new_one_starts_afresh(log) -> None:
    log.put_runs((b"p", 2, 0, 3))
    with pytest.raises(StaleProducer):
        log.heap.dedup.admit(log.body((b"p", 1, 9, 1)))
    assert log.heap.dedup.admit(log.body((b"p", 3, 0, 3))) == []


def test_a_body_that_repeats_itself_is_refused(log) -> None:
    with pytest.raises(InvalidArgument) as caught:
        log.heap.dedup.admit(log.body((b"p", 1, 0, 3), (b"q", 1, 0, 1), (b"p", 1, 2, 1)))
    assert caught.value.field == "run_sequence"


@pytest.mark.parametrize("runs", [1, 2])
def test_runs_that_cover_too_much_are_refused(log, runs: int) -> None:
    values = log.runs(*[(b"p", 1, 10 * i, 1) for i in range(runs)])
    values["run_count"] = [9] * runs
    batch = log.batch(Kind.ENQ, runs, values, runs=runs)
    with pytest.raises(InvalidArgument):
        log.heap.dedup.admit(batch.columns())


def test_a_compacted_batch_brings_the_survivors(log) -> None:
    values = {"sequence": [2, 9000], "priority": [4, 3], "max_retries": [-1, 7]}
    log.write(Kind.ENQ, 2, values, covers=10_000)
    assert log.heap.sequence_applied == 10_000
    assert log.select() == [9000, 2]
    table = log.heap.table
    assert table.limit[table.places(np.array([2, 9000], np.uint64))].tolist() == [0, 8]
    log.heap.validate()


def test_a_compacted_batch_may_be_empty(log) -> None:
    log.write(Kind.ENQ, 0, {}, covers=500)
    assert log.put(1) == [501]


def test_a_batch_must_follow_the_one_before(log) -> None:
    log.put(1)
    batch = log.batch(Kind.ENQ, 1, {"priority": [1]})
    log.heap.apply(batch, batch.columns())
    with pytest.raises(Corruption, match="does not follow"):
        log.heap.apply(batch, batch.columns())


# --- atomic batches ---


def prepare(log, *priorities: int, name: bytes = b"tx") -> int:
    first = log.heap.sequence_applied + 1
    values = log.runs((b"p", 1, 0, len(priorities))) | {
        "priority": list(priorities), "transaction": [name], "home": [4],
    }  # fmt: skip
    log.write(Kind.PREPARE, len(priorities), values, runs=1)
    return first


def decide(log, commit: bool, name: bytes = b"tx"):
    return log.write(Kind.DECIDE, 1, {"transaction": [name], "commit": [int(commit)]})


def test_a_prepared_message_is_invisible_until_it_is_committed(log) -> None:
    first = prepare(log, 5, 1)
    assert log.select() == []
    assert log.heap.is_prepared(first)
    assert log.heap.prepared[b"tx"].home == 4
    assert log.heap.alive(1, 99).tolist() == [first, first + 1]
    applied = decide(log, True)
    assert (applied.enqueued, log.heap.ready) == (2, 2)
    assert log.select() == [first + 1, first]
    assert log.heap.transactions.outcome(b"tx") is True
    log.heap.validate()


def test_an_aborted_batch_leaves_nothing_and_may_be_tried_again(log) -> None:
    first = prepare(log, 5, 1)
    assert len(log.heap.dedup.admit(log.body((b"p", 1, 0, 2)))) == 2
    decide(log, False)
    assert log.heap.alive(1, 99).tolist() == []
    assert log.heap.dedup.admit(log.body((b"p", 1, 0, 2))) == []
    assert log.heap.states(np.array([first], np.uint64))[0] in (
        MessageState.NONE,
        MessageState.DONE,
    )


def test_the_first_decision_wins(log) -> None:
    prepare(log, 1)
    decide(log, False)
    assert decide(log, True).enqueued == 0
    assert log.heap.transactions.outcome(b"tx") is False
    assert log.select() == []


@pytest.mark.parametrize("commit", [True, False])
def test_a_share_that_comes_after_the_decision_follows_it(log, commit: bool) -> None:
    decide(log, commit)
    first = prepare(log, 1)
    assert log.select() == ([first] if commit else [])
    assert not log.heap.prepared
    log.heap.validate()


def test_a_prepared_message_cannot_be_purged(log) -> None:
    first = prepare(log, 1)
    log.write(Kind.ACK, 1, {"message": [first]})
    log.write(Kind.ACK, 1, {"through": [100]})
    assert log.heap.is_prepared(first)


def test_a_prepare_without_a_transaction_is_damage(log) -> None:
    with pytest.raises(Corruption):
        log.write(Kind.PREPARE, 1, {"priority": [1]})


def test_deltas_are_done_at_once_and_cost_nothing(log_of) -> None:
    log = log_of(kind="delta", dimensions=4)
    empty = len(log.heap.table.living)
    for i in range(50):
        log.put(*[0] * 1000, payload=[b"x"] * 1000, run_count=[1000], run_epoch=[1],
                run_sequence=[1 + 1000 * i], run_producer=[b"p"], runs=1)  # fmt: skip
    heap = log.heap
    heap.validate()
    assert heap.sequence_enqueued == heap.sequence_applied == 50_000
    assert (heap.ready, heap.delayed, len(heap.table.living)) == (0, 0, empty)
    assert log.select() == [] and heap.oldest_alive() is None
    assert heap.dedup.places == 1


def test_a_delta_sent_again_is_recognised_after_a_snapshot(log_of) -> None:
    log = log_of(kind="delta", dimensions=4)
    columns = {"run_count": [2], "run_epoch": [3], "run_sequence": [7], "run_producer": [b"p"]}
    log.put(0, 0, payload=[b"a", b"b"], **columns, runs=1)
    restored = Heap.restore(log.config, b"".join(log.heap.snapshot()), partition=0)
    again = log.batch(Kind.ENQ, 2, {"payload": [b"a", b"b"], **columns}, runs=1).columns()
    assert restored.digest() == log.heap.digest()
    assert restored.dedup.admit(again) == [(0, 1, log.now), (1, 2, log.now)]


def test_an_atomic_batch_in_a_delta_topic_is_damage(log_of) -> None:
    log = log_of(kind="delta", dimensions=4)
    with pytest.raises(Corruption, match="delta topic"):
        log.write(Kind.PREPARE, 1, {"priority": [0], "transaction": [b"t"], "home": [0]})


def test_an_epoch_that_began_refuses_lower_ones_before_it_has_an_entry(log) -> None:
    log.put_runs((b"p", 2, 0, 3))
    names, epochs = [b"p", b"q"], [5, 1]
    log.write(Kind.PRODUCER, 2, {"producer": names, "producer_epoch": epochs})
    with pytest.raises(StaleProducer):
        log.heap.dedup.admit(log.body((b"p", 4, 9, 1)))
    assert log.heap.dedup.admit(log.body((b"p", 5, 0, 3))) == []
    assert log.heap.dedup.places == 0
    log.put_runs((b"p", 5, 0, 2))
    log.write(Kind.PRODUCER, 1, {"producer": [b"p"], "producer_epoch": [5]})
    assert len(log.heap.dedup.admit(log.body((b"p", 5, 0, 3)))) == 2  # what is known of it stays
    log.write(Kind.PRODUCER, 1, {"producer": [b"p"], "producer_epoch": [4]})
    assert log.heap.dedup.epoch_of(b"p") == 5 and log.heap.dedup.epoch_of(b"q") == 1
    log.heap.dedup.validate()


def test_a_beginning_without_a_producer_is_corruption(log) -> None:
    with pytest.raises(Corruption, match="names no producer"):
        log.write(Kind.PRODUCER, 1, {"producer_epoch": [1]})


# --- leases ---


def test_a_leased_message_is_not_offered_again(log) -> None:
    log.put(1, 2, 3)
    (first, second) = log.lease(2)
    assert log.select() == [3]
    messages, held = log.heap.resolve(array(first, second, 99))
    assert messages.tolist() == [1, 2, 0]
    assert held.tolist() == [True, True, False]


def test_a_message_cannot_be_leased_twice(log) -> None:
    log.put(1, 2)
    log.lease(1)
    for messages in ([1], [2, 2], [2, 1]):
        values = {"message": messages, "run_count": [len(messages)], "run_visibility_ms": [9]}
        with pytest.raises(Corruption):
            log.write(Kind.LEASE, len(messages), values, runs=1)


def test_one_lease_batch_serves_several_consumers(log) -> None:
    log.put(*range(5))
    values = {
        "message": log.select(5), "run_count": [2, 0, 3], "run_visibility_ms": [9, 9, 50],
        "run_consumer": [b"a", b"b", b"c"],
    }  # fmt: skip
    log.write(Kind.LEASE, 5, values, runs=3)
    assert [log.heap.leases_of(c) for c in (b"a", b"b", b"c")] == [2, 0, 3]
    assert log.heap.expired(log.now + 9, 10).tolist() == [6, 7]


def test_an_ack_ends_the_message_and_returns_the_credit(log) -> None:
    log.put(1, 2, 3)
    tokens = log.lease(2, consumer=b"a") + log.lease(1, consumer=b"b")
    applied = log.ack(*tokens)
    assert applied.acked == 3
    assert applied.released == {b"a": 2, b"b": 1}
    assert log.heap.oldest_alive() is None


def test_an_ack_counts_once_however_often_it_is_written(log) -> None:
    log.put(1, 2)
    (token, _) = log.lease(2)
    assert log.ack(token, token).acked == 1
    assert log.ack(token).acked == 0
    assert log.ack(7777).released == {}
    assert log.heap.leased == 1
    log.heap.validate()


def test_released_is_not_shared_between_batches(log) -> None:
    log.put(1)
    (token,) = log.lease(1)
    log.ack(token)
    assert log.put(1)
    assert log.write(Kind.ENQ, 1, {"priority": [1]}).released == {}


def test_an_extension_is_capped_from_the_grant(log_of) -> None:
    log = log_of(visibility_ms=1000, visibility_ms_max=5000)
    log.put(1)
    (token,) = log.lease(1, visibility_ms=1000)
    log.now += 3000
    assert log.heap.cap_extend(array(token, 99), log.now, 9000).tolist() == [2000, 0]
    log.write(Kind.EXTEND, 1, {"token": [token], "extend_ms": [2000]})
    assert log.heap.expired(log.now + 1999, 9).tolist() == []
    assert log.heap.next_wakeup() == log.now + 2000
    log.now += 2500
    assert log.heap.cap_extend(array(token), log.now, 9000).tolist() == [0]


def test_a_barrier_gives_every_lease_its_full_time(log) -> None:
    log.put(1)
    (token,) = log.lease(1, visibility_ms=1000)
    log.now += 900
    log.write(Kind.BARRIER, 1, {"node": [b"n"]})
    assert log.heap.expired(log.now + 999, 9).tolist() == []
    assert log.heap.expired(log.now + 1000, 9).tolist() == [token]


# --- back ---


def test_a_nacked_message_waits_and_counts(log) -> None:
    log.put(1, 2)
    (token,) = log.lease(1)
    applied = log.nack(token, not_before_ms=log.now + 50)
    assert (applied.retried, log.heap.ready, applied.released) == (1, 1, {b"c": 1})
    assert log.select() == [2]
    log.now += 50
    assert log.select() == [1, 2]
    assert log.heap.attempts(array(1, 2)).tolist() == [1, 0]


def test_an_unused_lease_comes_back_at_once_and_uncounted(log) -> None:
    log.put(1)
    (token,) = log.lease(1)
    given = plan(log, token, counted=False)
    assert given.not_before_ms.tolist() == [log.now]
    values = {"token": given.tokens, "not_before_ms": given.not_before_ms, "counted": [0]}
    applied = log.write(Kind.NACK, 1, values)
    assert (applied.retried, log.heap.ready) == (0, 1)
    assert log.heap.attempts(array(1)).tolist() == [0]


def test_past_its_retries_a_message_is_planned_dead(log) -> None:
    log.put(1, 1, max_retries=[0, 1])
    tokens = log.lease(2)
    given = plan(log, *tokens, 999)
    assert given.dead.tolist() == [tokens[0]]
    assert given.tokens.tolist() == [tokens[1]]
    assert log.now <= given.not_before_ms[0] <= log.now + 1000


def test_the_callers_delay_overrides_the_backoff_not_the_retries(log) -> None:
    log.put(1, 1, max_retries=[0, 1])
    tokens = log.lease(2)
    given = plan(log, *tokens, delay_ms=77)
    assert given.not_before_ms.tolist() == [log.now + 77]
    assert given.dead.tolist() == [tokens[0]]


def test_the_topics_retries_hold_as_they_are_now(log) -> None:
    log.put(1)
    (token,) = log.lease(1)
    config = log.config.updated({"max_retries": 0})
    log.write(Kind.CONFIG, 1, {"config": [msgspec.msgpack.encode(config)]})
    assert plan(log, token).dead.tolist() == [token]


def test_an_expiry_counts_as_a_try(log) -> None:
    log.put(1)
    (token,) = log.lease(1, visibility_ms=10)
    log.now += 10
    assert log.heap.expired(log.now, 9).tolist() == [token]
    values = {"token": [token], "not_before_ms": [log.now]}
    applied = log.write(Kind.EXPIRE, 1, values)
    assert (applied.expired, applied.retried, log.heap.ready) == (1, 1, 1)
    assert log.heap.next_wakeup() is None


# --- dead letters ---


def test_a_dead_letter_tells_why(log) -> None:
    log.put(1, 2, 3)
    tokens = log.lease(3)
    log.die(tokens[1], detail=b"no such user")
    log.die(tokens[0], detail=b"x" * 5000)
    assert log.heap.dead == 2
    first, second = log.heap.dead_list(0, 10)
    assert first == DeadLetter(1, log.now, DeadReason.RETRIES, 0, b"x" * 1024)
    assert second.detail == b"no such user"
    assert log.heap.dead_list(1, 10) == [second]
    assert log.heap.dead_list(0, 1) == [first]


def test_without_a_dlq_a_dead_message_is_dropped_and_counted(log_of) -> None:
    log = log_of(dlq=False)
    log.put(1)
    (token,) = log.lease(1)
    assert log.die(token).dead == 1
    assert log.heap.dead == 0
    assert log.heap.oldest_alive() is None


def test_an_administrator_moves_a_leased_message(log) -> None:
    log.put(1, 2)
    (token,) = log.lease(1)
    values = {"message": [1, 2, 1, 77], "reason": [3] * 4, "detail": [b"a", b"b", b"c", b"d"]}
    applied = log.write(Kind.DEAD, 4, values)
    assert applied.dead == 2
    assert applied.released == {b"c": 1}
    assert [letter.detail for letter in log.heap.dead_list(0, 9)] == [b"a", b"b"]
    assert log.ack(token).acked == 0
    log.heap.validate()


def test_a_replayed_letter_starts_again(log) -> None:
    log.put(1, max_retries=[1])
    log.nack(*log.lease(1))
    log.die(*log.lease(1), detail=b"why")
    applied = log.write(Kind.REPLAY, 2, {"message": [1, 99]})
    assert (applied.replayed, log.heap.ready) == (1, 1)
    assert log.select() == [1]
    assert log.heap.attempts(array(1)).tolist() == [0]
    assert log.heap.details == {}


def test_old_letters_are_proposed_for_deletion(log) -> None:
    log.put(1, 2)
    log.die(*log.lease(1), detail=b"why")
    log.now += 100
    log.die(*log.lease(1))
    assert log.heap.forget_dead_before(log.now).tolist() == [1]
    log.write(Kind.ACK, 1, {"message": [1]})
    assert [letter.sequence for letter in log.heap.dead_list(0, 9)] == [2]
    assert log.heap.details == {}
    log.heap.validate()


# --- administration ---


def test_a_purge_takes_what_waits_and_leaves_what_is_out(log) -> None:
    log.put(1, 2, 3, delay_ms=[0, 500, 0])
    log.lease(1)
    late = log.put(4)
    log.write(Kind.ACK, 1, {"through": [3]})
    assert log.select() == late
    assert log.heap.leased == 1


def test_deleting_a_leased_message_ends_its_lease(log) -> None:
    log.put(1)
    (token,) = log.lease(1)
    applied = log.write(Kind.ACK, 1, {"message": [1]})
    assert applied.released == {b"c": 1}
    assert log.heap.resolve(array(token))[1].tolist() == [False]
    log.heap.validate()


def test_ageing_can_be_changed_while_messages_wait(log_of) -> None:
    log = log_of(mode="max")
    log.put(0)
    log.now += 10_000
    log.put(5)
    assert log.select() == [2, 1]
    config = log.config.updated({"ageing_per_s": 1})
    log.write(Kind.CONFIG, 1, {"config": [msgspec.msgpack.encode(config)]})
    assert log.select() == [1, 2]
    assert log.heap.config.ageing_per_s == 1


def test_a_damaged_configuration_is_refused(log) -> None:
    with pytest.raises(Corruption):
        log.write(Kind.CONFIG, 1, {"config": [b"\xc1"]})
    config = msgspec.structs.replace(log.config, mode="max")
    with pytest.raises(Corruption):
        log.write(Kind.CONFIG, 1, {"config": [msgspec.msgpack.encode(config)]})


def test_states_are_told_for_any_sequence(log) -> None:
    log.put(1, 2)
    log.lease(1)
    states = log.heap.states(array(1, 2, 3, 1 << 40))
    assert states.tolist() == [
        MessageState.LEASED,
        MessageState.READY,
        MessageState.NONE,
        MessageState.NONE,
    ]


def test_a_lease_that_ran_out_counts_as_expired_in_death_too(log) -> None:
    log.put(1, 2, 3)
    nacked, *late = log.lease(3, visibility_ms=1000)
    log.die(nacked)
    log.write(Kind.EXTEND, 1, {"token": [late[1]], "extend_ms": [9000]})
    log.now += 1000
    log.die(late[0])
    log.die(late[1])  # it was extended
    assert (log.heap.totals.dead, log.heap.totals.expired) == (3, 1)
