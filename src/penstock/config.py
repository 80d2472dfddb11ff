"""What a node can be told, where that is read from, and what is refused.

Sources, each over the one before: defaults, a TOML file, `PENSTOCK_*` variables, the command line.
They are merged and parsed once, at start; a key that no option has is an error, not a guess.
`log.segment_bytes` in the file's table `[log]` is `PENSTOCK_LOG_SEGMENT_BYTES` in the environment.

An interface that others can reach is closed by default: as soon as a listener is not on loopback,
every caller needs an API key, and the listener needs TLS unless `insecure` is said.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from penstock.cluster.etcd import EtcdOptions
from penstock.errors import InvalidArgument
from penstock.log.flush import LogOptions
from penstock.model.ids import PARTITIONS_MAX
from penstock.model.topic import NAME
from penstock.propagation.options import LiveOptions
from penstock.replication.facts import ReplicationOptions
from penstock.wire.frame import PAYLOAD_BYTES_MAX
from penstock.wire.messages import TEXT_LENGTH_MAX
from penstock.wire.messages import Limits as Limits

ENV_PREFIX: Final = "PENSTOCK_"
ENV_FILE: Final = "PENSTOCK_CONFIG"
ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")  # as a browser writes it
HOST: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?|[0-9A-Fa-f:.]+")
# Variables with our prefix that are not a node's options: the client's, Spark's, the crash tests'.
ENV_ELSEWHERE: Final = frozenset(
    {ENV_FILE, "PENSTOCK_API_KEY", "PENSTOCK_CACHE", "PENSTOCK_CRASH", "PENSTOCK_URL"}
)

CLUSTER_KEY_LENGTH_MIN: Final = 32  # characters; 128 bits, if they are random hexadecimal digits
CLUSTER_KEY_VARIETY_MIN: Final = 8  # different ones; so few are in one of 10^7 random keys

LogLevel = Literal["debug", "info", "warning", "error"]


class TlsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files. With a `ca` a client's certificate is checked; `require_client` insists on one."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    require_client: bool = False


class UpkeepOptions(msgspec.Struct, frozen=True, kw_only=True):
    snapshot_s: float = 600.0
    snapshot_bytes: int = 256 << 20  # of log since the last snapshot, if that comes first
    retention_s: float = 60.0  # between looks for segments to drop or rewrite
    scrub_s: float = 24 * 3600.0  # in which every stored byte is read and verified once


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    cors_origins: tuple[str, ...] = ()  # of other sites, whose pages may use the gateway
    hosts: tuple[str, ...] = ()  # further names that requests may be addressed to


class AuditOptions(msgspec.Struct, frozen=True, kw_only=True):
    file_bytes_max: int = 64 << 20  # then a new file is begun
    files_max: int = 10  # kept besides the current one


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the other nodes are found, and what this one is to them."""

    etcd: tuple[str, ...] = ()  # host:port of etcd's members; none: this node is alone
    etcd_ca: Path | None = None  # PEM files, where etcd is reached over TLS
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    name: str = "penstock"  # clusters of other names may share the etcd
    zone: str = ""  # replicas of a partition go to different zones as far as there are some
    advertise: str = ""  # host or host:port that others reach this node at; empty: as it listens
    key: str = ""  # what nodes show each other and nobody else; needed where callers need keys
    policy: Literal["balanced", "oldest"] = "balanced"  # who coordinates a partition
    # A node that has not been heard of for so long is no longer a member.
    lease_s: int = EtcdOptions().lease_ttl_s
    moves_max: int = 4  # partitions that change their replicas at the same time
    serve_s: float = 30.0  # until the partitions of a new topic serve
    generation_s: float = 60.0  # a copy of the data folder that is older than this is found out
    clock_offset_s: float = 2.0  # off from a majority by more: the node coordinates nothing
    accept_rollback: bool = False  # count on a data folder that was restored from an older copy

    @property
    def enabled(self) -> bool:
        return bool(self.etcd)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A node's configuration. Ports: 0 takes any free one, -1 (or None) turns the listener off."""

    data: Path = Path("penstock-data")
    node: str = ""  # the node's name; empty: made up once and kept in the data folder
    host: str = "127.0.0.1"
    native_port: int | None = 7440
    grpc_port: int | None = 7441
    http_port: int | None = 7442
    http: HttpOptions = HttpOptions()
    tls: TlsOptions = TlsOptions()
    insecure: bool = False  # allow plain TCP where others can reach it
    require_key: bool | None = None  # None: as soon as a listener is not on loopback
    limits: Limits = Limits()
    log: LogOptions = LogOptions()
    upkeep: UpkeepOptions = UpkeepOptions()
    audit: AuditOptions = AuditOptions()
    cluster: ClusterOptions = ClusterOptions()
    replication: ReplicationOptions = ReplicationOptions()
    live: LiveOptions = LiveOptions()
    writer_threads: int = 4
    cache_bytes: int = 128 << 20  # of messages that are kept in memory to be delivered
    drain_s: float = 10.0  # for requests under way when the node is told to stop
    log_level: LogLevel = "info"
    accept_rot: bool = False  # start on damaged data by cutting it off there
    accept_missing: bool = False  # start without files that belong to the folder
    ready_file: Path | None = None  # gets the ports as JSON once the node serves
    ready_fd: int | None = None  # the same, to an inherited descriptor

    @property
    def ports(self) -> dict[str, int]:
        ports = {"native": self.native_port, "grpc": self.grpc_port, "http": self.http_port}
        return {name: port for name, port in ports.items() if port is not None and port >= 0}

    @property
    def exposed(self) -> bool:
        return bool(self.ports) and not is_loopback(self.host)

    @property
    def keys_required(self) -> bool:
        return self.exposed if self.require_key is None else self.require_key

    @property
    def cluster_name(self) -> str:
        """The name of the node's cluster; empty where the node is alone."""
        return self.cluster.name if self.cluster.enabled else ""

    @property
    def tls_enabled(self) -> bool:
        return self.tls.cert is not None

    def validate(self) -> Config:
        """Raise `InvalidArgument` that names the first field that will not do, else return self."""
        for path, (low, high) in BOUNDS.items():
            value = attrgetter(path)(self)
            if value is not None and not low <= value <= high:
                raise InvalidArgument(
                    f"{path} is {value}, must be from {low} to {high}", field=path, limit=high
                )
        for field, wrong, message in (*self._rules(), *self._cluster_rules()):
            if wrong:
                raise InvalidArgument(message, field=field)
        least = self.limits.held_bytes_least
        if self.limits.held_bytes_max < least:
            raise InvalidArgument(
                f"limits.held_bytes_max must be {least} or more: what limits.frame_bytes_max and "
                "limits.raw_bytes_max allow has to fit into one caller's part of it",
                field="limits.held_bytes_max",
                limit=least,
            )
        if self.cluster.key:
            _check_cluster_key(self.cluster.key)
        return self

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        seen: dict[int, str] = {}
        for name, port in self.ports.items():
            taken = bool(port) and port in seen
            yield f"{name}_port", taken, f"{name}_port is {port}, as is {seen.get(port)}_port"
            seen[port] = name
        tls, reached = self.tls, f"{self.host} can be reached by others"
        missing = "tls.cert" if tls.cert is None else "tls.key"
        one_alone = (tls.cert is None) != (tls.key is None)
        yield missing, one_alone, "tls.cert and tls.key go together"
        unchecked = tls.require_client and tls.ca is None
        yield "tls.ca", unchecked, "tls.require_client needs tls.ca to check certificates with"
        bare = self.exposed and not self.tls_enabled and not self.insecure
        yield "tls.cert", bare, f"{reached}: give tls.cert and tls.key, or say insecure"
        open_to_all = self.exposed and not self.keys_required
        yield "require_key", open_to_all, f"{reached}: API keys are required there"
        for text in self.http.cors_origins:
            wrong = f"{text} is no origin, such as https://app.example.com"
            yield "http.cors_origins", not ORIGIN.fullmatch(text), wrong
        for text in self.http.hosts:
            wrong = f"http.hosts: {text!r} is no name, such as queue.example.com"
            yield "http.hosts", not HOST.fullmatch(text), wrong

    def _cluster_rules(self) -> Iterator[tuple[str, bool, str]]:
        cluster = self.cluster
        if not cluster.enabled:
            return
        nowhere = not cluster.advertise and self.host in ("", "0.0.0.0", "::")
        for field, wrong, message in (
            ("node", not NAME.fullmatch(self.node), "a node of a cluster needs a name of its own"),
            ("native_port", "native" not in self.ports, "nodes reach each other at this port"),
            ("cluster.name", not NAME.fullmatch(cluster.name), f"is like {NAME.pattern}"),
            ("cluster.key", self.keys_required and not cluster.key,
             "callers need keys here, so nodes need one for each other"),
            ("cluster.advertise", nowhere, "others cannot connect to this address"),
        ):  # fmt: skip
            yield field, wrong, f"{field}: {message}"
        for endpoint in cluster.etcd:
            host_port(re.sub(r"^https?://", "", endpoint), field="cluster.etcd")
        if cluster.advertise:
            host_port(cluster.advertise, field="cluster.advertise", port=0)

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Config:
        """Read all sources and validate the result. `file` defaults to what PENSTOCK_CONFIG names.
        `overrides` are keyed by dotted path, None: not given on the command line. Text is read as
        in the environment."""
        environ = os.environ if environ is None else environ
        if file is None and environ.get(ENV_FILE):
            file = Path(environ[ENV_FILE])
        merged: dict[str, Any] = _read_file(file) if file else {}
        for path, value in _from_environ(environ):
            _set(merged, path, value)
        for path, value in (overrides or {}).items():
            if path not in OPTIONS:
                raise InvalidArgument(f"no such option: {path}", field=path)
            if value is not None:
                _set(merged, path, _from_text(path, value) if isinstance(value, str) else value)
        config: Config = _convert(merged, Config, field="config")
        return config.validate()


def _check_cluster_key(key: str) -> None:
    """A key that is short or hardly varies can be guessed, and who has it can pretend to be a
    node. Whether a long one is random cannot be seen."""
    for count, (low, high), what in (
        (len(key), (CLUSTER_KEY_LENGTH_MIN, TEXT_LENGTH_MAX), "characters"),
        (len(set(key)), (CLUSTER_KEY_VARIETY_MIN, TEXT_LENGTH_MAX), "different characters"),
    ):
        if not low <= count <= high:
            raise InvalidArgument(
                f"cluster.key has {count} {what}, must have from {low} to {high}; "
                "`openssl rand -hex 32` makes one",
                field="cluster.key",
                limit=low,
            )


_PORT: Final = (-1, 65535)
_COUNT: Final = (1, 1 << 20)
_MILLISECONDS: Final = (10, 3600_000)
_SECONDS: Final = (0.001, 366 * 24 * 3600.0)
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "native_port": _PORT,
    "grpc_port": _PORT,
    "http_port": _PORT,
    "limits.frame_bytes_max": (64 << 10, PAYLOAD_BYTES_MAX),
    "limits.raw_bytes_max": (64 << 10, 1 << 30),
    "limits.header_bytes_max": (1 << 10, 1 << 20),
    "limits.idle_s": _SECONDS,
    "limits.connections_max": _COUNT,
    "limits.address_connections_max": _COUNT,
    "limits.strangers_max": _COUNT,
    "limits.address_strangers_max": _COUNT,
    "limits.strangers_bytes_max": (64 << 10, 1 << 50),
    "limits.greeting_s": _SECONDS,
    "limits.streams_max": _COUNT,
    "limits.held_bytes_max": (112 << 10, 1 << 50),
    "limits.frame_s": _SECONDS,
    "limits.bytes_per_s_min": (1, 1 << 40),
    "limits.write_s": _SECONDS,
    "log.segment_bytes": (4 << 10, 1 << 40),
    "log.allocate_bytes": (4 << 10, 1 << 30),
    "log.reserve_bytes": (0, 1 << 30),
    "log.cache_bytes": (0, 1 << 40),
    "log.index_bytes": (0, 1 << 40),
    "log.floor_s": (0, 3600.0),
    "upkeep.snapshot_s": _SECONDS,
    "upkeep.snapshot_bytes": (1 << 10, 1 << 50),
    "upkeep.retention_s": _SECONDS,
    "upkeep.scrub_s": _SECONDS,
    "audit.file_bytes_max": (1 << 10, 1 << 40),
    "audit.files_max": (0, 10_000),
    "cluster.lease_s": (2, 3600),
    "cluster.moves_max": (1, 10_000),
    "cluster.serve_s": (0.1, 3600.0),
    "cluster.generation_s": (0.1, 24 * 3600.0),
    "cluster.clock_offset_s": (0.05, 3600.0),
    "replication.heartbeat_ms": _MILLISECONDS,
    "replication.silence_ms": _MILLISECONDS,
    "replication.stagger_ms": _MILLISECONDS,
    "replication.fence_ms": _MILLISECONDS,
    "replication.credit_entries": (1, 1_000_000),
    "replication.credit_bytes": (64 << 10, 1 << 30),
    "replication.ack_entries": (1, 1_000_000),
    "replication.buffer_batches": (1, 1_000_000),
    "replication.buffer_ms": _MILLISECONDS,
    "replication.lagging_ms": _MILLISECONDS,
    "replication.backpressure_ms": _MILLISECONDS,
    "replication.caught_up_entries": (0, 1_000_000_000),
    "replication.seed_bytes_per_s": (64 << 10, 1 << 40),
    "live.idle_s": (0, 366 * 24 * 3600.0),
    "live.subscriptions_max": _COUNT,
    "live.outbox_entries": (1, 1_000_000),
    "live.outbox_bytes": (64 << 10, 1 << 30),
    "live.ingest_max": (1, 10_000_000),
    "live.ingest_high_water": (0.01, 1.0),
    "live.ageing_ms": _MILLISECONDS,
    "live.rate_min": (1, 1e9),
    "live.rate_max": (1, 1e9),
    "cache_bytes": (0, 1 << 40),
    "writer_threads": (1, PARTITIONS_MAX),
    "drain_s": (0, 3600.0),
    "ready_fd": (0, 1 << 20),
}


def host_port(text: str, *, field: str, port: int | None = None) -> tuple[str, int]:
    """The parts of `host:port`, `[v6]:port`, or a mere host where there is a `port` to assume."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+))(?::(\d{1,5}))?", text)
    number = match[3] if match else None
    if match is None or (number is None and port is None) or int(number or 0) > 65535:
        raise InvalidArgument(f"{field}: {text!r} is not like host:port", field=field)
    return match[1] or match[2], int(number) if number else port or 0


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine alone. A name other than localhost is not
    looked up: what it resolves to may change."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def env_name(path: str) -> str:
    return ENV_PREFIX + path.replace(".", "_").upper()


def _options(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    defaults = owner()
    for name, type in typing.get_type_hints(owner).items():
        if _is_group(type):
            yield from _options(type, f"{prefix}{name}.")
        elif hasattr(defaults, name):
            yield prefix + name, type


def _is_group(type: Any) -> bool:
    return dataclasses.is_dataclass(type) or isinstance(type, typing.cast(Any, msgspec.StructMeta))


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}", field="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} is not TOML: {error}", field="config") from error


def _read_file(file: Path) -> dict[str, Any]:
    tree = read_toml(file)
    for path in _leaves(tree):
        if path not in OPTIONS:
            raise InvalidArgument(f"{file}: no such option: {path}", field=path)
    return tree


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, dict) and path in GROUPS:
            yield from _leaves(value, path + ".")
        else:
            yield path


# Tables of the file, which in a variable or an option are written as JSON.
TABLES: Final = tuple[dict[str, Any], ...]


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    paths = {env_name(path): path for path in OPTIONS}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in ENV_ELSEWHERE:
            continue
        if name not in paths:
            raise InvalidArgument(f"no such option: {name}", field=name)
        yield paths[name], _from_text(paths[name], environ[name])


def _from_text(path: str, text: str) -> Any:
    kind = OPTIONS[path]
    if typing.get_origin(kind) is not tuple:
        return _convert(text, kind, field=path, strict=False)
    if kind != TABLES:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return msgspec.json.decode(text, type=TABLES)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{path}: {error}", field=path) from error


def _convert(value: Any, type: Any, *, field: str, strict: bool = True) -> Any:
    try:
        return msgspec.convert(value, type, strict=strict, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        inner = re.search(r"`\$\.([\w.]+)`", str(error))
        name = inner.group(1) if inner else field
        raise InvalidArgument(f"{name}: {error}", field=name) from error


def decode_path(type: type, value: Any) -> Any:
    if type is Path and isinstance(value, str | Path):
        return Path(value)
    raise ValueError(f"expected a path, got {value!r}")


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[name] = value


OPTIONS: Final[dict[str, Any]] = dict(_options(Config))
GROUPS: Final = frozenset(path.rpartition(".")[0] for path in OPTIONS) - {""}
