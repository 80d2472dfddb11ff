"""The gateway: gRPC and HTTP translated to the native protocol.

It keeps no state of its own. `connect` opens a native connection with an API key, in this process
or to another one, and everything goes through connections made with it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import Config, Limits
from penstock.node.door.budget import Budget
from penstock.node.door.doorway import Doorway
from penstock.server.grpc.listener import GrpcServer
from penstock.server.http.app import HttpApp
from penstock.server.http.listener import HttpServer
from penstock.server.options import GatewayOptions
from penstock.server.pool import Connect, Pool
from penstock.server.subscriptions import CallerSubscriptions


class Gateway:
    """Both listeners. `ports` are known once it has started.

    Within a node, `budget` and `doorway` are the node's: they count what callers make it hold, and
    the callers themselves. A gateway in a process of its own makes its own ones."""

    def __init__(
        self,
        connect: Connect,
        config: Config | GatewayOptions,
        *,
        metrics_text: Callable[[], bytes] | None = None,
        budget: Budget | None = None,
        doorway: Doorway | None = None,
    ) -> None:
        options = config if isinstance(config, GatewayOptions) else GatewayOptions.of(config)
        self.budget = budget or Budget(options.limits.held_bytes_max)
        doorway = doorway or Doorway(Limits(connections_max=options.limits.connections_max))
        self._pool = Pool(connect, keys_max=options.keys_max, config_s=options.config_s)
        subscriptions = CallerSubscriptions(self._pool)
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        if options.http_port is not None:
            self._app = HttpApp(
                self._pool, subscriptions, options=options, metrics_text=metrics_text
            )
            self._http = HttpServer(self._app, options, budget=self.budget, doorway=doorway)
        if options.grpc_port is not None:
            self._grpc = GrpcServer(
                self._pool, subscriptions, options=options, budget=self.budget, doorway=doorway
            )

    @property
    def ports(self) -> dict[str, int]:
        """The ports of the listeners that are on, by `http` and `grpc`."""
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
