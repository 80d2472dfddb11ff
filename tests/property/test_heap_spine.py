"""The spine over real heaps: a pick is the best of the topic, its rank error within the bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.heap import Heap, Spine
from penstock.model.batch import SCHEMAS, Batch, BatchFlag, Codec, Kind
from penstock.model.topic import TopicConfig

NOW = 1000
partitions = st.lists(st.lists(st.integers(-5, 30), max_size=40), min_size=1, max_size=6)


def write(heap: Heap, kind: Kind, count: int, values: dict[str, object], runs: int = 0) -> None:
    body = SCHEMAS[kind].encode(count, values, runs=runs)  # type: ignore[arg-type]
    batch = Batch(
        kind, Codec.NONE, BatchFlag.NONE, 0, 0, 1, 1, heap.sequence_applied + 1, count, count, NOW,
        len(body), 0, 0, body,
    )  # fmt: skip
    heap.apply(batch, batch.columns(), NOW)


def heaps_of(priorities: list[list[int]]) -> list[Heap]:
    heaps = []
    for p, mine in enumerate(priorities):
        heap = Heap(TopicConfig(name="t"), partition=p)
        if mine:
            write(heap, Kind.ENQ, len(mine), {"priority": mine})
        heaps.append(heap)
    return heaps


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
            keys += heaps[p].describe(messages).priorities.tolist()
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
    worst = max(int(heaps[p].describe(m).priorities.max()) for p, m in picked)
    if late:
        write(heaps[0], Kind.ENQ, len(late), {"priority": late})
    assert spine.rank_error(heaps, picked, NOW) == int(np.count_nonzero(np.array(late) < worst))
