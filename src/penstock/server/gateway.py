"""The gateway: gRPC and HTTP translated to the native protocol.

It keeps no state of its own. `connect` opens a native connection with an API key, in this process
or to another one, and everything goes through connections made with it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import Config
from penstock.server.grpc_server import GrpcServer
from penstock.server.http_app import HttpApp
from penstock.server.http_server import HttpServer
from penstock.server.options import GatewayOptions
from penstock.server.pool import Connect, Pool


class Gateway:
    """Both listeners. `ports` are known once it has started."""

    def __init__(
        self,
        connect: Connect,
        config: Config | GatewayOptions,
        metrics_text: Callable[[], bytes] | None = None,
    ) -> None:
        options = config if isinstance(config, GatewayOptions) else GatewayOptions.of(config)
        self._pool = Pool(connect, keys_max=options.keys_max, config_s=options.config_s)
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        if options.http_port is not None:
            self._app = HttpApp(self._pool, options, metrics_text)
            self._http = HttpServer(self._app, options)
        if options.grpc_port is not None:
            self._grpc = GrpcServer(self._pool, options)

    @property
    def ports(self) -> dict[str, int]:
        """Where it listens, by `http` and `grpc`."""
        listeners = {"http": self._http, "grpc": self._grpc}
        return {name: listener.port for name, listener in listeners.items() if listener}

    async def start(self) -> None:
        """Listen; raises when a port is taken, and then listens on none."""
        try:
            if self._http:
                await self._http.start()
            if self._grpc:
                await self._grpc.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Take nothing new, finish what is in progress, close the connections."""
        if self._grpc:
            await self._grpc.stop()
        if self._http:
            self._app.end_streams()
            await self._http.stop()
        await self._pool.close()
