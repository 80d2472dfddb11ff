"""A node in this process behind its gateway, for the tests of both listeners."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx

from penstock.config import Config
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.embedded import EmbeddedNode, open_embedded
from penstock.server.gateway import Gateway


class Behind(NamedTuple):
    node: EmbeddedNode
    http: httpx.AsyncClient
    stub: Any  # of gRPC, with its default limits


@asynccontextmanager
async def behind_gateway(folder: Path) -> AsyncIterator[Behind]:
    config = Config(data=folder, native_port=-1, grpc_port=0, http_port=0, drain_s=1.0)
    async with AsyncExitStack() as stack:
        node = await open_embedded(folder, config=config)
        stack.push_async_callback(node.close)
        gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}", timeout=60)
        await stack.enter_async_context(http)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}")
        await stack.enter_async_context(channel)
        yield Behind(node, http, PenstockStub(channel))
