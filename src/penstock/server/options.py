"""What a gateway can be told beyond the node's configuration, and how it reads that."""

from __future__ import annotations

import msgspec

from penstock.config import Config, TlsOptions


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Ports of None leave that listener out; 0 takes a free one."""

    host: str
    http_port: int | None
    grpc_port: int | None
    tls: TlsOptions
    connections_max: int  # of the HTTP listener
    header_bytes_max: int  # of one HTTP request, or of one gRPC call's metadata
    body_bytes_max: int  # of an enqueue over HTTP, or of one gRPC message
    idle_s: float  # between two requests on one connection
    drain_s: float  # for calls in progress when the gateway stops
    cors_origins: tuple[str, ...] = ()  # of other sites, whose pages may use it

    keys_max: int = 256  # native connections kept, one per API key
    requests_max: int = 4096  # calls in progress at one listener
    head_s: float = 10.0  # until a request's headers are there
    body_s: float = 60.0  # until its body is there
    config_s: float = 2.0  # how long a topic's configuration is believed

    @staticmethod
    def of(config: Config) -> GatewayOptions:
        return GatewayOptions(
            host=config.host,
            http_port=config.ports.get("http"),
            grpc_port=config.ports.get("grpc"),
            tls=config.tls,
            connections_max=config.limits.connections_max,
            header_bytes_max=config.limits.header_bytes_max,
            body_bytes_max=config.limits.frame_bytes_max,
            idle_s=config.limits.idle_s,
            drain_s=config.drain_s,
            cors_origins=config.http.cors_origins,
        )
