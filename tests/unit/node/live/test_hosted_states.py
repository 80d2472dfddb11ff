"""What sinks cost that are fed states: a change of some bytes may need a vector of many."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.node.live.subscribing import TOPIC, corpus, delta_topic, payloads_of, put, until
from tests.unit.node.live.test_hosted_sink import Hosting, settled

from penstock.demo.corpus import SPARSE_ONLY
from penstock.model.delta_batch import deltas_of
from penstock.node.hosted.sink import STATES_BYTES, Parcel
from penstock.node.live.subscription import Subscription
from penstock.propagation.fold.propagator import Propagator

WIDE = 4096
VECTORS = 500
WINDOW_BYTES = 2 << 20


@pytest.fixture(params=["RecordingStates", "RecordingBoth"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Hosting]:
    """Its sink hangs."""
    node = Hosting(tmp_path / "data", request.param, window_bytes=WINDOW_BYTES)
    await node.start()
    await delta_topic(node, dimensions=WIDE)
    await until(lambda: node.hosted.readings())
    node.sink.free.clear()
    yield node
    node.sink.free.set()
    await node.stop()


def subscription_of(node: Hosting) -> Subscription:
    [(_, subscription)] = node.hosted.readings()
    return subscription


async def put_wide(node: Hosting) -> None:
    some = corpus(VECTORS, vectors=VECTORS, dimensions=WIDE, ops=SPARSE_ONLY)
    await put(node, payloads_of(some), size=VECTORS)


def parcels_of(node: Hosting) -> list[tuple[int, Parcel]]:
    """All that are handed over from now on, with the step of the loop that does."""
    thread, loop, hosted = node.hosted.thread, asyncio.get_running_loop(), node.hosted
    found = list[tuple[int, Parcel]]()
    put_on, step = thread.put, 0

    def count() -> None:
        nonlocal step
        step += 1
        if not hosted.stopped:
            loop.call_soon(count)

    def note(parcel: Parcel) -> None:
        found.append((step, parcel))
        put_on(parcel)

    thread.put = note  # type: ignore[method-assign]
    count()
    return found


def bytes_of(parcel: Parcel) -> int:
    return 0 if parcel.states is None else parcel.states.values.nbytes


async def test_the_states_that_wait_are_within_the_window(node: Hosting) -> None:
    found = parcels_of(node)
    await put_wide(node)
    await until(lambda: subscription_of(node)._credit.bytes <= 0)
    size = sum(bytes_of(parcel) for _, parcel in found)
    assert WINDOW_BYTES // 2 < size <= WINDOW_BYTES + STATES_BYTES
    assert subscription_of(node)._credit.bytes_out == sum(parcel.bytes for _, parcel in found)


async def test_all_credit_comes_back_and_no_state_is_left_out(node: Hosting) -> None:
    await put_wide(node)
    await until(lambda: subscription_of(node)._credit.bytes <= 0)
    node.sink.free.set()
    await settled(node)
    assert subscription_of(node)._credit.bytes_out == 0
    fold, log = Propagator(WIDE), node.engine.topics[TOPIC].here(0).log
    fold.feed(deltas_of(list(log.reader.scan(1))), through=log.sequence_last)
    wanted = sorted(fold.states().revision.tolist())
    assert sorted(revision for revision, _, _ in node.sink.vectors.values()) == wanted


async def test_a_step_of_the_loop_copies_few_states(node: Hosting) -> None:
    found = parcels_of(node)
    await put_wide(node)
    await until(lambda: subscription_of(node)._credit.bytes <= 0)
    node.sink.free.set()
    await settled(node)
    assert len(found) > 2 * WINDOW_BYTES // STATES_BYTES
    assert max(bytes_of(parcel) for _, parcel in found) <= STATES_BYTES
    steps = Counter(step for step, _ in found)
    assert max(steps.values()) <= 2  # one when credit returns, and one in the step that was due
