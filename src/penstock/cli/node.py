"""`penstock serve` and `penstock gateway`: processes that run until they are told to stop; and
`penstock key`: API keys, on a node or on a folder at rest."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Force, Invocation, command, group, pairs_of
from penstock.console import Columns, console, listing, to_json, when
from penstock.errors import InvalidArgument, Unauthenticated

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection
    from penstock.config import Config

app = group()
keys = group()
OF_A_GATEWAY: Final = (
    "host", "grpc_port", "http_port", "tls_cert", "tls_key", "insecure", "config", "log_level",
    "options",
)  # fmt: skip
KEY: Final[Columns] = {
    "id": "id", "name": "name", "created": lambda key: when(key["created_ms"]),
    "last used": lambda key: when(key["last_used_ms"]),
    "revoked": lambda key: when(key["revoked_ms"]),
}  # fmt: skip


def _of(type: Any, help: str, *names: str, **more: Any) -> Any:
    return Annotated[type | None, typer.Option(*names, help=help, **more)]


ConfigFile = _of(Path, "TOML file.", "--config", "-c")
LogLevel = _of(str, "debug, info, warning or error.")
Options = _of(list[str], "Any option of the TOML file.", "--set", metavar="PATH=VALUE")
# The options of `serve`, and where the configuration has what they say.
SETTINGS: Final = {
    "data": ("data", _of(Path, "Data folder. [default: penstock-data]")),
    "host": ("host", _of(str, "Address to listen on. [default: 127.0.0.1]")),
    "port": ("native_port", _of(int, "Native protocol; 0 any. [default: 7440]")),
    "grpc_port": ("grpc_port", _of(int, "gRPC; 0 any, -1 off. [default: 7441]")),
    "http_port": ("http_port", _of(int, "HTTP; 0 any, -1 off. [default: 7442]")),
    "tls_cert": ("tls.cert", _of(Path, "Certificate chain, PEM.")),
    "tls_key": ("tls.key", _of(Path, "Private key, PEM.")),
    "insecure": ("insecure", _of(bool, "Plain TCP where others can connect.", "--insecure")),
    "config": ("", ConfigFile),
    "log_level": ("log_level", LogLevel),
    "ready_file": ("ready_file", _of(Path, "Gets the ports as JSON once it serves.")),
    "accept_rot": (
        "accept_rot", _of(bool, "Start on damaged data by cutting it off.", "--accept-rot")
    ),
    "accept_missing": (
        "accept_missing", _of(bool, "Start without files that are missing.", "--accept-missing")
    ),
    "cluster": ("cluster.etcd", _of(str, "Join one.", metavar="etcd://HOST:PORT[,HOST:PORT]")),
    "node_id": ("node", _of(str, "This node's name in a cluster.")),
    "zone": ("cluster.zone", _of(str, "Replicas go to different zones.")),
    "advertise": (
        "cluster.advertise", _of(str, "Where other nodes find this one.", metavar="HOST[:PORT]")
    ),
    "options": ("", Options),
}  # fmt: skip


def _loaded(given: dict[str, Any], **fixed: Any) -> Config:
    from penstock.config import Config

    file, options = given.pop("config"), given.pop("options")
    overrides = {SETTINGS[name][0]: value for name, value in given.items()} | fixed
    if etcd := overrides.get("cluster.etcd"):
        overrides["cluster.etcd"] = etcd.removeprefix("etcd://")
    return Config.load(file, overrides=overrides | pairs_of(options, option="set"))


@command(app, "serve", connects=False, options={n: kind for n, (_, kind) in SETTINGS.items()})
def serve(cli: Invocation, **given: Any) -> Answer | None:
    """Run a node until SIGTERM or Ctrl-C. Logs go to stderr, the addresses to stdout."""
    run_loop(_serve(cli, _loaded(given)))
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


@command(app, "gateway", options={name: SETTINGS[name][1] for name in OF_A_GATEWAY})
def gateway(cli: Invocation, **given: Any) -> Answer | None:
    """Translate gRPC and HTTP for the node at --url, until SIGTERM or Ctrl-C."""
    if "://" not in cli.url:
        raise InvalidArgument("a gateway needs a node's url, not a folder", field="url")
    run_loop(_translate(cli, _loaded(given, native_port=-1)))
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


@command(keys, "create", options={"config": ConfigFile, "options": Options})
async def create(
    cli: Invocation,
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Write it into the cluster's etcd itself: its first key.",
            metavar="etcd://HOST:PORT[,HOST:PORT]",
        ),
    ] = None,
    **given: Any,
) -> Answer:
    """Create a key. Its secret is shown this once."""
    if cluster is not None:
        settings = {"cluster.etcd": cluster.removeprefix("etcd://")}
        settings |= pairs_of(given["options"], option="set")
        made = await _create_in_etcd(name, given["config"], settings)
    else:
        made = await cli.call("key_create", name=name)
    return Answer(made, f"{made['key']}\nKeep it: it is not shown again.")


async def _create_in_etcd(name: str, file: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Make a key without asking a node, which would want one. Who can write to etcd may."""
    from penstock.cluster.keys import KeyRing
    from penstock.config import Config
    from penstock.node.lifecycle import cluster_store

    loaded = Config.load(file, overrides={"node": "cli", **settings})
    store = cluster_store(loaded.cluster)
    try:
        made = await KeyRing(store).create(name)
    finally:
        await store.close()
    return {**made.record.public(), "key": made.text}


@command(keys, "list")
async def list_keys(cli: Invocation) -> Answer:
    """List keys: created, last used, revoked."""
    found = await cli.listed("key_list", "keys")
    return Answer(found, lambda found: listing(found["keys"], KEY))


@command(keys, "revoke")
async def revoke(
    cli: Invocation, id: Annotated[str, typer.Argument(help="The key's id.")], force: Force = False
) -> Answer:
    """Revoke a key; who uses it is refused from then on."""
    await cli.destroy("key_revoke", id=id, question=f"Revoke key {id}?", force=force)
    return Answer({"revoked": id}, f"key {id} is revoked")
