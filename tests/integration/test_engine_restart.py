"""Restarts: everything acknowledged is there, epochs rise, and what must not start does not."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.harness import Node

from penstock.errors import Corruption, FailedPrecondition, Unavailable
from penstock.log.verify import verify_folder
from penstock.node.clock import ManualClock


@pytest.mark.parametrize("how", ["clean", "crash"])
async def test_everything_acknowledged_is_there(node: Node, how: str) -> None:
    topic = await node.topic(partitions=2, backoff_ms_base=0)
    for i in range(20):
        await node.put(topic, b"%d" % i, key=b"%d" % i, priority=i)
    messages = await node.pop(topic, 8)
    await node.ack(topic, messages[:2])
    await node.nack(topic, messages[2:4], reject=True)
    await node.nack(topic, messages[4:6], delay_ms=60_000)
    assert await node.counts() == (12, 2, 2, 2)
    await (node.restart() if how == "clean" else node.crash())
    assert await node.counts() == (12, 2, 2, 2)
    digests = [p.heap.digest() for p in node.engine.topics[topic].partitions]
    assert await node.ack(topic, messages[6:]) == []  # tokens of before still hold
    assert await node.popped(topic) == [b"%d" % i for i in range(8, 20)]
    assert len(set(digests)) == 2


async def test_leases_run_anew_from_the_restart(node: Node) -> None:
    topic = await node.topic(visibility_ms=10_000, backoff_ms_base=0)
    await node.put(topic, b"x")
    await node.pop(topic)
    await node.advance(9)
    await node.restart()
    await node.advance(9.999)
    assert await node.counts() == (0, 0, 1, 0)
    await node.advance(0.001)
    assert await node.popped(topic) == [b"x"]


async def test_a_lease_that_ran_out_while_the_node_was_down_is_armed_again(node: Node) -> None:
    topic = await node.topic(visibility_ms=10_000)
    await node.put(topic, b"x")
    message = await node.pop(topic)
    await node.stop()
    node.clock.advance(3600)
    await node.start()
    await node.settled()
    assert await node.ack(topic, message) == []


async def test_a_wall_clock_that_was_set_back_holds_nothing_up(node: Node) -> None:
    topic = await node.topic(visibility_ms=10_000, backoff_ms_base=0)
    await node.put(topic, b"leased")
    await node.put(topic, b"delayed", delay_ms=10_000)
    await node.pop(topic)
    await node.stop()
    node.clock = ManualClock(node.clock.now_ms() - 3_600_000)
    await node.start()
    await node.advance(10)
    assert sorted(await node.popped(topic)) == [b"delayed", b"leased"]


async def test_epochs_only_rise(node: Node) -> None:
    topic = await node.topic(partitions=2)
    seen = []
    for _ in range(3):
        status = await node.call("log_status", topic=topic)
        seen.append([p["epoch"] for p in status["partitions"]])
        await node.restart()
    for one, two in pairwise(seen):
        assert all(a < b for a, b in zip(one, two, strict=True))


async def test_a_restart_takes_up_from_a_snapshot(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, *(b"%d" % i for i in range(50)))
    leased = await node.pop(topic, 10)
    taken = await node.call("snapshot", topic=topic)
    await node.ack(topic, leased[:5])
    await node.crash()
    found = (await node.stats())["partitions"][0]
    assert found["snapshot_sequence"] == taken["snapshots"][0]["sequence"]
    assert await node.counts() == (40, 0, 5, 0)
    assert await node.ack(topic, leased) == [0, 1, 2, 3, 4]


async def test_a_damaged_snapshot_costs_time_not_data(node: Node) -> None:
    topic = await node.topic()
    for i in range(3):
        await node.put(topic, b"%d" % i)
        await node.call("snapshot", topic=topic)
    await node.ack(topic, await node.pop(topic))
    await node.stop()
    newest = max(node.path.rglob("*.snap"))
    newest.write_bytes(newest.read_bytes()[:-1])
    await node.start()
    assert await node.popped(topic) == [b"1", b"2"]


async def test_a_folder_has_one_node(node: Node, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="in use by process"):
        await Node(node.path).start()
    command = [sys.executable, "-m", "penstock.cli", "serve", "--data", str(node.path),
               "--port", "0", "--grpc-port", "-1", "--http-port", "-1", "--json"]  # fmt: skip
    second = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, check=False, timeout=200
    )
    assert second.returncode == 5
    assert "in use by process" in json.loads(second.stdout)["error"]["message"]
    assert (await node.call("node_status"))["healthy"]


async def test_a_newer_format_is_refused(node: Node) -> None:
    await node.stop()
    (node.path / "FORMAT").write_text('{"format": 5, "product": "penstock"}')
    with pytest.raises(FailedPrecondition, match="format 5"):
        await node.start()


async def test_rot_is_refused_and_named(small_node: Node) -> None:
    node = small_node
    topic = await node.topic()
    for _ in range(30):
        await node.put(topic, b"x" * 8000)
    await node.stop()
    oldest = min(node.path.rglob("*.seg"))
    data = bytearray(oldest.read_bytes())
    data[3000] ^= 1
    oldest.write_bytes(data)
    report = verify_folder(node.path)
    assert not report.ok and report.first_bad["file"] == str(oldest)
    with pytest.raises(Corruption):
        await node.start()


async def test_a_stop_answers_what_is_under_way(node: Node) -> None:
    topic = await node.topic()
    puts = [asyncio.create_task(node.put(topic, b"%d" % i)) for i in range(20)]
    await asyncio.sleep(0)
    await node.stop()
    answers = await asyncio.gather(*puts, return_exceptions=True)
    done = [a for a in answers if isinstance(a, list)]
    assert all(isinstance(a, list | Unavailable) for a in answers)
    await node.start()
    assert (await node.counts())[0] >= len(done)


async def test_messages_of_many_files_come_in_one_delivery(small_node: Node) -> None:
    """More segments than are kept open, none of them in memory after a restart."""
    node = small_node
    topic = await node.topic()
    for i in range(300):
        await node.put(topic, b"%03d" % i + b"x" * 8000, priority=i * 97 % 300, key=b"%d" % i)
    assert (await node.stats())["partitions"][0]["segments"] > 32
    await node.restart()
    async with asyncio.timeout(60):
        messages = await node.pop(topic, 300)
    assert [m["priority"] for m in messages] == list(range(300))
    assert all(m["key"] == b"%d" % int(m["payload"][:3]) for m in messages)


@pytest.mark.parametrize("how", ["restart", "crash", "snapshot"])
async def test_totals_are_those_of_the_log_after_a_restart(node: Node, how: str) -> None:
    """Before, all of them were zero after each start of the node."""
    topic = await node.topic(max_retries=1, backoff_ms_base=0, visibility_ms=1000, partitions=2)
    for i in range(6):
        await node.put(topic, b"%d" % i, key=b"%d" % i)
    first, second, third, fourth = await node.pop(topic, 4)
    await node.ack(topic, [first, second])
    await node.nack(topic, [third], reject=True)
    await node.nack(topic, [fourth])
    assert len(await node.pop(topic, 3)) == 3
    await node.advance(1)  # one of them for the second time, which is once too often
    before = await totals(node)
    expected = {"enqueued": 6, "acked": 2, "retried": 3, "dead": 2, "expired": 3}
    assert before == expected
    if how == "snapshot":
        await node.call("snapshot")
    await (node.restart() if how == "restart" else node.crash())
    assert await totals(node) == expected
    await node.put(topic, b"more")
    assert (await totals(node))["enqueued"] == 7


async def totals(node: Node) -> dict[str, int]:
    found = await node.stats()
    names = ("enqueued", "acked", "retried", "dead", "expired")
    return {name: found[f"{name}_total"] for name in names}
