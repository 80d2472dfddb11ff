import numpy as np

from penstock.heap.backoff import backoff_ms
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
