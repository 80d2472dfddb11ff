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
from penstock.server.pool import Connect, Pool
from penstock.server.subscriptions import CallerSubscriptions


class Gateway:
    """Both listeners. `ports` are known once it has started. Within a node, `budget` and `doorway`
    are the node's: they count what callers make it hold, and the callers themselves. A gateway in a
    process of its own makes its own ones."""

    def __init__(
        self,
        connect: Connect,
        config: Config,
        *,
        metrics_text: Callable[[], bytes] | None = None,
        budget: Budget | None = None,
        doorway: Doorway | None = None,
    ) -> None:
        self.budget = budget or Budget(config.limits.held_bytes_max)
        doorway = doorway or Doorway(Limits(connections_max=config.limits.connections_max))
        self._pool = Pool(connect)
        subscriptions = CallerSubscriptions(self._pool)
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        if "http" in config.ports:
            self._app = HttpApp(self._pool, subscriptions, config=config, metrics_text=metrics_text)
            self._http = HttpServer(self._app, config, budget=self.budget, doorway=doorway)
        if "grpc" in config.ports:
            self._grpc = GrpcServer(
                self._pool, subscriptions, config=config, budget=self.budget, doorway=doorway
            )

    @property
    def ports(self) -> dict[str, int]:
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
        if self._grpc:
            await self._grpc.stop()
        if self._http:
            self._app.end_streams()
            await self._http.stop()
        await self._pool.close()
