"""A plan of moves outlives the node that was asked for it, and the one that carries it out."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking, asking
from tests.integration.cluster.conftest import OPTIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARTITIONS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("plans")
    async with asking(folder, OPTIONS | {"cluster.moves_max": 1}) as made:
        yield made


async def test_a_plan_goes_on_when_its_node_is_killed(cluster: Asking) -> None:
    await cluster.create("moved", partitions=PARTITIONS)
    fourth = cluster.processes.add()
    await cluster.processes.start(fourth)
    await cluster.processes.wait_ready()
    oldest = await _oldest(cluster)
    leaving = next(node for node in cluster.processes.nodes if node not in (oldest, fourth))
    cluster.processes.pause(fourth)  # where everything is to go: nothing arrives before the kill
    moves = (await cluster.call("cluster_drain", at=oldest, node=leaving))["moves"]
    assert len(moves) == PARTITIONS
    await cluster.processes.kill(oldest)
    cluster.processes.resume(fourth)
    await cluster.processes.start(oldest)

    async def over() -> bool:
        status = await cluster.call("cluster_status", at=fourth)
        found = {p["partition"]: p["voters"] for p in status["partitions"]}
        return found == {move["partition"]: move["to"] for move in moves}

    await cluster.until(over)
    assert (await cluster.call("cluster_moves", at=leaving))["moves"] == []


async def _oldest(cluster: Asking) -> str:
    nodes = (await cluster.call("cluster_status"))["nodes"]
    return str(min(nodes, key=lambda node: node["age"])["id"])
