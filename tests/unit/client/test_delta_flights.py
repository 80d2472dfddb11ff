"""Changes of a vector that are under way at the same time, and one of them fails."""

from __future__ import annotations

import asyncio

import pytest

from penstock.client.delta_flights import Flights
from penstock.client.delta_heads import Heads
from penstock.errors import Backpressure, PenstockError

Outcome = asyncio.Future[int]


class Place:
    """Flights of which the test decides how each one ends."""

    def __init__(self) -> None:
        self.heads = Heads(b"w")
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
