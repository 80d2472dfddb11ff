"""A client takes the place of an earlier one of its name on all nodes, and over a failover."""

import pytest
from tests.integration.cluster.asking import Asking

import penstock
from penstock.client.options import Options
from penstock.errors import StaleProducer

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEYS = [f"user-{i}" for i in range(24)]


async def refused(topic: penstock.Topic[bytes]) -> int:
    """How many puts of an earlier client are refused, one after the other."""
    count = 0
    for key in KEYS:
        try:
            await topic.put(b"old", key=key)
        except StaleProducer:
            count += 1
    return count


async def test_a_replaced_client_is_refused_everywhere_and_by_who_takes_over(
    cluster: Asking,
) -> None:
    """Before, it was refused in the partitions alone that the later client had written to."""
    await cluster.create("fenced", partitions=6)
    options = Options(producer="shop")
    async with (
        penstock.connect(cluster.processes.url, options=options) as earlier,
        penstock.connect(cluster.processes.url, options=options) as later,
    ):
        old, new = (client.topic("fenced", create=False) for client in (earlier, later))
        assert await refused(old) == 0
        await new.put(b"new", key=KEYS[0])
        assert await refused(old) == len(KEYS)
        killed = await cluster.coordinator("fenced", 3)
        await cluster.processes.kill(killed)
        assert await refused(old) == len(KEYS)
        await new.put_many([penstock.Item(b"new", key=key) for key in KEYS])
    assert (await cluster.call("stats", topic="fenced"))["topics"][0]["ready"] == 2 * len(KEYS) + 1
