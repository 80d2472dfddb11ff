"""Commands that are larger than the space set aside just now wait for more of it."""

from __future__ import annotations

import asyncio

from tests.integration.harness import Node, delivered_tokens

from penstock.log.verify import verify_folder


async def healthy(node: Node) -> bool:
    return bool((await node.call("node_status"))["healthy"])


async def test_large_messages_that_come_together(node: Node) -> None:
    topic = await node.topic()
    payloads = [bytes([i]) * 900_000 for i in range(40)]
    await asyncio.gather(*(node.put(topic, payload) for payload in payloads))
    assert await node.counts() == (40, 0, 0, 0) and await healthy(node)
    await node.restart()
    seen = [payload for _ in range(40) for payload in await node.popped(topic, 1)]
    assert sorted(seen) == payloads
    await node.stop()
    assert verify_folder(node.path).ok


async def test_large_messages_of_one_producer_that_come_together(node: Node) -> None:
    topic = await node.topic(compression="lz4")
    rows = [{"payload": bytes([i]) * 900_000} for i in range(40)]
    await asyncio.gather(
        *(node.enqueue(topic, [row], producer=("p", 1, i + 1)) for i, row in enumerate(rows))
    )
    assert await node.counts() == (40, 0, 0, 0) and await healthy(node)


async def test_many_leases_end_together(small_node: Node) -> None:
    node = small_node
    topic = await node.topic()
    for _ in range(3):
        await node.put(topic, *[b"x"] * 9000)
    stream = await node.stream(topic, credits=10_000, batch_max=5000)
    for how in ("settle", "extend", "reject", "give_back"):
        tokens = []
        while len(tokens) < 5000:
            tokens += delivered_tokens([await anext(stream)])
        some = tokens[:5000]
        if how == "settle":
            assert await node.connection.settle(topic, some) == []
        elif how == "extend":
            assert await node.connection.extend(topic, some, 60_000) == []
            assert await node.connection.settle(topic, tokens) == []
        elif how == "reject":
            lost = await node.connection.give_back(topic, some, reject=True, reason="r" * 1000)
            assert lost == []
        else:
            assert await node.connection.give_back(topic, some, reason="r" * 1000) == []
    assert await healthy(node)
    assert (await node.counts())[3] == 5000


async def test_one_reason_for_very_many_messages_is_cut(node: Node) -> None:
    topic = await node.topic(partitions=1)
    for _ in range(3):
        await node.put(topic, *[b"x"] * 10_000)
    stream = await node.stream(topic, credits=10_000, batch_max=10_000)
    stream.grant(20_000)
    await node.update(topic, consumer_leases_max=100_000)
    tokens = []
    while len(tokens) < 30_000:
        tokens += delivered_tokens([await anext(stream)])
    lost = await node.connection.give_back(topic, tokens, reject=True, reason="r" * 1024)
    assert lost == [] and await healthy(node)
    (dead,) = await node.dead(limit=1)
    assert 0 < len(dead["detail"]) < 1024
    await node.restart()
    assert (await node.counts())[3] == 30_000
