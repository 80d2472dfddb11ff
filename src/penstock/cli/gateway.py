"""`penstock gateway`: gRPC and HTTP in front of a node elsewhere."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from penstock.cli.command import Answer, Invocation, command, folder_of, group
from penstock.cli.node import (
    ConfigFile,
    GrpcPort,
    Host,
    HttpPort,
    Insecure,
    LogLevel,
    Options,
    TlsCert,
    TlsKey,
    addresses_of,
    announce,
    run_loop,
)
from penstock.cli.pairs import pairs_of
from penstock.errors import InvalidArgument, Unauthenticated

if TYPE_CHECKING:
    from penstock.client.connection import Connection
    from penstock.config import Config

app = group("Gateways.")


@command(app, "gateway")
def gateway(
    cli: Invocation,
    host: Host = None,
    grpc_port: GrpcPort = None,
    http_port: HttpPort = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = None,
    config: ConfigFile = None,
    log_level: LogLevel = None,
    options: Options = None,
) -> Answer | None:
    """Translate gRPC and HTTP for the node at --url, until SIGTERM or Ctrl-C."""
    from penstock.config import Config

    if folder_of(cli.url) is not None:
        raise InvalidArgument("a gateway needs a node's url, not a folder", field="url")
    loaded = Config.load(
        config,
        overrides={
            "host": host, "native_port": -1, "grpc_port": grpc_port, "http_port": http_port,
            "tls.cert": tls_cert, "tls.key": tls_key, "insecure": insecure,
            "log_level": log_level, **pairs_of(options, option="set"),
        },
    )  # fmt: skip
    run_loop(_translate(cli, loaded))
    return None


async def _translate(cli: Invocation, config: Config) -> None:
    from penstock.client.connection import open_connection
    from penstock.node.logs import configure
    from penstock.server.serve import load_gateway

    async def connect(api_key: str | None) -> Connection:
        # The node may trust its loopback; whoever comes from outside still needs a key.
        if api_key is None and config.keys_required:
            raise Unauthenticated("an API key is required")
        return await open_connection(cli.url, api_key=api_key or cli.api_key, tls=cli.ca)

    configure(config.log_level)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = load_gateway()(connect, config)
    await running.start()
    try:
        announce(addresses_of(config, running.ports), as_json=cli.json)
        await stop.wait()
    finally:
        await running.stop()
