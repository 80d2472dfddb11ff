import msgspec
import numpy as np
import pytest

from penstock.errors import Corruption
from penstock.heap import DeadLetter, MessageState
from penstock.model.batch import DeadReason, Kind


def array(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def plan(log, *tokens: int, delay_ms: int | None = None, counted: bool = True):
    return log.heap.plan_return(array(*tokens), log.now, delay_ms=delay_ms, counted=counted)


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
    assert (applied.retried, applied.woke, applied.released) == (1, 0, {b"c": 1})
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
    assert (applied.retried, applied.returned, applied.woke) == (0, 1, 1)
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
    assert (applied.expired, applied.retried, applied.woke) == (1, 1, 1)
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
    assert (applied.replayed, applied.woke) == (1, 1)
    assert log.select() == [1]
    assert log.heap.attempts(array(1)).tolist() == [0]
    assert log.heap.details == {}


def test_old_letters_are_proposed_for_deletion(log) -> None:
    log.put(1, 2)
    log.die(*log.lease(1), detail=b"why")
    log.now += 100
    log.die(*log.lease(1))
    assert log.heap.forget_dead_before(log.now).tolist() == [1]
    applied = log.write(Kind.ACK, 1, {"message": [1]})
    assert applied.purged == 1
    assert [letter.sequence for letter in log.heap.dead_list(0, 9)] == [2]
    assert log.heap.details == {}
    log.heap.validate()


# --- administration ---


def test_a_purge_takes_what_waits_and_leaves_what_is_out(log) -> None:
    log.put(1, 2, 3, delay_ms=[0, 500, 0])
    log.lease(1)
    late = log.put(4)
    applied = log.write(Kind.ACK, 1, {"through": [3]})
    assert applied.purged == 2
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
