"""HTTP and gRPC at a cluster: a node that dies costs its callers a retry, and no message."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking

from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.testing.cluster import cluster_processes
from penstock.testing.process import clean_environment

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARTITIONS = 6
MESSAGES = 60  # before the kill, and again after it, by each caller
RETRY_S_MAX = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("gateways")
    options = {"cluster.lease_s": 2}
    async with cluster_processes(folder, nodes=3, gateway=True, options=options) as processes:
        asking = Asking(processes)
        try:
            yield asking
        finally:
            await asking.close()


@asynccontextmanager
async def gateway(*nodes: str, cluster: Asking) -> AsyncIterator[str]:
    """`penstock gateway` before some nodes; its address for HTTP."""
    url = "penstock://" + ",".join(
        cluster.processes.url_of(node).removeprefix("penstock://") for node in nodes
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", "--url", url, "gateway", "--json",
        "--grpc-port", "-1", "--http-port", "0", stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, env=clean_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())["http"]
    finally:
        process.kill()
        await process.wait()


class Caller:
    """Enqueues over HTTP, each message until it is taken, and remembers which were."""

    def __init__(self, http: httpx.AsyncClient, name: str) -> None:
        self._http, self.name = http, name
        self.taken: list[str] = []
        self.refusals: set[str] = set()

    async def put(self, count: int) -> None:
        for _ in range(count):
            number = len(self.taken)
            fields = {"topic": "calls", "payload": f"{self.name}{number}", "key": f"{number}"}
            fields |= {"producer_id": self.name, "epoch": 1, "seq": number}
            async with asyncio.timeout(RETRY_S_MAX):
                while not await self._taken(fields):
                    await asyncio.sleep(0.05)
            self.taken.append(fields["payload"])

    async def _taken(self, fields: dict[str, object]) -> bool:
        answer = await self._http.post("/v1/enqueue", json=fields)
        if answer.status_code == 200:
            return True
        assert answer.status_code in (429, 503), answer.text
        self.refusals.add(answer.json()["code"])
        return False


async def consume(target: str, wanted: int, seen: list[str]) -> None:
    """Pop and acknowledge over gRPC until `wanted` messages were seen; a stream that ends is
    opened anew."""
    async with grpc.aio.insecure_channel(target) as channel:
        while len(set(seen)) < wanted:
            call = PenstockStub(channel).PopStream()
            opening = pb.PopOpen(topic="calls", credits=10, visibility_ms=5000)
            try:
                await call.write(pb.PopStreamRequest(open=opening))
                async for response in call:
                    seen += [json.loads(item.payload) for item in response.items]
                    tokens = [item.lease_token for item in response.items]
                    ack = pb.AckBatchRequest(topic="calls", lease_tokens=tokens)
                    await call.write(pb.PopStreamRequest(ack=ack))
                    if len(set(seen)) >= wanted:
                        break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise


async def test_callers_of_any_gateway_go_on_when_a_coordinator_is_killed(cluster: Asking) -> None:
    await cluster.create("calls", partitions=PARTITIONS)
    through, killed, other = "n1", "n2", "n3"
    assert killed in await cluster.processes.coordinators("calls")
    node = cluster.processes.nodes[through]
    seen: list[str] = []
    async with (
        gateway(killed, other, cluster=cluster) as before,
        httpx.AsyncClient(base_url=node.http, timeout=20) as inside,
        httpx.AsyncClient(base_url=before, timeout=20) as outside,
        asyncio.TaskGroup() as tasks,
    ):
        callers = [Caller(inside, "a"), Caller(outside, "b")]
        consuming = tasks.create_task(consume(node.grpc, 4 * MESSAGES, seen))
        await asyncio.gather(*(caller.put(MESSAGES) for caller in callers))
        await cluster.processes.kill(killed)
        await asyncio.gather(*(caller.put(MESSAGES) for caller in callers))
        async with asyncio.timeout(60):
            await asyncio.wait([consuming])
    assert set(seen) == {payload for caller in callers for payload in caller.taken}
    held = [p for i in range(PARTITIONS) for p in await cluster.payloads("calls", partition=i)]
    assert len(held) == len(set(held)) == 4 * MESSAGES
