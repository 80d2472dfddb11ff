"""`penstock serve`: one node with its native listener and its gateway, until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import ssl
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.client.connection import Connection
from penstock.client.follow import PeerConnection, connect_peer
from penstock.client.memory import memory_pair
from penstock.cluster.membership import NodeInfo
from penstock.config import Config
from penstock.errors import FailedPrecondition, StorageFailed
from penstock.node.engine import Engine
from penstock.node.lifecycle import running_engine
from penstock.node.listener import listen, port_of
from penstock.node.logs import get_logger
from penstock.node.replicas.joining import join_cluster
from penstock.node.replicas.peers import Connect
from penstock.node.session import Session
from penstock.node.tls import client_context, server_context
from penstock.server.sink_writer import open_writer

if TYPE_CHECKING:
    from penstock.server.gateway import Gateway

GC_THRESHOLD: Final = 20_000  # new objects between two looks at them
log = get_logger(__name__)


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT; raises `StorageFailed` if the disk gave up."""
    _settle_memory()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_engine(
        config, connect=connect_to_peers(config), open_writer=open_writer
    ) as engine:
        tls = server_context(config.tls) if config.tls_enabled else None
        async with AsyncExitStack() as stack:
            ports = await _listen(engine, config, tls, stack)
            if engine.nodes is not None:
                await _unless_stopped(join_cluster(engine, port=ports["native"]), engine, stop)
            if not stop.is_set():
                _announce(config, ports)
            await _until_stopped(engine, stop)
            log.info("stopping")
            if engine.nodes is not None:
                await engine.nodes.leave(config.drain_s if engine.fatal_error is None else 0.0)
    if engine.fatal_error is not None:
        raise StorageFailed(f"storage failed: {engine.fatal_error}")


def connect_to_peers(config: Config) -> Connect:
    """How a node reaches the others of its cluster."""
    tls = client_context(config.tls) if config.tls_enabled else None

    async def connect(info: NodeInfo) -> PeerConnection:
        return await connect_peer(
            info.host, info.native_port, api_key=config.cluster.key or None, tls=tls,
            node=config.node,
        )  # fmt: skip

    return connect


async def _unless_stopped(
    work: Coroutine[Any, Any, None], engine: Engine, stop: asyncio.Event
) -> None:
    """Do something that may take long, but give it up when the node is told to stop."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(_until_stopped(engine, stop))
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        stopped.cancel()


def _settle_memory() -> None:
    """Let the collector forget what was imported, and look at new objects less often: hardly any
    of a message's are part of a cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


async def _listen(
    engine: Engine, config: Config, tls: ssl.SSLContext | None, stack: AsyncExitStack
) -> dict[str, int]:
    ports: dict[str, int] = {}
    if "native" in config.ports:
        server = await listen(engine, host=config.host, port=config.ports["native"], tls=tls)
        stack.callback(server.close)
        ports["native"] = port_of(server)
    if "grpc" in config.ports or "http" in config.ports:
        gateway_type = load_gateway()

        async def connect(api_key: str | None) -> Connection:
            connection = Connection(api_key=api_key, client="penstock-gateway")
            memory_pair(connection, Session(engine))
            await connection.greeted()
            return connection

        gateway = gateway_type(connect, config, metrics_text=engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        ports |= gateway.ports
    return ports


def load_gateway() -> type[Gateway]:
    """The gateway, whose packages come with an extra."""
    try:
        from penstock.server.gateway import Gateway
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"gRPC and HTTP need the extra penstock[gateway] ({error.name} is missing); "
            "without it, turn them off: --grpc-port -1 --http-port -1"
        ) from error
    return Gateway


async def _until_stopped(engine: Engine, stop: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, engine.fatal)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _announce(config: Config, ports: dict[str, int]) -> None:
    """Say that the node serves: in the log, and to whoever waits for it."""
    log.info("ready", host=config.host, **ports)
    line = msgspec.json.encode({"host": config.host, **ports, "pid": os.getpid()}) + b"\n"
    if config.ready_file is not None:
        part = Path(f"{config.ready_file}.part")
        part.write_bytes(line)
        part.replace(config.ready_file)
    if config.ready_fd is not None:
        os.write(config.ready_fd, line)
        os.close(config.ready_fd)
