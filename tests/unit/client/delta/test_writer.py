import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.delta.writer import (
    Causes,
    Flights,
    HybridClock,
    Names,
    VectorHead,
    VectorHeads,
)
from penstock.errors import Backpressure, PenstockError

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
    heads, clock = VectorHeads(b"w"), HybridClock()
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
    heads = VectorHeads(b"w")
    ahead = (time.time_ns() // 1_000_000 + 60_000) << 16
    heads.adopt(ONE.digests[0], VectorHead(b"p" * 16, 4, ahead, b"other", 9))
    assert heads.get(ONE.digests[0]) == VectorHead(b"p" * 16, 4, ahead, b"other", 9)
    [(made, parent, counter, when)] = rows(heads.chain(ONE, HybridClock()))
    assert (parent, counter, when) == (b"p" * 16, 5, ahead + 1)
    assert heads.get(ONE.digests[0]) == VectorHead(made, 5, ahead + 1, b"w", 5)


def test_a_forgotten_head_is_unknown() -> None:
    heads = VectorHeads(b"w")
    heads.advance(ONE.digests[0], delta_id=b"d" * 16, counter=3, time=7)
    assert ONE.digests[0] in heads
    heads.forget(ONE.digests)
    assert ONE.digests[0] not in heads
    assert heads.get(ONE.digests[0]) == VectorHead()


def test_many_heads_are_kept_apart() -> None:
    heads, clock = VectorHeads(b"w"), HybridClock()
    names = Names.of("n", [f"v{i}" for i in range(1000)])
    causes = heads.chain(names, clock)
    for row in np.arange(0, 1000, 99):
        head = heads.get(names.digests[row])
        assert (head.delta_id, head.counter) == (causes.delta_ids[row].tobytes(), 1)


Outcome = asyncio.Future[int]


class Place:
    """Flights of which the test decides how each one ends."""

    def __init__(self) -> None:
        self.heads = VectorHeads(b"w")
        self.flights = Flights(self.heads)

    def begin(self, *vectors: bytes) -> tuple[asyncio.Task[int], Outcome]:
        written: Outcome = asyncio.get_running_loop().create_future()
        for vector in vectors:
            self.heads.advance(vector, delta_id=b"d" * 16, counter=1, time=1)
        return asyncio.create_task(self.flights.of(vectors, written)), written


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def place() -> Place:
    return Place()


async def test_one_counts_once_all_before_it_do(place: Place) -> None:
    first, written_first = place.begin(b"a", b"b")
    second, written_second = place.begin(b"b")
    other, written_other = place.begin(b"c")
    await turns()
    written_second.set_result(2)
    written_other.set_result(3)
    await turns()
    assert other.done()
    assert not second.done()
    written_first.set_result(1)
    assert await asyncio.gather(first, second) == [1, 2]
    await place.flights.landed([b"a", b"b", b"c"])


async def test_who_follows_one_that_fails_fails_with_it(place: Place) -> None:
    first, written_first = place.begin(b"a", b"b")
    second, written_second = place.begin(b"b", b"c")
    third, written_third = place.begin(b"c")
    other, written_other = place.begin(b"a")
    await turns()
    for written in (written_second, written_third):
        written.set_result(0)
    written_first.set_exception(Backpressure("full"))
    await turns()
    assert b"a" not in place.heads
    for failed in (first, second, third):
        with pytest.raises(Backpressure):
            await failed
    written_other.set_result(0)
    with pytest.raises(Backpressure):
        await other


async def test_one_that_fails_takes_nothing_from_those_before_it(place: Place) -> None:
    first, written_first = place.begin(b"a")
    second, written_second = place.begin(b"a")
    await turns()
    written_second.set_exception(Backpressure("full"))
    await turns()
    assert second.done()
    landed = asyncio.create_task(place.flights.landed([b"a"]))
    await turns()
    assert not landed.done(), "the log does not have the first yet"
    written_first.set_result(1)
    await landed
    assert await first == 1
    with pytest.raises(Backpressure):
        await second


async def test_one_that_is_given_up_ends_at_once_and_what_follows_fails(place: Place) -> None:
    first, written_first = place.begin(b"a")
    second, _ = place.begin(b"a")
    third, written_third = place.begin(b"a")
    await turns()
    second.cancel()
    await turns()
    assert second.cancelled()
    written_third.set_result(3)
    written_first.set_result(1)
    assert await first == 1
    with pytest.raises(PenstockError, match="given up"):
        await third
    await place.flights.landed([b"a"])
