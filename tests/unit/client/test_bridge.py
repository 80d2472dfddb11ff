"""Threads that wait for what an event loop does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.client.bridge import ThreadBridge


@pytest.fixture
def bridge() -> Iterator[ThreadBridge]:
    made = ThreadBridge("bridge-under-test")
    yield made
    made.close()


def test_work_runs_on_the_thread_of_the_loop(bridge: ThreadBridge) -> None:
    assert bridge.do(lambda: threading.current_thread().name) == "bridge-under-test"


def test_an_error_comes_back_to_the_caller(bridge: ThreadBridge) -> None:
    async def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        bridge.run(fail())


def test_work_that_is_begun_is_not_waited_for(bridge: ThreadBridge) -> None:
    go = bridge.do(asyncio.Event)
    waiting = bridge.begin(go.wait())
    assert not waiting.done()
    bridge.do(go.set)
    assert waiting.result(timeout=30)


def test_leaving_an_iterator_early_closes_its_source(bridge: ThreadBridge) -> None:
    closed = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            closed.append(True)

    taken = bridge.iterate(numbers())
    assert [next(taken), next(taken)] == [0, 1]
    taken.close()  # type: ignore[attr-defined]
    assert closed == [True]
    assert list(bridge.iterate(numbers())) == list(range(10))


def test_closing_ends_the_thread() -> None:
    made = ThreadBridge("bridge-that-ends")
    made.close()
    assert "bridge-that-ends" not in [thread.name for thread in threading.enumerate()]
