"""A log is read at once where it is at hand, else by a thread; every failure is told."""

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.errors import Corruption, NotFound
from penstock.node.storage.log_io import SliceReader


class Shelf:
    """A log that has its first batches in memory; the others need the disk."""

    def __init__(self, *, hot: int) -> None:
        self.reader, self.hot = self, hot
        self.asked: list[dict[str, Any]] = []
        self.fault: Exception | None = None
        self.cold_fault: Exception | None = None  # that only a thread meets

    def read_slice(self, first: int, *, nowait: bool, **how: Any) -> list[Any] | None:
        self.asked.append(how | {"nowait": nowait})
        fault = self.fault if nowait else self.fault or self.cold_fault
        if fault is not None:
            raise fault
        return None if nowait and first > self.hot else [SimpleNamespace(first=first)]

    def slice_size(self, first: int, *, through: int, bytes_max: int) -> int | None:
        if self.fault is not None:
            raise self.fault
        return bytes_max if first <= self.hot else None


def reader_of(shelf: Shelf) -> tuple[SliceReader, asyncio.Queue[Any]]:
    told: asyncio.Queue[Any] = asyncio.Queue()
    log: Any = shelf
    return SliceReader(log, told.put_nowait, staged=False, cold_bytes_max=400), told


async def test_what_is_at_hand_is_read_at_once() -> None:
    shelf = Shelf(hot=5)
    reader, told = reader_of(shelf)
    found = reader.read(5, through=9, bytes_max=100, then=told.put_nowait)
    assert found is not None and found[0].first == 5
    assert told.empty() and not reader.busy
    assert shelf.asked == [{"through": 9, "staged": False, "bytes_max": 100, "nowait": True}]


async def test_a_thread_reads_the_rest_and_more_at_once() -> None:
    shelf = Shelf(hot=5)
    reader, told = reader_of(shelf)
    assert reader.read(6, through=9, bytes_max=100, then=told.put_nowait) is None
    assert reader.busy
    (batch,) = await told.get()
    assert batch.first == 6 and not reader.busy
    assert [ask["bytes_max"] for ask in shelf.asked] == [100, 400]


async def test_failures_are_told_wherever_they_are_met() -> None:
    shelf = Shelf(hot=5)
    reader, told = reader_of(shelf)
    shelf.fault = NotFound("dropped")
    assert reader.read(1, through=9, bytes_max=100, then=told.put_nowait) is None
    assert await told.get() is shelf.fault and not reader.busy
    assert reader.size(1, through=9, bytes_max=100) == 0
    shelf.fault, shelf.cold_fault = None, Corruption("damaged")
    assert reader.read(6, through=9, bytes_max=100, then=told.put_nowait) is None
    assert await told.get() is shelf.cold_fault and not reader.busy


async def test_nobody_is_told_what_is_no_longer_wanted() -> None:
    reader, told = reader_of(Shelf(hot=0))
    assert reader.read(1, through=9, bytes_max=100, then=told.put_nowait) is None
    reader.closed = True
    while reader.busy:
        await asyncio.sleep(0.001)
    assert told.empty()
