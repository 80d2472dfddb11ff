"""Where a subscription begins, and where it goes on."""

from __future__ import annotations

import pytest
from tests.integration.harness import START_MS, Node
from tests.unit.node.live.subscribing import (
    TOPIC,
    corpus,
    cut,
    delta_topic,
    expected,
    payloads_of,
    put,
    small_outbox,
    subscribe,
    until,
)

from penstock.errors import FailedPrecondition, InvalidArgument, NotFound


async def filled(node: Node, deltas: int = 200) -> None:
    some = corpus(deltas)
    await put(node, payloads_of(some, 0, deltas // 2), size=20)
    await node.advance(5)
    await put(node, payloads_of(some, deltas // 2), size=20)


@pytest.mark.parametrize("first", [1, 2, 57, 130, 201])
async def test_from_a_sequence(node: Node, first: int) -> None:
    await filled(node)
    reader = await subscribe(node, start="sequence", at=first)
    wanted = expected(node, first=first)
    before = len(expected(node)) - len(wanted)
    assert (reader.opened.opened["position"], reader.opened.opened["ordinal"]) == (
        first - 1,
        before,
    )
    await until(lambda: len(reader.rows) >= len(wanted))
    assert reader.rows == wanted


async def test_from_now(node: Node) -> None:
    some = corpus(200)
    await put(node, payloads_of(some, 0, 150))
    reader = await subscribe(node)
    first = reader.opened.opened["sequence_committed"] + 1
    await put(node, payloads_of(some, 150))
    wanted = expected(node, first=first)
    await until(lambda: len(reader.rows) >= len(wanted))
    assert reader.rows == wanted
    assert any(row.sequence < first for row in reader.rows), "what had waited comes with its cause"


async def test_from_a_time(node: Node) -> None:
    await filled(node)
    reader = await subscribe(node, start="time", at=START_MS + 5000)
    first = reader.opened.opened["position"] + 1
    wanted = expected(node, first=first)
    assert 90 < first < 110
    await until(lambda: reader.rows == wanted)


async def test_from_a_position_that_is_not_there_yet(node: Node) -> None:
    reader = await subscribe(node, start="sequence", at=60)
    await put(node, payloads_of(corpus(100)), size=3)
    await until(lambda: reader.rows == expected(node, first=60))


async def test_from_a_cursor_and_on_after_a_restart(node: Node) -> None:
    some = corpus(300)
    reader = await subscribe(node, start="cursor", cursor="me", at=1)
    await put(node, payloads_of(some, 0, 100))
    await until(lambda: reader.rows == expected(node))
    reader.opened.close()
    await put(node, payloads_of(some, 100, 200))
    await node.restart()
    second = await subscribe(node, start="cursor", cursor="me")
    await put(node, payloads_of(some, 200))
    wanted = expected(node)
    await until(lambda: len(reader.rows) + len(second.rows) >= len(wanted))
    assert reader.rows + second.rows == wanted


async def test_a_cursor_moves_by_what_was_acknowledged_alone(node: Node) -> None:
    reader = await subscribe(node, start="cursor", cursor="me", at=1, stalled=True)
    await put(node, payloads_of(corpus(100)))
    await until(lambda: reader.rows == expected(node))
    position = reader.rows[40].position
    with pytest.raises(InvalidArgument, match="was not sent"):
        reader.opened.acknowledge(10_000)
    reader.opened.acknowledge(position)
    await node.advance(0.3)
    listed = await node.call("cursor_list", topic="vectors")
    assert [(c["name"], c["position"]) for c in listed["cursors"]] == [("me", position)]
    second = await subscribe(node, start="cursor", cursor="me")
    assert isinstance(reader.failed, FailedPrecondition), "the newer subscriber takes it over"
    await until(lambda: second.rows == expected(node, first=position + 1))


async def test_who_is_refused_leaves_the_cursor_to_its_holder(small_node: Node) -> None:
    node, some = small_node, corpus(1600)
    await delta_topic(node, retention_ms=1000)
    holder = await subscribe(node, cursor="me")
    await put(node, payloads_of(some, 0, 1500))
    wanted = len(expected(node))
    await until(lambda: len(holder.rows) == wanted)
    await cut(node)
    with pytest.raises(NotFound, match="is gone"):
        await subscribe(node, cursor="me", start="sequence", at=5)
    assert holder.failed is None
    await put(node, payloads_of(some, 1500))
    await until(lambda: len(holder.rows) > wanted)
    handled = holder.opened.acknowledged
    second = await subscribe(node, cursor="me", start="cursor")
    assert isinstance(holder.failed, FailedPrecondition)
    assert second.opened.opened["position"] >= handled


async def test_an_unknown_cursor_begins_now(node: Node) -> None:
    await put(node, payloads_of(corpus(50)))
    reader = await subscribe(node, start="cursor", cursor="new")
    committed = node.engine.topics["vectors"].here(0).sequence_readable
    assert reader.opened.opened["position"] == committed


async def test_what_retention_has_dropped_is_refused(small_node: Node) -> None:
    node = small_node
    await delta_topic(node, retention_ms=1000)
    small_outbox(node)
    stalled = await subscribe(node, credit_entries=5, stalled=True)
    await put(node, payloads_of(corpus(1500)))
    wanted = expected(node)
    first = await cut(node)
    topic = node.engine.topics[TOPIC]
    with pytest.raises(NotFound, match="is gone") as refused:
        await subscribe(node, start="sequence", at=5)
    assert refused.value.details["sequence_first"] >= first
    stalled.resume()
    await until(lambda: stalled.failed)
    assert isinstance(stalled.failed, NotFound)
    assert stalled.failed.details["sequence_first"] >= first
    reader = await subscribe(node, start="sequence", at=0)
    oldest = reader.opened.opened["position"] + 1
    assert first <= oldest < first + 60, "what had waited since before is gone with it"
    await until(lambda: reader.opened.settled == topic.here(0).sequence_readable)
    await node.advance(0.2)
    assert node.engine.hub(topic).partitions[0].releases.trimmed == first - 1
    assert reader.rows == [row for row in wanted if row.position >= oldest]
