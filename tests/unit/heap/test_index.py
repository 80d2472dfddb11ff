import time
from collections.abc import Callable

import numpy as np
import pytest

from penstock.heap.index import SEAL, Pairs, RunIndex


class Alive:
    """An index over messages that are alive while their bit is set."""

    def __init__(self, size: int) -> None:
        self.bits = np.zeros(size, np.bool_)
        self.index = RunIndex(
            lambda pairs: self.bits[pairs.sequences],
            lambda _, sequence: bool(self.bits[sequence]),
            lambda: int(np.count_nonzero(self.bits)),
        )

    def push(self, keys: np.ndarray, sequences: np.ndarray) -> None:
        self.bits[sequences] = True
        self.index.push(keys.astype(np.int64), sequences.astype(np.uint64))

    def pop(self, n: int) -> list[int]:
        found = self.index.best(n).sequences
        self.bits[found] = False
        return found.tolist()


def seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


@pytest.mark.parametrize("levels", [1, 32_000, 1 << 62])
def test_a_million_pushes_then_a_look(levels: int) -> None:
    n = 1_000_000
    alive = Alive(n)
    keys = np.random.default_rng(5).integers(0, levels, n)
    for at in range(0, n, 1000):
        alive.push(keys[at : at + 1000], np.arange(at, at + 1000))
    assert seconds(lambda: alive.index.best(1)) < 2
    order = np.lexsort((np.arange(n), keys))
    for at in range(0, 30_000, 500):
        assert alive.pop(500) == order[at : at + 500].tolist()


def test_small_pushes_between_looks_do_not_sort_the_backlog() -> None:
    def turns(backlog: int) -> float:
        alive = Alive(backlog + 200_000)
        random = np.random.default_rng(1)
        alive.push(random.integers(0, 1 << 40, backlog), np.arange(backlog))
        alive.pop(1)
        live = backlog  # counting the bits would cost more than what is measured
        alive.index._live = lambda: live
        took = 0.0
        for at in range(backlog, backlog + 100_000, 100):
            alive.push(random.integers(0, 1 << 40, 100), np.arange(at, at + 100))
            took += seconds(lambda: alive.pop(100))
        return took

    turns(1000)
    assert turns(600_000) < 20 * turns(20_000)


def test_stale_pairs_are_swept_out_when_they_outnumber_the_valid() -> None:
    n = 4 * SEAL
    alive = Alive(n)
    for at in range(0, n, 8192):  # nobody looks: a follower
        alive.push(np.zeros(8192), np.arange(at, at + 8192))
        alive.bits[:at] = False
    assert alive.index.size <= 2 * SEAL + 8192
    assert alive.pop(3) == [n - 8192, n - 8191, n - 8190]


def test_an_index_without_valid_pairs_is_emptied() -> None:
    alive = Alive(100_000)
    alive.push(np.zeros(100_000), np.arange(100_000))
    alive.bits[:] = False
    assert alive.pop(10) == []
    assert alive.index.size == 0


def test_a_message_that_came_back_is_found_once() -> None:
    alive = Alive(10)
    alive.push(np.zeros(3), np.arange(3))
    alive.push(np.zeros(3), np.arange(3))
    assert alive.index.best(10).sequences.tolist() == [0, 1, 2]
    alive.push(np.zeros(1), np.arange(1))
    assert alive.index.best(10).sequences.tolist() == [0, 1, 2]
    alive.index.validate()


def test_a_look_changes_nothing() -> None:
    alive = Alive(5000)
    alive.push(np.arange(5000) % 7, np.arange(5000))
    first = alive.index.best(3000)
    again = alive.index.best(3000)
    assert (first.keys == again.keys).all()
    assert (first.sequences == again.sequences).all()


def test_what_a_look_returned_stays() -> None:
    alive = Alive(10_000)
    alive.push(np.arange(5000), np.arange(5000))
    found = alive.index.best(10)
    alive.bits[:10] = False
    alive.push(np.arange(-5000, 0), np.arange(5000, 10_000))
    alive.index.best(4000)
    assert found.sequences.tolist() == list(range(10))


def test_the_hint_of_a_lease_need_not_be_right() -> None:
    alive = Alive(10)
    alive.push(np.arange(5), np.arange(5))
    alive.index.best(2)
    alive.index.drop_head(np.array([1, 0], np.uint64))
    alive.index.drop_head(np.arange(9, dtype=np.uint64))
    assert alive.pop(9) == [0, 1, 2, 3, 4]


def test_count_below_is_exact_before_and_after_a_look() -> None:
    alive = Alive(20_000)
    alive.push(np.arange(20_000) - 10_000, np.arange(20_000))
    assert alive.index.count_below(-9_990, 10) == 10
    assert alive.index.count_below(9_000, 0) == 19_000
    alive.bits[5] = False
    assert alive.index.count_below(9_000, 0) == 18_999
    assert alive.index.count_below(-10_000, 0) == 0


def test_nothing_is_found_in_nothing() -> None:
    alive = Alive(1)
    assert alive.index.best(5) == Pairs(*alive.index.best(0))
    assert alive.index.count_below(0, 0) == 0
