"""What a gateway can be told beyond the node's configuration, and how it reads that."""

from __future__ import annotations

import msgspec

from penstock.config import Config, Limits, TlsOptions, host_port


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Ports of None leave that listener out; 0 takes a free one."""

    host: str
    http_port: int | None
    grpc_port: int | None
    tls: TlsOptions
    # Of these a gateway takes those of connections, headers, bodies and messages, and times; where
    # no node counts what all callers make it hold, that one too.
    limits: Limits
    drain_s: float  # for calls in progress when the gateway stops
    cors_origins: tuple[str, ...] = ()  # of other sites, whose pages may use it
    hosts: tuple[str, ...] = ()  # names that HTTP requests may be addressed to, besides `host`

    keys_max: int = 256  # native connections kept, one per API key
    requests_max: int = 4096  # calls in progress at one listener
    head_s: float = 10.0  # until a request's headers are there
    config_s: float = 2.0  # how long a topic's configuration is believed

    @staticmethod
    def of(config: Config) -> GatewayOptions:
        return GatewayOptions(
            host=config.host,
            http_port=config.ports.get("http"),
            grpc_port=config.ports.get("grpc"),
            tls=config.tls,
            limits=config.limits,
            drain_s=config.drain_s,
            cors_origins=config.http.cors_origins,
            hosts=(*config.http.hosts, *_advertised(config)),
        )


def _advertised(config: Config) -> tuple[str, ...]:
    """The name that the other nodes reach this one at, which callers are told as well."""
    text = config.cluster.advertise
    return (host_port(text, field="cluster.advertise", port=0)[0],) if text else ()
