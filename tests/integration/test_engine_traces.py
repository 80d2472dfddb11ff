"""What the node tells about itself: metrics, statistics, the audit trail."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from tests.integration.harness import Node

from penstock.errors import FailedPrecondition, InvalidArgument, Unauthenticated

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


async def traffic(node: Node) -> str:
    """A little of everything that is counted."""
    topic = await node.topic(max_retries=0, backoff_ms_base=0, partitions=2, visibility_ms=1000)
    rows = [{"payload": b"x", "key": b"%d" % i} for i in range(8)]
    for _ in range(2):
        await node.enqueue(topic, rows, producer=("p", 1, 1))
    await node.put(topic, b"later", delay_ms=60_000)
    messages = await node.pop(topic, 4)
    await node.ack(topic, messages[:2])
    await node.ack(topic, messages[:1])
    await node.nack(topic, messages[2:3])
    await node.advance(1)
    await node.call("dlq_replay", topic=topic, limit=1)
    await node.nack(topic, await node.pop(topic))
    await node.call("snapshot", topic=topic)
    await node.update(topic, key_streams_max=1)
    return topic


async def test_every_documented_metric_is_there_after_traffic(node: Node) -> None:
    topic = await traffic(node)
    await node.stream(topic, credits=1)
    with pytest.raises(Unauthenticated):
        await node.connect("pk_wrong_key")
    shown = node.engine.metrics.text().decode()
    families = set(re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE))
    of_nodes = DOCS.read_text().partition("## A pipeline")[0]
    documented = set(re.findall(r"^\| `(penstock_\w+)`", of_nodes, re.MULTILINE))
    assert len(documented) > 30
    assert documented - {f"{f}_total" for f in families} - families == set()
    ours = {f for f in families if f.startswith("penstock_")}
    assert {f for f in ours if not f.endswith("_created")} <= documented


async def test_counts_are_right(node: Node) -> None:
    await traffic(node)
    shown = node.engine.metrics.text().decode()

    def value(name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", shown, re.MULTILINE)
        return sum(map(float, found))

    assert value("penstock_duplicate_messages_total") == 8
    assert value("penstock_acked_messages_total") == 2
    assert value("penstock_lease_lost_total") == 1
    assert value("penstock_lease_expiries_total") == 1
    assert value("penstock_dead_lettered_messages_total") == 3
    assert value("penstock_replayed_messages_total") == 1
    assert value("penstock_ready_messages") == 4
    assert value("penstock_delayed_messages") == 1
    assert value("penstock_dlq_messages") == 2
    assert value("penstock_enqueue_seconds_count") == 17
    assert value("penstock_pop_seconds_count") == 5
    stats = await node.stats()
    totals = {name: stats[f"{name}_total"] for name in ("enqueued", "acked", "expired", "dead")}
    assert totals == {"enqueued": 9, "acked": 2, "expired": 1, "dead": 3}


async def test_the_oldest_age_is_that_of_a_ready_message(node: Node) -> None:
    topic = await node.topic()
    assert (await node.stats())["oldest_age_ms"] is None
    await node.put(topic, b"old")
    await node.advance(7)
    await node.put(topic, b"new", priority=-1)
    assert (await node.stats())["oldest_age_ms"] == 7000
    await node.pop(topic, 2)
    assert (await node.stats())["oldest_age_ms"] is None


async def test_every_administrative_act_leaves_a_line(node: Node) -> None:
    made = await node.call("key_create", name="ops")
    admin = await node.connect(made["key"])
    topic = await admin.topic()
    await admin.put(topic, b"a")
    (message,) = await admin.call("peek", topic=topic) and await admin.pop(topic)
    await admin.update(topic, max_retries=1)
    await admin.call("move_to_dlq", topic=topic, message_id=message["message_id"])
    await admin.call("dlq_replay", topic=topic, request_id="request-1")
    await admin.call("snapshot", topic=topic)
    with pytest.raises(FailedPrecondition):
        await admin.call("purge", topic=topic, force=True)
    await admin.forced("purge", topic)
    await admin.forced("dlq_delete", topic)
    with pytest.raises(InvalidArgument):
        await admin.update(topic, k=0)
    await admin.forced("topic_delete", topic)
    await node.forced("key_revoke", made["id"])
    lines = [json.loads(line) for line in (node.path / "audit.jsonl").read_text().splitlines()]
    assert [(line["act"], line["outcome"]) for line in lines] == [
        ("key_create", "ok"), ("topic_create", "ok"), ("topic_update", "ok"),
        ("move_to_dlq", "ok"), ("dlq_replay", "ok"), ("snapshot", "ok"),
        ("purge", "failed_precondition"), ("purge", "ok"), ("dlq_delete", "ok"),
        ("topic_update", "invalid_argument"), ("topic_delete", "ok"), ("key_revoke", "ok"),
    ]  # fmt: skip
    assert {line["who"] for line in lines[1:-1]} == {made["id"]}
    assert lines[4]["request_id"] == "request-1" and lines[1]["subject"] == topic
    assert made["key"].split("_")[2] not in (node.path / "audit.jsonl").read_text()


async def test_a_revoked_key_is_out_at_once(node: Node) -> None:
    made = await node.call("key_create", name="short")
    held = await node.connect(made["key"])
    topic = await node.topic()
    stream = await held.connection.lease_stream(topic, credits=1)
    await node.forced("key_revoke", made["id"])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not held.connection.alive
    with pytest.raises(Exception, match="revoked"):
        await anext(stream)
    with pytest.raises(Unauthenticated):
        await node.connect(made["key"])
    assert (await node.stats())["consumers"] == 0
