"""The ready index against a sorted list, with runs so small that every path is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.heap.index import RunIndex

keys = st.one_of(st.integers(-2, 2), st.integers(-(1 << 63), (1 << 63) - 1))
push = st.tuples(st.just("push"), st.lists(keys, min_size=1, max_size=9))
pop = st.tuples(st.just("pop"), st.integers(1, 9))
peek = st.tuples(st.just("peek"), st.integers(1, 40))
back = st.tuples(st.just("back"), st.integers(0, 99))  # a popped message returns
gone = st.tuples(st.just("gone"), st.integers(0, 99))  # one disappears without a look
steps = st.lists(st.one_of(push, push, pop, peek, back, gone), max_size=60)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"FRONT": 3, "FRONT_MAX": 5, "SEAL": 7, "CHUNK": 4, "SCALAR_STEPS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(f"penstock.heap.index.{name}", value)
    monkeypatch.setattr("penstock.heap.index.FAN", 3)
    monkeypatch.setattr("penstock.heap.index.HEAD_MIN", 1)


class Tracked:
    def __init__(self) -> None:
        self.keys: list[int] = []  # by sequence
        self.alive: set[int] = set()
        self.out: list[int] = []
        self.index = RunIndex(
            lambda pairs: np.array([s in self.alive for s in pairs.sequences.tolist()], np.bool_),
            lambda _, sequence: sequence in self.alive,
            lambda: len(self.alive),
        )

    def push(self, keys: list[int]) -> None:
        sequences = range(len(self.keys), len(self.keys) + len(keys))
        self.keys += keys
        self.alive.update(sequences)
        if len(keys) == 1:
            self.index.push_one(keys[0], sequences[0])
        else:
            columns = np.array(keys, np.int64), np.array(sequences, np.uint64)
            self.index.push(*columns)

    def order(self) -> list[int]:
        return sorted(self.alive, key=lambda s: (self.keys[s], s))

    def pop(self, n: int) -> None:
        found = self.index.best(n).sequences
        assert found.tolist() == self.order()[:n]
        self.alive.difference_update(found.tolist())
        self.out += found.tolist()
        if n % 2 and len(found):
            self.index.drop_head(found)

    def peek(self, n: int) -> None:
        found = self.index.best(n)
        assert found.sequences.tolist() == self.order()[:n]
        assert found.keys.tolist() == [self.keys[s] for s in self.order()[:n]]
        for rank, sequence in enumerate(self.order()):
            assert self.index.count_below(self.keys[sequence], sequence) == rank

    def back(self, which: int) -> None:
        if self.out:
            sequence = self.out.pop(which % len(self.out))
            self.alive.add(sequence)
            self.index.push_one(self.keys[sequence], sequence)

    def gone(self, which: int) -> None:
        if self.alive:
            sequence = sorted(self.alive)[which % len(self.alive)]
            self.alive.remove(sequence)
            self.out.append(sequence)


@settings(max_examples=300)
@given(steps)
def test_the_index_is_a_sorted_list(given_steps: list[tuple[str, object]]) -> None:
    tracked = Tracked()
    for name, argument in given_steps:
        getattr(tracked, name)(argument)
        tracked.index.validate()
    tracked.peek(1000)
