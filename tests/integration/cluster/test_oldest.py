"""Under the policy `oldest`, the node that has run longest coordinates everything."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking, asking
from tests.integration.cluster.conftest import OPTIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARTITIONS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("oldest")
    async with asking(folder, OPTIONS | {"cluster.policy": "oldest"}) as made:
        yield made


async def by_age(cluster: Asking) -> list[str]:
    """The living nodes, the oldest first."""
    nodes = (await cluster.call("cluster_status"))["nodes"]
    alive = [node for node in nodes if node["alive"]]
    return [node["id"] for node in sorted(alive, key=lambda node: node["age"])]


async def coordinated_by(cluster: Asking, node: str) -> None:
    async def all_of_them() -> bool:
        return await cluster.processes.coordinators("jobs") == [node] * PARTITIONS

    await cluster.until(all_of_them)


async def test_the_oldest_node_coordinates_and_the_next_takes_over(cluster: Asking) -> None:
    await cluster.create("jobs", partitions=PARTITIONS)
    oldest, second, _ = await by_age(cluster)
    await coordinated_by(cluster, oldest)
    for partition in range(PARTITIONS):
        await cluster.put("jobs", b"before", at=second, partition=partition)
    await cluster.processes.kill(oldest)
    await coordinated_by(cluster, second)
    await cluster.processes.start(oldest)
    await cluster.processes.wait_ready()
    assert (await by_age(cluster))[-1] == oldest  # it begins anew, as the youngest
    for partition in range(PARTITIONS):
        await cluster.has_all("jobs", oldest, partition)
    await coordinated_by(cluster, second)  # and takes nothing back
    assert await cluster.payloads("jobs", partition=PARTITIONS - 1) == [b"before"]
