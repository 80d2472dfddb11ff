"""`penstock serve`: one node with its native listener and its gateway, until it is told to stop.

The process keeps its memory small. An attack, or an honest burst, makes a node hold a lot for a
moment. Python frees it, and glibc keeps most of that for itself: small objects that live on lie
between the freed ones, and only the end of its heap goes back to the system. So buffers of a
megabyte and more get memory of their own, and what is free inside the heap is given back now and
then. Other C libraries have none of these functions, and need none.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import ssl
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.client.network.connection import Connection, PeerConnection
from penstock.client.network.endpoints import connect_peer
from penstock.cluster.membership import NodeInfo
from penstock.config import Config
from penstock.errors import FailedPrecondition, StorageFailed
from penstock.node.cluster.transport import Connect
from penstock.node.door.budget import Budget
from penstock.node.door.tls import client_context, server_context
from penstock.node.engine import Engine
from penstock.node.lifecycle import join_cluster, running_engine
from penstock.node.observe.logs import get_logger
from penstock.node.session.session import Session, listen, port_of
from penstock.node.storage.room import raise_open_files_max
from penstock.server.embedded import connect_within, open_writer

if TYPE_CHECKING:
    from penstock.server.gateway import Gateway

log = get_logger(__name__)


async def serve(config: Config, on_ready: Callable[[dict[str, int]], None]) -> None:
    """Run until SIGTERM or SIGINT; raises `StorageFailed` if the disk gave up. SIGHUP, which others
    use to have files read again, changes nothing. `on_ready` is told the ports."""
    settle_memory()
    log.info("open files", limit=raise_open_files_max())
    stop = stop_signal()
    ignore_hangup()
    async with running_engine(
        config, connect=connect_to_peers(config), open_writer=open_writer
    ) as engine:
        engine.spawn(give_memory_back(), name="memory", vital=True)
        tls = server_context(config.tls) if config.tls_enabled else None
        async with AsyncExitStack() as stack:
            ports = await _listen(engine, config, tls=tls, stack=stack)
            if config.cluster.enabled:
                joining = join_cluster(engine, port=ports["native"])
                await unless(_until_stopped(engine, stop), joining)
            if not stop.is_set():
                _announce(config, ports)
                on_ready(ports)
            await _until_stopped(engine, stop)
            log.info("stopping")
            if config.cluster.enabled:
                await engine.nodes.leave(config.drain_s if engine.fatal_error is None else 0.0)
    if engine.fatal_error is not None:
        raise StorageFailed(f"storage failed: {engine.fatal_error}")


def stop_signal() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def ignore_hangup() -> None:
    """Go on when a terminal closes or somebody asks for a reload, which would otherwise end us."""
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGHUP, log.info, "SIGHUP is ignored; to read files again, restart the node"
    )


def connect_to_peers(config: Config) -> Connect:
    tls = client_context(config.tls) if config.tls_enabled else None

    async def connect(info: NodeInfo) -> PeerConnection:
        return await connect_peer(
            info.host, info.native_port, cluster_key=config.cluster.key or None, tls=tls,
            node=config.node,
        )  # fmt: skip

    return connect


async def unless(stopped: Coroutine[Any, Any, object], work: Coroutine[Any, Any, None]) -> bool:
    """Do something that may take long, but give it up when `stopped` ends; whether it was done."""
    tasks = [asyncio.ensure_future(each) for each in (work, stopped)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # it is told above, or given up


async def _listen(
    engine: Engine, config: Config, *, tls: ssl.SSLContext | None, stack: AsyncExitStack
) -> dict[str, int]:
    ports: dict[str, int] = {}
    if "native" in config.ports:
        server = await listen(engine, host=config.host, port=config.ports["native"], tls=tls)
        stack.callback(server.close)
        ports["native"] = port_of(server)
    if "grpc" in config.ports or "http" in config.ports:
        gateway_type = load_gateway()

        # What the gateway's callers make the node hold is counted where it comes in.
        counted = Budget(sys.maxsize)

        async def connect(api_key: str | None) -> Connection:
            session = Session(engine, counted)
            return await connect_within(session, api_key, client="penstock-gateway")

        gateway = gateway_type(
            connect, config,
            metrics_text=engine.metrics.text, budget=engine.budget, doorway=engine.doorway,
        )  # fmt: skip
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        ports |= gateway.ports
    return ports


def load_gateway() -> type[Gateway]:
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
    log.info("ready", host=config.host, **ports)
    line = msgspec.json.encode({"host": config.host, **ports, "pid": os.getpid()}) + b"\n"
    if config.ready_file is not None:
        part = Path(f"{config.ready_file}.part")
        part.write_bytes(line)
        part.replace(config.ready_file)
    if config.ready_fd is not None:
        os.write(config.ready_fd, line)
        os.close(config.ready_fd)


GC_THRESHOLD: Final = 20_000  # new objects between two looks at them
# Of glibc's malloc.h. Its thresholds stay as they are: each frees memory at once that the next
# group of requests takes again, and to get it zeroed cost a tenth of an enqueue.
M_ARENA_MAX: Final = -8
ARENAS: Final = 2  # each keeps free memory of its own
LOOK_S: Final = 0.5
FREED_BYTES: Final = 16 << 20  # since it was given back last, from which it is worth the time
_library: Final = ctypes.CDLL(None)


class _MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` tells, of which `fordblks` is the bytes that are free."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def settle_memory() -> None:
    """Let the collector forget what was imported, and look at new objects less often: hardly any
    of a message's are part of a cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    mallopt = getattr(_library, "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


async def give_memory_back() -> None:
    """Return what has become free in the heap to the system, until cancelled. Memory that was given
    back still counts as free, so it is the growth that tells. It is done in a thread, which holds
    neither the loop nor Python's lock meanwhile."""
    info, trim = getattr(_library, "mallinfo2", None), getattr(_library, "malloc_trim", None)
    if info is None or trim is None:
        return
    info.restype = _MallocInfo
    least = info().fordblks
    while True:
        await asyncio.sleep(LOOK_S)
        free = info().fordblks
        if free - least > FREED_BYTES:
            await asyncio.to_thread(trim, 0)
            least = info().fordblks
        else:
            least = min(least, free)
