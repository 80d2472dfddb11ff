"""Topics and replica sets of a cluster are changed from any of its nodes."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster.asking import SOON_S, Asking

from penstock.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from penstock.testing.etcd import etcd_process
from penstock.testing.process import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
NODES = ("n1", "n2", "n3")


async def test_a_topic_is_known_and_served_everywhere_once_it_is_made(cluster: Asking) -> None:
    made = await cluster.call("topic_create", at="n2", config={"name": "plain", "partitions": 4})
    assert made["replication_factor"] == 3
    for node in NODES:
        assert await cluster.call("topic_get", at=node, topic="plain") == made
        found = await cluster.call("routes", at=node, topic="plain")
        assert set(found["coordinators"]) <= set(NODES)
        assert [n["id"] for n in found["nodes"]] == list(NODES)
    again = await cluster.call("topic_create", config={"name": "plain"}, exists_ok=True)
    assert again == made


async def test_a_page_of_the_status_tells_of_the_partitions_behind_its_start(
    cluster: Asking,
) -> None:
    """Before, `after` was refused, and every node was asked about all of its partitions."""
    made = await cluster.call("topic_create", config={"name": "paged", "partitions": 5})
    behind = f"{made['id']:010} 0001"
    for node in NODES:
        page = await cluster.call("cluster_status", at=node, after=behind)
        mine = [part for part in page["partitions"] if part["topic"] == "paged"]
        assert [part["partition"] for part in mine] == [2, 3, 4]
        assert {part["state"] for part in mine} == {"serving"}
        assert all(len(part["followers"]) == 2 for part in mine)
        assert all(one["reachable"] for one in page["nodes"]) and page["next"] is None
    connection = await cluster.connection("n1")
    bounds = {"first": [made["id"], 1], "last": [made["id"], 2]}
    told = await connection.call("replica_status", **bounds)
    assert {part["topic"] for part in told["partitions"]} <= {made["id"]}
    assert {part["partition"] for part in told["partitions"]} <= {1, 2}


@pytest.mark.parametrize("replicas", [5, 4, 0])
async def test_replicas_need_as_many_nodes(cluster: Asking, replicas: int) -> None:
    with pytest.raises((FailedPrecondition, InvalidArgument)) as refusal:
        await cluster.create("toomany", replication_factor=replicas)
    assert refusal.value.details["field"] == "replication_factor"
    with pytest.raises(NotFound):
        await cluster.call("topic_get", topic="toomany")


async def test_a_change_reaches_every_node(cluster: Asking) -> None:
    await cluster.create("changed")
    await cluster.call("topic_update", at="n3", topic="changed", changes={"max_retries": 9})
    for node in NODES:
        assert (await cluster.call("topic_get", at=node, topic="changed"))["max_retries"] == 9


async def test_a_topic_grows(cluster: Asking) -> None:
    await cluster.create("grown", partitions=1)
    await cluster.call("topic_update", at="n2", topic="grown", changes={"partitions": 3})
    for index, node in enumerate(NODES):
        await cluster.put("grown", b"x", at=node, partition=index)
    with pytest.raises(InvalidArgument):
        await cluster.call("topic_update", topic="grown", changes={"partitions": 2})


async def removed(folder: Path) -> bool:
    return not folder.exists()


async def test_a_deleted_topic_leaves_nothing_behind(cluster: Asking) -> None:
    await cluster.create("deleted", partitions=2)
    topic_id = (await cluster.call("topic_get", topic="deleted"))["id"]
    await cluster.destroy("topic_delete", "deleted", at="n3")
    for node in NODES:
        with pytest.raises(NotFound):
            await cluster.call("topic_get", at=node, topic="deleted")
        folder = cluster.processes.nodes[node].data / "topics" / f"{topic_id:08x}"
        await cluster.until(partial(removed, folder))  # the files go after the name
    status = await cluster.call("cluster_status")
    assert "deleted" not in {part["topic"] for part in status["partitions"]}


async def test_a_replica_is_taken_out(cluster: Asking) -> None:
    await cluster.create("smaller")
    _, removed = await cluster.followers("smaller")
    left = await cluster.call("cluster_remove_replica", topic="smaller", partition=0, node=removed)
    assert len(left["voters"]) == 2 and removed not in left["voters"]
    await cluster.until(lambda: _moved(cluster, "smaller", left["voters"]))
    await cluster.put("smaller", b"two are enough", at=removed)
    folder = _folder(cluster, removed, await cluster.call("topic_get", topic="smaller"))
    await cluster.until(lambda: _gone(folder))


async def test_a_second_node_of_a_name_does_not_start(cluster: Asking, tmp_path: Path) -> None:
    first = cluster.processes.nodes["n1"]
    second = ServerProcess(
        data=tmp_path / "n1",
        options=first.options,
        ports={"native": 0, "grpc": -1, "http": -1},
        arguments=first.arguments,
    )
    with pytest.raises(Unavailable, match="another node is registered as n1"):
        await second.start()
    assert await cluster.put_somehow("plain", b"x") < SOON_S


async def test_a_folder_is_opened_by_its_own_cluster_only(cluster: Asking, tmp_path: Path) -> None:
    stopped = cluster.processes.nodes["n3"]
    await cluster.processes.stop("n3")
    off = {"native": 0, "grpc": -1, "http": -1}
    alone = ServerProcess(data=stopped.data, ports=dict(off))
    with pytest.raises(Unavailable, match="belongs to a node of cluster"):
        await alone.start()
    with etcd_process(tmp_path) as other:
        arguments = ["--cluster", f"etcd://{other.endpoint}", "--node-id", "n3"]
        lost = ServerProcess(data=stopped.data, ports=dict(off), arguments=arguments)
        with pytest.raises(Unavailable, match="is of another cluster"):
            await lost.start()
    await cluster.restore()


async def test_what_was_deleted_while_a_node_was_away_is_removed(cluster: Asking) -> None:
    await cluster.create("bygone")
    folder = _folder(cluster, "n3", await cluster.call("topic_get", topic="bygone"))
    assert folder.exists()
    await cluster.processes.kill("n3")
    await cluster.destroy("topic_delete", "bygone", at="n1")
    await cluster.processes.start("n3")
    assert not folder.parent.exists()
    await cluster.restore()


async def _moved(cluster: Asking, topic: str, voters: list[str]) -> bool:
    found = await cluster.partition(topic)
    return bool(found["voters"] == voters and not found["joint"] and not found["target"])


def _folder(cluster: Asking, node: str, config: dict[str, Any]) -> Path:
    return cluster.processes.nodes[node].data / "topics" / f"{config['id']:08x}" / "0000"


async def _gone(folder: Path) -> bool:
    return not await asyncio.to_thread(folder.exists)
