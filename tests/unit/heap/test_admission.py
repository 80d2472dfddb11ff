import numpy as np
import pytest

from penstock.errors import Corruption, InvalidArgument, StaleProducer
from penstock.heap import Heap
from penstock.heap.table import MessageState
from penstock.model.batch import Kind


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
    assert (applied.enqueued, applied.woke) == (3, 2)
    assert log.heap.sequence_enqueued == 3


def test_a_retry_returns_the_first_messages(log) -> None:
    first = log.put_runs((b"p", 1, 0, 5))
    found = log.heap.admit(log.body((b"p", 1, 0, 5)))
    assert found == [(i, first + i, log.now) for i in range(5)]


def test_a_retry_that_overlaps_returns_only_the_duplicates(log) -> None:
    first = log.put_runs((b"p", 1, 0, 5))
    assert log.heap.admit(log.body((b"p", 1, 3, 5))) == [
        (0, first + 3, log.now),
        (1, first + 4, log.now),
    ]


def test_several_runs_are_admitted_each_for_itself(log) -> None:
    first = log.put_runs((b"p", 1, 0, 2), (b"", 0, 0, 3), (b"q", 7, 50, 2))
    found = log.heap.admit(log.body((b"q", 7, 49, 2), (b"", 0, 0, 4), (b"p", 1, 1, 2)))
    assert found == [(1, first + 5, log.now), (6, first + 1, log.now)]


def test_without_a_producer_nothing_is_a_duplicate(log) -> None:
    log.put_runs((b"", 0, 0, 3))
    assert log.heap.admit(log.body((b"", 0, 0, 3))) == []
    log.put(1)
    assert not log.heap.dedup.producers


def test_an_old_epoch_is_refused_a_new_one_starts_afresh(log) -> None:
    log.put_runs((b"p", 2, 0, 3))
    with pytest.raises(StaleProducer):
        log.heap.admit(log.body((b"p", 1, 9, 1)))
    assert log.heap.admit(log.body((b"p", 3, 0, 3))) == []


def test_a_body_that_repeats_itself_is_refused(log) -> None:
    with pytest.raises(InvalidArgument) as caught:
        log.heap.admit(log.body((b"p", 1, 0, 3), (b"q", 1, 0, 1), (b"p", 1, 2, 1)))
    assert caught.value.field == "run_sequence"


@pytest.mark.parametrize("runs", [1, 2])
def test_runs_that_cover_too_much_are_refused(log, runs: int) -> None:
    values = log.runs(*[(b"p", 1, 10 * i, 1) for i in range(runs)])
    values["run_count"] = [9] * runs
    batch = log.batch(Kind.ENQ, runs, values, runs=runs)
    with pytest.raises(InvalidArgument):
        log.heap.admit(batch.columns())


def test_a_compacted_batch_brings_the_survivors(log) -> None:
    values = {"sequence": [2, 9000], "priority": [4, 3], "max_retries": [-1, 7]}
    log.write(Kind.ENQ, 2, values, covers=10_000)
    assert log.heap.sequence_applied == 10_000
    assert log.select() == [9000, 2]
    described = log.heap.describe(np.array([2, 9000], np.uint64))
    assert described.max_retries.tolist() == [3, 7]
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
    assert (applied.enqueued, applied.woke) == (2, 2)
    assert log.select() == [first + 1, first]
    assert log.heap.decision(b"tx") is True
    log.heap.validate()


def test_an_aborted_batch_leaves_nothing_and_may_be_tried_again(log) -> None:
    first = prepare(log, 5, 1)
    assert len(log.heap.admit(log.body((b"p", 1, 0, 2)))) == 2
    decide(log, False)
    assert log.heap.alive(1, 99).tolist() == []
    assert log.heap.admit(log.body((b"p", 1, 0, 2))) == []
    assert log.heap.states(np.array([first], np.uint64))[0] in (
        MessageState.NONE,
        MessageState.DONE,
    )


def test_the_first_decision_wins(log) -> None:
    prepare(log, 1)
    decide(log, False)
    assert decide(log, True).enqueued == 0
    assert log.heap.decision(b"tx") is False
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
    empty = log.heap.table.bytes
    for i in range(50):
        log.put(*[0] * 1000, payload=[b"x"] * 1000, run_count=[1000], run_epoch=[1],
                run_sequence=[1 + 1000 * i], run_producer=[b"p"], runs=1)  # fmt: skip
    heap = log.heap
    heap.validate()
    assert heap.sequence_enqueued == heap.sequence_applied == 50_000
    assert (heap.ready, heap.delayed, heap.table.bytes) == (0, 0, empty)
    assert log.select() == [] and heap.oldest_alive() is None
    assert heap.dedup.places == 1


def test_a_delta_sent_again_is_recognised_after_a_snapshot(log_of) -> None:
    log = log_of(kind="delta", dimensions=4)
    columns = {"run_count": [2], "run_epoch": [3], "run_sequence": [7], "run_producer": [b"p"]}
    log.put(0, 0, payload=[b"a", b"b"], **columns, runs=1)
    restored = Heap.restore(log.config, b"".join(log.heap.snapshot()), partition=0)
    again = log.batch(Kind.ENQ, 2, {"payload": [b"a", b"b"], **columns}, runs=1).columns()
    assert restored.digest() == log.heap.digest()
    assert restored.admit(again) == log.heap.admit(again) == [(0, 1, log.now), (1, 2, log.now)]


def test_an_atomic_batch_in_a_delta_topic_is_damage(log_of) -> None:
    log = log_of(kind="delta", dimensions=4)
    with pytest.raises(Corruption, match="delta topic"):
        log.write(Kind.PREPARE, 1, {"priority": [0], "transaction": [b"t"], "home": [0]})


def test_an_epoch_that_began_refuses_lower_ones_before_it_has_an_entry(log) -> None:
    log.put_runs((b"p", 2, 0, 3))
    names, epochs = [b"p", b"q"], [5, 1]
    log.write(Kind.PRODUCER, 2, {"producer": names, "producer_epoch": epochs})
    with pytest.raises(StaleProducer):
        log.heap.admit(log.body((b"p", 4, 9, 1)))
    assert log.heap.admit(log.body((b"p", 5, 0, 3))) == []
    assert log.heap.dedup.places == 0
    log.put_runs((b"p", 5, 0, 2))
    log.write(Kind.PRODUCER, 1, {"producer": [b"p"], "producer_epoch": [5]})
    assert len(log.heap.admit(log.body((b"p", 5, 0, 3)))) == 2  # what is known of it stays
    log.write(Kind.PRODUCER, 1, {"producer": [b"p"], "producer_epoch": [4]})
    assert log.heap.dedup.epoch_of(b"p") == 5 and log.heap.dedup.epoch_of(b"q") == 1
    log.heap.dedup.validate()


def test_a_beginning_without_a_producer_is_corruption(log) -> None:
    with pytest.raises(Corruption, match="names no producer"):
        log.write(Kind.PRODUCER, 1, {"producer_epoch": [1]})
