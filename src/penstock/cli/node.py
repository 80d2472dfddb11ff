"""`penstock serve` and `penstock gateway`: processes that run until they are told to stop."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command import Answer, Invocation, command, group, pairs_of
from penstock.console import console, to_json
from penstock.errors import InvalidArgument, Unauthenticated

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection
    from penstock.config import Config


app = group()

Host = Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")]
GrpcPort = Annotated[int | None, typer.Option(help="gRPC; 0 any, -1 off. [default: 7441]")]
HttpPort = Annotated[int | None, typer.Option(help="HTTP; 0 any, -1 off. [default: 7442]")]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")]
TlsKey = Annotated[Path | None, typer.Option(help="Private key, PEM.")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Plain TCP where others can connect.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
ReadyFile = Annotated[Path | None, typer.Option(help="Gets the ports as JSON once it serves.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any option of the TOML file.", metavar="PATH=VALUE"),
]


@command(app, "serve", connects=False)
def serve(
    cli: Invocation,
    data: Annotated[Path | None, typer.Option(help="Data folder. [default: penstock-data]")] = None,
    host: Host = None,
    port: Annotated[
        int | None, typer.Option(help="Native protocol; 0 any. [default: 7440]")
    ] = None,
    grpc_port: GrpcPort = None,
    http_port: HttpPort = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = None,
    config: ConfigFile = None,
    log_level: LogLevel = None,
    ready_file: ReadyFile = None,
    accept_rot: Annotated[
        bool | None, typer.Option("--accept-rot", help="Start on damaged data by cutting it off.")
    ] = None,
    accept_missing: Annotated[
        bool | None, typer.Option("--accept-missing", help="Start without files that are missing.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Join one.", metavar="etcd://HOST:PORT[,HOST:PORT]")
    ] = None,
    node_id: Annotated[str | None, typer.Option(help="This node's name in a cluster.")] = None,
    zone: Annotated[str | None, typer.Option(help="Replicas go to different zones.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Where other nodes find this one.", metavar="HOST[:PORT]")
    ] = None,
    options: Options = None,
) -> Answer | None:
    """Run a node until SIGTERM or Ctrl-C. Logs go to stderr, the addresses to stdout."""
    from penstock.config import Config

    overrides: dict[str, Any] = {
        "data": data, "host": host, "native_port": port, "grpc_port": grpc_port,
        "http_port": http_port, "tls.cert": tls_cert, "tls.key": tls_key, "insecure": insecure,
        "log_level": log_level, "ready_file": ready_file, "accept_rot": accept_rot,
        "accept_missing": accept_missing,
        "cluster.etcd": cluster.removeprefix("etcd://") if cluster else None,
        "node": node_id, "cluster.zone": zone, "cluster.advertise": advertise,
        **pairs_of(options, option="set"),
    }  # fmt: skip
    loaded = Config.load(config, overrides=overrides)
    run_loop(_serve(cli, loaded))
    return None


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    import uvloop

    uvloop.run(main)


async def _serve(cli: Invocation, config: Config) -> None:
    from penstock.node.observe.logs import configure
    from penstock.server.serve import serve as serve_node

    def on_ready(ports: dict[str, int]) -> None:
        if config.ready_fd is None:  # else somebody else waits for the addresses
            announce(addresses_of(config, ports), as_json=cli.json)

    configure(config.log_level)
    await serve_node(config, on_ready)


def addresses_of(config: Config, ports: dict[str, int]) -> dict[str, str]:
    host = f"[{config.host}]" if ":" in config.host else config.host
    schemes = {"native": "penstock", "grpc": "grpc", "http": "http"}
    suffix = "s" if config.tls_enabled else ""
    return {
        name: f"{scheme}{suffix}://{host}:{ports[name]}"
        for name, scheme in schemes.items()
        if ports.get(name) is not None
    }


def announce(addresses: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print(to_json(addresses, indent=None), flush=True)
        return
    for name, address in addresses.items():
        console().print(f"{name:<7} {address}", markup=False)


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

    if "://" not in cli.url:
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
    from penstock.client.network.endpoints import open_connection
    from penstock.node.observe.logs import configure
    from penstock.server.serve import ignore_hangup, load_gateway, stop_signal

    async def connect(api_key: str | None) -> Connection:
        # The node may trust its loopback; whoever comes from outside still needs a key.
        if api_key is None and config.keys_required:
            raise Unauthenticated("an API key is required")
        return await open_connection(cli.url, api_key=api_key or cli.api_key, tls=cli.ca)

    configure(config.log_level)
    stop = stop_signal()
    ignore_hangup()
    running = load_gateway()(connect, config)
    await running.start()
    try:
        announce(addresses_of(config, running.ports), as_json=cli.json)
        await stop.wait()
    finally:
        await running.stop()
