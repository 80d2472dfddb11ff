"""Nodes of a cluster in the process of the tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.config import Config
from penstock.node.door.tls import server_context
from penstock.node.engine import Engine
from penstock.node.lifecycle import join_cluster, running_engine
from penstock.node.session.session import listen
from penstock.server.serve import connect_to_peers


@asynccontextmanager
async def running_node(config: Config) -> AsyncIterator[Engine]:
    """A node of a cluster in this process."""
    async with running_engine(config, connect=connect_to_peers(config)) as engine:
        assert config.native_port is not None
        tls = server_context(config.tls) if config.tls_enabled else None
        server = await listen(engine, host=config.host, port=config.native_port, tls=tls)
        try:
            await join_cluster(engine, port=config.native_port)
            yield engine
            await engine.nodes.leave(1.0)
        finally:
            server.close()
