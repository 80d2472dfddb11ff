"""What is told of the live path: status, cursors, metrics."""

from __future__ import annotations

import msgspec
import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    TOPIC,
    corpus,
    expected,
    payloads_of,
    put,
    subscribe,
    until,
)

from penstock.cli.deltas import whole_topics
from penstock.errors import FailedPrecondition, NotFound
from penstock.wire.messages import PAGE_BYTES_MAX


async def test_status_tells_of_every_subscription(node: Node) -> None:
    reader = await subscribe(node, routes=["namespace=a"], cursor="me", credit_entries=50)
    stalled = await subscribe(node, credit_entries=7, stalled=True)
    await put(node, payloads_of(corpus(200)))
    await until(lambda: len(reader.rows) == len(expected(node, routes="namespace=a")))
    found = (await node.call("live_status", topic=TOPIC))["topics"][0]
    [fold] = found["partitions"]
    committed = node.engine.topics[TOPIC].here(0).sequence_readable
    assert (fold["state"], fold["position"], fold["lag_entries"]) == ("live", committed, 0)
    assert fold["released"] == len(expected(node))
    first, second = found["subscriptions"]
    assert (first["name"], first["routes"], first["cursor"]) == ("me", ["namespace=a"], "me")
    assert (first["state"], first["delivered"], first["lag_entries"]) == (
        "live", len(reader.rows), 0,
    )  # fmt: skip
    assert (second["delivered"], second["credit_entries"]) == (7, 0)
    assert second["outbox_entries"] == len(expected(node)) - len(stalled.rows)
    assert second["utilisation"] == 1.0
    assert second["rate"] > 0


async def test_status_of_what_nobody_subscribes_to(node: Node) -> None:
    await node.topic("jobs")
    [found] = (await node.call("live_status"))["topics"]
    assert found["topic"] == TOPIC
    assert found["partitions"] == found["subscriptions"] == found["sinks"] == []
    with pytest.raises(FailedPrecondition):
        await node.call("live_status", topic="jobs")
    with pytest.raises(FailedPrecondition):
        await node.call("cursor_list", topic="jobs")


async def test_subscriptions_come_by_the_page(node: Node) -> None:
    """Before, all were in one answer: here of 1.4 MB, and of 64 MB with as many as a topic may
    have by default."""
    await node.topic("others", kind="delta", dimensions=2)
    routes = [f"namespace={'x' * 1000}{number}" for number in range(64)]
    for number in range(20):
        await subscribe(node, routes=routes, cursor=f"reader-{number}", start="cursor")
    answer = await node.call("live_status")
    pages = [answer["topics"]]
    while answer["next"] is not None:
        answer = await node.call("live_status", after=answer["next"])
        pages.append(answer["topics"])
    assert [[topic["topic"] for topic in page] for page in pages] == [["others", TOPIC], [TOPIC]]
    assert all(len(msgspec.msgpack.encode(page)) < PAGE_BYTES_MAX + 1024 for page in pages)
    topics = whole_topics([topic for page in pages for topic in page])
    assert [topic["topic"] for topic in topics] == ["others", TOPIC]
    assert sorted(row["name"] for row in topics[1]["subscriptions"]) == sorted(
        f"reader-{number}" for number in range(20)
    )
    assert len(topics[1]["partitions"]) == 1 and topics[1]["subscriptions"][0]["routes"] == routes


async def test_cursors_are_listed_and_deleted(node: Node) -> None:
    reader = await subscribe(node, cursor="me", start="cursor", at=1)
    await put(node, payloads_of(corpus(60)))
    await until(lambda: reader.rows == expected(node))
    position = reader.frames[-1].position
    reader.opened.close()
    [cursor] = (await node.call("cursor_list", topic=TOPIC))["cursors"]
    assert (cursor["name"], cursor["partition"], cursor["position"]) == ("me", 0, position)
    await node.engine.cursors.flush()
    assert await node.call("cursor_delete", topic=TOPIC, name="me") == {"deleted": 1}
    assert (await node.call("cursor_list", topic=TOPIC))["cursors"] == []
    with pytest.raises(NotFound):
        await node.call("cursor_delete", topic=TOPIC, name="me")


async def test_metrics_tell_of_it(node: Node) -> None:
    reader = await subscribe(node)
    await subscribe(node, credit_entries=5, stalled=True)
    await put(node, payloads_of(corpus(100)), size=10)
    released = len(expected(node))
    await until(lambda: len(reader.rows) == released)
    await node.advance(0.2)
    text = node.engine.metrics.text().decode()
    for line in (
        f'penstock_live_push_seconds_count{{topic="{TOPIC}"}} {float(released)}',
        f'penstock_live_delivered_deltas_total{{topic="{TOPIC}"}} {float(released + 5)}',
        f'penstock_live_subscriptions{{state="live",topic="{TOPIC}"}} 2.0',
        f'penstock_live_outbox_deltas{{topic="{TOPIC}"}} {float(released - 5)}',
        f'penstock_live_fold_lag_entries{{partition="0",topic="{TOPIC}"}} 0.0',
    ):
        assert line in text
