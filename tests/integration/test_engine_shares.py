"""What another node may ask for as our share of a call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.harness import Node

from penstock.client.network.connection import Connection
from penstock.client.network.exchange import memory_pair
from penstock.config import ClusterOptions, Config
from penstock.errors import InvalidArgument, Unauthenticated
from penstock.node.session.session import Session

CLUSTER_KEY = "c" * 32


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    options = ClusterOptions(key=CLUSTER_KEY)
    started = await Node(tmp_path, Config(data=tmp_path, cluster=options)).start()
    yield started
    await started.stop()


async def share(node: Node, of: str, partitions: list[int], **arguments: Any) -> dict[str, Any]:
    other = Connection(client="penstock-node/other", cluster_key=CLUSTER_KEY)
    memory_pair(other, Session(node.engine))
    await other.greeted()
    try:
        return await other.call(
            "share", topic="jobs", of=of, partitions=partitions, arguments=arguments
        )
    finally:
        await other.close()


async def test_a_client_may_not_ask_for_one(tmp_path: Path) -> None:
    """Before, every caller of a node without a cluster's key was taken for a node."""
    node = await Node(tmp_path).start()
    await node.topic("jobs")
    with pytest.raises(Unauthenticated):
        await node.call(
            "share", topic="jobs", of="peek_share", partitions=[0], arguments={"limit": 1}
        )
    await node.stop()


async def test_a_share_is_done_for_the_partitions_that_are_named(node: Node) -> None:
    await node.topic("jobs", partitions=2)
    found = await share(node, "log_status_share", [1, 1])
    assert [row["partition"] for row in found["partitions"]] == [1]


@pytest.mark.parametrize(
    ("of", "partitions", "arguments"),
    [
        ("unheard_of_share", [0], {}),
        ("peek_share", [0], {}),
        ("peek_share", [0], {"limit": 0}),
        ("peek_share", [0], {"limit": "3"}),
        ("peek_share", [2], {"limit": 3}),
        ("log_find_share", [], {"time_ms": 1}),
        ("log_extent_share", [0], {"extents": [{}]}),
        ("dlq_list_share", [0], {"start": 0, "after": -1, "limit": 1}),
        ("move_share", [0, 1], {"message_id": "x", "reason": ""}),
    ],
)
async def test_one_of_the_wrong_shape_is_refused(
    node: Node, of: str, partitions: list[int], arguments: dict[str, Any]
) -> None:
    await node.topic("jobs", partitions=2)
    with pytest.raises(InvalidArgument):
        await share(node, of, partitions, **arguments)


async def test_deltas_have_no_part_in_what_is_about_queues(node: Node) -> None:
    await node.topic("jobs", kind="delta", dimensions=2)
    with pytest.raises(InvalidArgument, match="delta topic"):
        await share(node, "purge_share", [0])
