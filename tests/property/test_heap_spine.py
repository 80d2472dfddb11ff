"""The spine over real heaps: a pick is the best of the topic, its rank error within the bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.heap.index import Keys, Sequences
from penstock.heap.machine import Heap
from penstock.heap.spine import Spine, bounded
from penstock.model.batch import SCHEMAS, Batch, Codec, Kind
from penstock.model.topic import TopicConfig

NOW = 1000
partitions = st.lists(st.lists(st.integers(-5, 30), max_size=40), min_size=1, max_size=6)


def write(heap: Heap, kind: Kind, count: int, values: dict[str, object], runs: int = 0) -> None:
    body = SCHEMAS[kind].encode(count, values, runs=runs)  # type: ignore[arg-type]
    batch = Batch(
        kind, Codec.NONE, False, 0, 0, 1, 1, heap.sequence_applied + 1,
        heap.sequence_applied + count, count, NOW, len(body), 0, b"", body,
    )  # fmt: skip
    heap.apply(batch, batch.columns())


def heaps_of(priorities: list[list[int]]) -> list[Heap]:
    heaps = []
    for p, mine in enumerate(priorities):
        heap = Heap(TopicConfig(name="t"), partition=p)
        if mine:
            write(heap, Kind.ENQ, len(mine), {"priority": mine})
        heaps.append(heap)
    return heaps


def keys_of(heap: Heap, messages: Sequences) -> Keys:
    return heap.table.key[heap.table.places(messages)]


@settings(max_examples=80)
@given(partitions, st.integers(1, 60), st.integers(1, 12))
def test_pops_come_in_order_over_all_partitions(
    priorities: list[list[int]], k: int, n: int
) -> None:
    heaps = heaps_of(priorities)
    spine = Spine(k, len(heaps))
    left = sorted(p for mine in priorities for p in mine)
    while left:
        picked = spine.pick(heaps, n, NOW)
        assert spine.rank_error(heaps, picked, NOW) == 0
        keys = []
        for p, messages in picked:
            assert messages.tolist() == heaps[p].select(len(messages), NOW).tolist()
            keys += keys_of(heaps[p], messages).tolist()
            values = {"message": messages, "run_count": [len(messages)], "run_visibility_ms": [9]}
            write(heaps[p], Kind.LEASE, len(messages), values, runs=1)
        assert sorted(keys) == left[:n]
        left = left[n:]


@settings(max_examples=80)
@given(partitions, st.integers(1, 60), st.integers(1, 20), st.lists(st.integers(-9, 30)))
def test_the_rank_error_of_a_stale_pick_is_what_came_between(
    priorities: list[list[int]], k: int, n: int, late: list[int]
) -> None:
    """Better messages that arrive after the look are exactly what the error counts."""
    heaps = heaps_of(priorities)
    spine = Spine(k, len(heaps))
    picked = spine.pick(heaps, n, NOW)
    if not picked:
        return
    worst = max(int(keys_of(heaps[p], m).max()) for p, m in picked)
    if late:
        write(heaps[0], Kind.ENQ, len(late), {"priority": late})
    assert spine.rank_error(heaps, picked, NOW) == int(np.count_nonzero(np.array(late) < worst))


class Told:
    """What another node tells of a heap: its best keys, and whether it has more."""

    def __init__(self, heap: Heap, width: int) -> None:
        self.keys = heap.candidates(width, NOW)[0]
        self.cut = heap.ready > len(self.keys)

    def candidates(self, n: int, now: int) -> tuple[np.ndarray, np.ndarray]:
        return self.keys[:n], np.arange(len(self.keys[:n]), dtype=np.uint64)

    def rank(self, key: int, sequence: int, now: int) -> int:
        return int(np.count_nonzero(self.keys < key))


@settings(max_examples=100)
@given(
    partitions,
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(1, 15),
    st.integers(1, 50),
    st.lists(st.lists(st.integers(-9, 30), max_size=10), min_size=6, max_size=6),
)
def test_lists_of_other_nodes_never_let_a_better_message_be_passed(
    priorities: list[list[int]],
    k: int,
    n: int,
    width: int,
    stretch: int,
    late: list[list[int]],
) -> None:
    """Leased by count and bound after others arrived: nothing better that was there is left."""
    heaps = heaps_of(priorities)
    told = [Told(heap, width) for heap in heaps]
    begun = [heap.sequence_applied for heap in heaps]
    picked = Spine(k, len(heaps), stretch=stretch).pick(told, n, NOW)
    taken = sum(len(messages) for _, messages in picked)
    assert taken == min(n, sum(map(len, priorities))) or any(t.cut for t in told)
    for heap, mine in zip(heaps, late, strict=False):
        if mine:
            write(heap, Kind.ENQ, len(mine), {"priority": mine})
    worst = None
    for p, messages in picked:
        bound = int(told[p].keys[len(messages) - 1])
        spare = k // len(heaps)
        leased = bounded(heaps[p], len(messages), NOW, bound=bound, last=begun[p], spare=spare)
        assert len(leased) == len(messages), "a better one takes the place of what was picked"
        values = {"message": leased, "run_count": [len(leased)], "run_visibility_ms": [9]}
        write(heaps[p], Kind.LEASE, len(leased), values, runs=1)
        worst = bound if worst is None else max(worst, bound)
    better = 0
    for heap, last in zip(heaps, begun, strict=True):
        keys, sequences = heap.candidates(1000, NOW)
        was_there = sequences <= last
        better += int(np.count_nonzero(keys[was_there] < worst)) if worst is not None else 0
    arrived = sum(map(len, late[: len(heaps)]))
    displaced_max = k // len(heaps) * len(heaps)
    assert better <= min(displaced_max, arrived), "only what an arrival displaced may be left"
