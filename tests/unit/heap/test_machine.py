import time

import numpy as np
import pytest

from penstock.heap.machine import HANDLERS, backoff_ms
from penstock.model.batch import Kind
from penstock.model.topic import TopicConfig

CONFIG = TopicConfig(name="t")


def delays(attempts: int, *, partition: int = 0, n: int = 20_000) -> np.ndarray:
    messages = np.arange(1, n + 1, dtype=np.uint64)
    tries = np.full(n, attempts, np.int64)
    return backoff_ms(CONFIG, partition=partition, messages=messages, attempts=tries)


def test_the_ceiling_doubles_up_to_the_cap() -> None:
    for attempts, ceiling in ((1, 1000), (2, 2000), (5, 16_000), (10, 300_000), (1000, 300_000)):
        found = delays(attempts)
        assert found.min() >= 0
        assert 0.99 * ceiling <= found.max() <= ceiling


def test_the_jitter_is_spread_evenly() -> None:
    counts = np.bincount(delays(2) // 200, minlength=10)[:10]
    assert counts.min() > 0.85 * 2000
    assert counts.max() < 1.15 * 2000


def test_it_is_the_same_for_whoever_computes_it() -> None:
    assert (delays(3) == delays(3)).all()
    assert (delays(3) != delays(3, partition=1)).mean() > 0.9
    assert (delays(10) != delays(11)).mean() > 0.9


def test_no_backoff_means_at_once() -> None:
    config = TopicConfig(name="t", backoff_ms_base=0)
    ones = np.ones(3, np.int64)
    found = backoff_ms(config, partition=0, messages=ones.view(np.uint64), attempts=ones)
    assert found.tolist() == [0, 0, 0]


def test_every_kind_of_record_has_a_handler() -> None:
    assert HANDLERS.keys() == set(Kind)


def test_candidates_have_keys_and_ranks(log_of) -> None:
    log = log_of(mode="max")
    log.put(5, 9, 7)
    keys, sequences = log.heap.candidates(2, log.now)
    assert sequences.tolist() == [2, 3]
    assert keys.tolist() == [~9, ~7]
    assert [log.heap.rank(k, 0, log.now) for k in (~9, ~8, ~5)] == [0, 1, 2]


def test_alive_is_what_compaction_must_keep(log) -> None:
    log.put(*range(6))
    log.ack(*log.lease(2))
    log.die(*log.lease(1))
    assert log.heap.alive(1, 5).tolist() == [3, 4, 5]
    assert log.heap.alive(4, 4).tolist() == [4]
    assert log.heap.oldest_alive() == 3


def test_the_oldest_ready_message_has_a_time(log) -> None:
    assert log.heap.oldest_ready_ms(log.now) is None
    born = log.now
    log.put(9, delay_ms=[500])
    log.now += 100
    log.put(1)
    assert log.heap.oldest_ready_ms(log.now) == born + 100
    assert log.heap.oldest_ready_ms(log.now + 500) == born


def test_a_look_does_not_take(log) -> None:
    log.put(3, 1, 2)
    assert log.select(2) == log.select(2) == [2, 3]
    assert log.select(1) == [2]


def test_a_sequence_number_far_out_is_nobody(log) -> None:
    log.put(1)
    messages, held = log.heap.resolve(np.array([1 << 47, 1], np.uint64))
    assert messages.tolist() == [0, 0]
    assert held.tolist() == [False, False]


def replay_cost(log, batches: int) -> float:
    started = time.process_time()
    heap = type(log.heap)(log.config, partition=0)
    for batch in log.batches[:batches]:
        heap.apply(batch, batch.columns())
    heap.select(1, log.now)
    assert heap.digest() is not None
    return time.process_time() - started


@pytest.mark.parametrize("n", [1, 100])
def test_recovery_of_settled_messages_costs_no_more_the_longer_the_log(log, n: int) -> None:
    """Stale pairs of the index are dropped in bulk, pages are freed: linear, and little memory."""
    for _ in range(300):
        log.put(*range(n))
        log.ack(*log.lease(n))
    replay_cost(log, 60)
    # The least of three: a garbage collection in between costs more than the replay.
    short, long = (min(replay_cost(log, many) for _ in range(3)) for many in (180, 900))
    assert long < 20 * short
    assert log.heap.table.state.nbytes < 1 << 17
