"""A subscriber that cannot keep up: it costs its bounds, loses nothing, and holds nobody up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    Reader,
    Row,
    corpus,
    expected,
    payloads_of,
    put,
    small_outbox,
    subscribe,
    until,
)

from penstock.demo.corpus import SPARSE_ONLY, Corpus
from penstock.errors import InvalidArgument
from penstock.model.delta import decode
from penstock.model.delta_batch import DeltaBatch
from penstock.node.live.subscription import SubscriptionState


def in_vectors_order(reader: Reader) -> bool:
    """Whether the deltas of every vector came in the order of release."""
    last: dict[bytes, int] = {}
    vectors = DeltaBatch.of([row.payload for row in reader.rows]).vector
    for row, vector in zip(reader.rows, vectors, strict=True):
        if last.get(vector.tobytes(), 0) >= row.ordinal:
            return False
        last[vector.tobytes()] = row.ordinal
    return True


def applied(rows: Iterable[Row]) -> dict[tuple[str, int], float]:
    """By component what was heard of it last; all deltas are SPARSE."""
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        delta = decode(row.payload, checked=True)
        assert delta.indices is not None and delta.values is not None
        name = f"{delta.namespace}/{delta.vector_id}"
        named = [(name, index) for index in delta.indices.tolist()]
        found.update(zip(named, delta.values.tolist(), strict=True))
    return found


def merging(deltas: int, **options: Any) -> Corpus:
    """Changes of which many of a vector can be merged."""
    plain: dict[str, Any] = {
        "ops": SPARSE_ONLY, "origins": 1, "concurrent": 0.0, "duplicates": 0.0, "components": 2,
    }  # fmt: skip
    return corpus(deltas, **(plain | options))


async def test_stalled_then_behind_then_live_with_nothing_lost(node: Node) -> None:
    small_outbox(node)
    some = corpus(2000)
    reader = await subscribe(node, credit_entries=100, batch_max=40)
    await put(node, payloads_of(some, 0, 200), size=10)
    await until(lambda: reader.rows and reader.opened.state is SubscriptionState.LIVE)
    reader.stalled = True
    await put(node, payloads_of(some, 200, 1500), size=30)
    assert reader.opened.state is SubscriptionState.BEHIND
    assert reader.status()["behind_switches"] >= 1
    held = len(reader.rows)
    reader.resume()
    await put(node, payloads_of(some, 1500), size=10)
    wanted = expected(node)
    await until(lambda: len(reader.rows) >= len(wanted))
    assert held < len(wanted)
    assert sorted(row.ordinal for row in reader.rows) == [row.ordinal for row in wanted]
    assert {row.ordinal: row for row in reader.rows} == {row.ordinal: row for row in wanted}
    assert in_vectors_order(reader)
    await until(lambda: reader.opened.state is SubscriptionState.LIVE)


@pytest.mark.parametrize("seed", range(6))
async def test_falling_behind_again_and_again(node: Node, seed: int) -> None:
    small_outbox(node, 30)
    some = corpus(1500, seed=seed, priorities=(0.2, 0.2, 0.3, 0.3))
    reader = await subscribe(node, credit_entries=40, batch_max=7)
    for at in range(0, len(some), 40):
        reader.stalled = (at // 40 + seed) % 4 != 0
        if not reader.stalled:
            reader.grant()
        await put(node, payloads_of(some, at, min(at + 40, len(some))), size=20)
    reader.resume()
    wanted = expected(node)
    await until(lambda: len(reader.rows) >= len(wanted))
    assert sorted(row.ordinal for row in reader.rows) == [row.ordinal for row in wanted]
    assert in_vectors_order(reader)
    assert reader.status()["behind_switches"] > 1
    positions = [frame.position for frame in reader.frames]
    assert positions == sorted(positions)


@pytest.mark.parametrize("disorder", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(4))
async def test_what_is_coalesced_is_not_lost_with_the_outbox(
    node: Node, seed: int, disorder: float
) -> None:
    small_outbox(node, 30)
    some = merging(1500, vectors=60, seed=seed, disorder=disorder)
    reader = await subscribe(node, credit_entries=20, batch_max=7, coalesce_ms=10)
    await until(lambda: reader.opened.state is SubscriptionState.LIVE)
    for at in range(0, len(some), 30):
        reader.stalled = (at // 30 + seed) % 4 != 0
        if not reader.stalled:
            reader.grant()
        await put(node, payloads_of(some, at, min(at + 30, len(some))), size=15)
        await node.advance(0.02)
    reader.resume()
    await node.advance(0.02)
    await until(lambda: reader.opened.handled(expected(node)[-1].position))
    wanted = expected(node)
    assert sum(frame.folded + frame.count for frame in reader.frames) == len(wanted)
    assert applied(reader.rows) == applied(wanted)
    assert in_vectors_order(reader)
    assert reader.status()["behind_switches"] > 1
    assert reader.status()["folded"] > 0


@pytest.mark.parametrize("seed", range(4))
async def test_a_position_covers_what_was_merged(node: Node, seed: int) -> None:
    """Whoever leaves between two frames and goes on from the last position misses nothing."""
    some = merging(300, vectors=30, seed=seed)
    reader = await subscribe(node, credit_entries=4, batch_max=4, coalesce_ms=10, stalled=True)
    await until(lambda: reader.opened.state is SubscriptionState.LIVE)
    await put(node, payloads_of(some), size=30)
    await node.advance(0.02)
    wanted = expected(node)
    while (position := reader.frames[-1].position) < wanted[-1].position:
        rest = [row for row in wanted if row.position > position]
        assert applied([*reader.rows, *rest]) == applied(wanted)
        count = len(reader.frames)
        reader.grant()
        await until(lambda count=count: len(reader.frames) > count)  # type: ignore[misc]
    assert sum(frame.folded + frame.count for frame in reader.frames) == len(wanted)


async def test_a_position_says_that_all_before_it_was_sent(node: Node) -> None:
    some = corpus(800, priorities=(0.2, 0.2, 0.3, 0.3))
    reader = await subscribe(node, credit_entries=20, batch_max=5, stalled=True)
    await put(node, payloads_of(some), size=20)
    wanted = expected(node)
    while len(reader.rows) < len(wanted):
        sent = {row.ordinal for row in reader.rows}
        position = reader.frames[-1].position
        assert all(row.ordinal in sent for row in wanted if row.position <= position)
        reader.grant()
        await until(lambda: reader.owed[0] > 0)


async def test_what_waits_is_bounded_whatever_the_subscriber_does(node: Node) -> None:
    small_outbox(node, 100)
    reader = await subscribe(node, credit_entries=10, stalled=True)
    subscription = reader.opened
    await put(node, payloads_of(corpus(3000)), size=100)
    assert len(reader.rows) <= 10
    assert subscription.waiting <= 100
    reading = subscription._reading
    assert reading is not None
    assert reading._batches is None
    assert reading.held is None or reading.held.batch.sizes.sum() < 1 << 20


async def test_one_that_is_stalled_delays_nobody(node: Node) -> None:
    small_outbox(node, 100)
    stalled = await subscribe(node, credit_entries=10, stalled=True)
    readers = [await subscribe(node) for _ in range(4)]
    some = corpus(600)
    await put(node, payloads_of(some), size=20)
    wanted = expected(node)
    await until(lambda: all(len(reader.rows) == len(wanted) for reader in readers))
    assert len(stalled.rows) <= 10
    assert all(reader.status()["behind_switches"] == 0 for reader in readers)


async def test_urgent_deltas_pass_those_that_wait(node: Node) -> None:
    reader = await subscribe(node, credit_entries=1, batch_max=1, stalled=True)
    some = corpus(300, priorities=(0.1, 0.1, 0.4, 0.4), disorder=0.0, duplicates=0.0, vectors=300)
    await put(node, payloads_of(some))
    await until(lambda: reader.rows)
    for _ in range(299):
        count = len(reader.rows)
        reader.grant()
        await until(lambda count=count: len(reader.rows) > count)  # type: ignore[misc]
    classes = [row.payload[2] for row in reader.rows[1:]]
    assert classes == sorted(classes)


async def test_credit_is_kept_to(node: Node) -> None:
    reader = await subscribe(node, credit_entries=25, stalled=True)
    await put(node, payloads_of(corpus(300)))
    assert len(reader.rows) == 25
    with pytest.raises(InvalidArgument, match="more credit"):
        reader.opened.grant(26, 0)
    reader.opened.grant(5, 0)
    await until(lambda: len(reader.rows) == 30)


async def test_a_connection_that_is_full_is_left_alone(node: Node) -> None:
    reader = await subscribe(node)
    reader.opened.blocked = True
    await put(node, payloads_of(corpus(100)))
    assert not reader.rows
    reader.opened.blocked = False
    await until(lambda: len(reader.rows) == len(expected(node)))


async def test_coalescing_gives_one_delta_for_several(node: Node) -> None:
    reader = await subscribe(node, coalesce_ms=50)
    some = corpus(200, vectors=4, ops=SPARSE_ONLY, origins=1, duplicates=0.0, disorder=0.0)
    await put(node, payloads_of(some), size=20)
    assert not reader.rows
    await node.advance(0.1)
    await until(
        lambda: reader.opened.settled == node.engine.topics["vectors"].here(0).sequence_readable
    )
    wanted = expected(node)
    assert len(reader.rows) < len(wanted) / 2
    assert sum(frame.folded + frame.count for frame in reader.frames) == len(wanted)
