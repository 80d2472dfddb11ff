"""What `cluster status` says of a node that was killed, while its lease runs."""

from __future__ import annotations

from pathlib import Path

from tests.integration.cluster.asking import Asking
from tests.integration.cluster.commands import penstock

from penstock.testing.cluster import cluster_processes


async def test_a_killed_node_is_shown_as_unreachable_before_its_lease_ends(tmp_path: Path) -> None:
    """Before, it was shown as up while the lease ran, with none of its partitions served."""
    options = {"cluster.lease_s": 600}
    async with cluster_processes(tmp_path, nodes=2, options=options) as processes:
        cluster = Asking(processes)
        try:
            config = {"name": "jobs", "partitions": 2, "replication_factor": 1}
            await cluster.call("topic_create", config=config)
            await processes.kill("n2")

            async def away() -> bool:
                [one] = [
                    n for n in (await cluster.call("cluster_status"))["nodes"] if n["id"] == "n2"
                ]
                return bool(one["alive"] and not one["reachable"])

            await cluster.until(away)
            shown = await penstock("cluster", "status", url=processes.url_of("n1"))
            assert shown.code == 1 and "UNREACHABLE" in shown.out and "1 of 2 nodes" in shown.out
            assert "n2 is registered, and no other node reaches it" in shown.out
            told = await penstock("cluster", "status", "--json", url=processes.url_of("n1"))
            assert [node["reachable"] for node in told.document["nodes"]] == [True, False]
            waited = await penstock(
                "cluster", "wait", "--timeout", "0", "--json", url=processes.url_of("n1")
            )
            assert any("no other node reaches it" in line for line in waited.document["missing"])
        finally:
            await cluster.close()
