"""Tenures end, topics are deleted, nodes stop: subscribers are told, and go on elsewhere."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    TOPIC,
    LateStore,
    Reader,
    corpus,
    delta_topic,
    expected,
    payloads_of,
    put,
    subscribe,
    until,
)

from penstock.config import Config
from penstock.errors import (
    InvalidArgument,
    LimitExceeded,
    PenstockError,
    Unavailable,
    WrongEpoch,
)
from penstock.node.live.partition import LivePartition
from penstock.node.session.stream_table import LiveStream
from penstock.propagation.options import LiveOptions
from penstock.wire.messages import OpenSubscription


async def test_a_tenure_that_ends_sends_subscribers_away(node: Node) -> None:
    some = corpus(300)
    reader = await subscribe(node, cursor="me")
    await put(node, payloads_of(some, 0, 150))
    await until(lambda: reader.rows == expected(node))
    topic = node.engine.topics[TOPIC]
    partition = topic.here(0)
    topic.unserve(0)
    assert isinstance(reader.failed, Unavailable)
    assert reader.failed.retryable
    assert partition.listener is None
    with pytest.raises(WrongEpoch):
        await subscribe(node)
    topic.serve(partition)
    again = await subscribe(node, start="cursor", cursor="me")
    await put(node, payloads_of(some, 150))
    wanted = expected(node)
    await until(lambda: len(reader.rows) + len(again.rows) >= len(wanted))
    assert reader.rows + again.rows == wanted


async def test_who_asks_when_a_tenure_ends_may_ask_again(node: Node) -> None:
    told: list[PenstockError] = []
    stream = LiveStream(1, 0, send=lambda *_: None, end=told.append)
    topic = node.engine.topics[TOPIC]
    partition = topic.here(0)
    topic.unserve(0)
    await stream.subscribe(node.engine.hub(topic), OpenSubscription(TOPIC, 0))
    assert [type(error) for error in told] == [Unavailable]
    topic.serve(partition)


async def test_who_leaves_before_it_is_open_takes_no_cursor(node: Node) -> None:
    store, hub = LateStore(node), node.engine.hub(node.engine.topics[TOPIC])
    opening = await store.opening(node, TOPIC)
    opening.cancel()
    await asyncio.wait([opening])
    await node.call("topic_list")  # the node has heard that it left
    store.late = False
    holder = await subscribe(node, start="cursor", cursor="me")
    store.answer()
    await until(lambda: not hub._opening)
    assert holder.failed is None


async def test_a_deleted_topic_takes_its_cursors_along(node: Node) -> None:
    reader = await subscribe(node, start="cursor", cursor="me", at=1)
    await put(node, payloads_of(corpus(50)))
    await until(lambda: reader.rows == expected(node))
    await node.advance(0.3)
    await node.engine.cursors.flush()
    old = node.engine.topics[TOPIC].config.id
    assert [*await node.engine.cursors.rows(old)]
    await node.engine.administration.delete_topic(TOPIC)
    assert reader.failed is not None
    assert [*await node.engine.cursors.rows(old)] == []
    await delta_topic(node)
    fresh = await subscribe(node, start="cursor", cursor="me", at=1)
    assert fresh.opened.opened["position"] == 0


async def test_a_node_that_stops_saves_what_was_acknowledged(node: Node) -> None:
    reader = await subscribe(node, start="cursor", cursor="me", at=1)
    await put(node, payloads_of(corpus(80)))
    await until(lambda: reader.rows == expected(node))
    position = reader.opened.acknowledged
    await node.restart()
    assert isinstance(reader.failed, Unavailable)
    [cursor] = (await node.call("cursor_list", topic=TOPIC))["cursors"]
    assert cursor["position"] == position > 0


async def test_a_topic_has_so_many_subscriptions(tmp_path: Path) -> None:
    path = tmp_path / "data"
    node = Node(path, Config(data=path, drain_s=5.0, live=LiveOptions(subscriptions_max=2)))
    await node.start()
    await delta_topic(node)
    first, _ = await subscribe(node), await subscribe(node)
    with pytest.raises(LimitExceeded):
        await subscribe(node)
    first.opened.close()
    await subscribe(node)
    await node.stop()


async def test_those_who_come_together_are_counted_too(tmp_path: Path) -> None:
    path = tmp_path / "data"
    node = Node(path, Config(data=path, drain_s=5.0, live=LiveOptions(subscriptions_max=2)))
    await node.start()
    await delta_topic(node)
    await put(node, payloads_of(corpus(500)))
    asking = (subscribe(node) for _ in range(8))
    found = await asyncio.gather(*asking, return_exceptions=True)
    readers = [one for one in found if isinstance(one, Reader)]
    assert len(readers) == 2
    assert all(isinstance(one, LimitExceeded) for one in found if one not in readers)
    for reader in readers:
        reader.opened.close()
    for _ in range(3):  # who is refused for something else takes no place
        with pytest.raises(InvalidArgument):
            await subscribe(node, start="cursor", cursor="not a name")
    await subscribe(node)
    await node.stop()


async def test_partitions_are_followed_apart(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    await delta_topic(node, partitions=3)
    some = corpus(600)
    readers = [await subscribe(node, index, start="sequence", at=1) for index in range(3)]
    await put(node, payloads_of(some), size=40)
    for index, reader in enumerate(readers):
        wanted = expected(node, index)
        await until(lambda reader=reader, wanted=wanted: reader.rows == wanted)  # type: ignore[misc]
    await node.stop()


async def test_a_node_stops_while_a_log_is_folded(node: Node) -> None:
    await put(node, payloads_of(corpus(3000)), size=500)
    asking = asyncio.create_task(subscribe(node, start="sequence", at=1))
    await asyncio.sleep(0)
    await node.stop()
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await asking
    await node.start()
    reader = await subscribe(node, start="sequence", at=1)
    await until(lambda: reader.rows == expected(node))


async def test_a_fold_may_take_longer_than_it_is_kept_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    node = Node(path, Config(data=path, drain_s=5.0, live=LiveOptions(idle_s=0.5)))
    await node.start()
    await delta_topic(node)
    await put(node, payloads_of(corpus(50)))
    folding, folded, fold = threading.Event(), threading.Event(), LivePartition._fold_slice

    def slow(feed: LivePartition, through: int) -> bool:
        folding.set()
        folded.wait()
        return fold(feed, through)

    monkeypatch.setattr(LivePartition, "_fold_slice", slow)
    store = LateStore(node)
    opening = asyncio.create_task(subscribe(node, start="cursor", cursor="me", at=1))
    await until(folding.is_set)
    for _ in range(8):
        await node.advance(0.1)
    folded.set()
    await until(lambda: store.asked.is_set() or opening.done())
    for _ in range(4):  # it counts from the end of the fold
        await node.advance(0.1)
    store.answer()
    reader = await opening
    await until(lambda: reader.rows == expected(node))
    reader.opened.close()
    for _ in range(7):
        await node.advance(0.1)
    assert not node.engine.hub(node.engine.topics[TOPIC]).partitions
    await node.stop()
