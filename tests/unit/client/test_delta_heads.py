import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.delta_columns import Causes, Names
from penstock.client.delta_heads import Head, Heads, HybridClock

ONE = Names.of("n", ["a"])


def rows(causes: Causes) -> list[tuple[bytes, bytes, int, int]]:
    return list(
        zip(
            (row.tobytes() for row in causes.delta_ids),
            (row.tobytes() for row in causes.parents),
            causes.counters.tolist(),
            causes.times.tolist(),
            strict=True,
        )
    )


def test_hybrid_times_rise_and_stay_near_the_clock() -> None:
    clock = HybridClock()
    first = clock.tick(1000)
    assert clock.tick() >= first + 1000
    assert abs((first >> 16) - time.time() * 1000) < 60_000


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), max_size=5))
def test_chained_rows_follow_each_other_per_vector(calls: list[list[int]]) -> None:
    heads, clock = Heads(b"w"), HybridClock()
    known: dict[int, tuple[bytes, int, int]] = {}
    for vectors in calls:
        causes = heads.chain(Names.of("n", [f"v{v}" for v in vectors]), clock)
        for vector, (made, parent, counter, when) in zip(vectors, rows(causes), strict=True):
            before = known.get(vector, (bytes(16), 0, 0))
            assert (parent, counter) == (before[0], before[1] + 1)
            assert when > before[2]
            known[vector] = (made, counter, when)
    assert len(heads) == len(known)


def test_a_chain_goes_on_from_what_the_log_said() -> None:
    heads = Heads(b"w")
    ahead = (time.time_ns() // 1_000_000 + 60_000) << 16
    heads.adopt(ONE.digests[0], Head(b"p" * 16, 4, ahead, b"other", 9))
    assert heads.get(ONE.digests[0]) == Head(b"p" * 16, 4, ahead, b"other", 9)
    [(made, parent, counter, when)] = rows(heads.chain(ONE, HybridClock()))
    assert (parent, counter, when) == (b"p" * 16, 5, ahead + 1)
    assert heads.get(ONE.digests[0]) == Head(made, 5, ahead + 1, b"w", 5)


def test_a_forgotten_head_is_unknown() -> None:
    heads = Heads(b"w")
    heads.advance(ONE.digests[0], delta_id=b"d" * 16, counter=3, time=7)
    assert ONE.digests[0] in heads
    heads.forget(ONE.digests)
    assert ONE.digests[0] not in heads
    assert heads.get(ONE.digests[0]) == Head()


def test_many_heads_are_kept_apart() -> None:
    heads, clock = Heads(b"w"), HybridClock()
    names = Names.of("n", [f"v{i}" for i in range(1000)])
    causes = heads.chain(names, clock)
    for row in np.arange(0, 1000, 99):
        head = heads.get(names.digests[row])
        assert (head.delta_id, head.counter) == (causes.delta_ids[row].tobytes(), 1)
