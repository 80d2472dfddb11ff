"""What another node may ask for as our share of a call."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.harness import Node

from penstock.errors import InvalidArgument


async def share(node: Node, of: str, partitions: list[int], **arguments: Any) -> dict[str, Any]:
    return await node.call("share", topic="jobs", of=of, partitions=partitions, arguments=arguments)


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
