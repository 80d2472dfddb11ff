"""Where nodes are, and how they are reached.

A node is at `penstock://host:port`, with TLS at `penstocks://host:port`. Several nodes of one
cluster stand in one url, `penstock://a:7440,b:7440`, or in a list of urls: any of them will do.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from penstock.client.network.connection import Connection, PeerConnection
from penstock.client.network.exchange import GREETING_TIMEOUT_S
from penstock.errors import InvalidArgument, Unavailable

PORT: Final = 7440
SCHEMES: Final = {"penstock": False, "penstocks": True}

# A context, the path of a file with the authorities to trust, True for the system's, or nothing.
Tls = ssl.SSLContext | str | Path | bool | None
ENDPOINT_TIMEOUT_S: Final = 2.0  # for one of several: the next one may answer at once
PEER_HEARTBEAT_S: Final = 0.5  # six of these without a byte, and a node is given up by another
C = TypeVar("C", bound=Connection)


class Address(NamedTuple):
    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"penstock{'s' if self.secure else ''}://{host}:{self.port}"

    @staticmethod
    def parse(url: str) -> Address:
        split = urlsplit(url)
        if split.scheme not in SCHEMES:
            raise InvalidArgument(
                f"a url starts with penstock:// or penstocks://, not {split.scheme!r}", field="url"
            )
        try:
            port = split.port
        except ValueError as error:
            raise InvalidArgument(f"the port of {url!r} is not a port", field="url") from error
        if split.path.strip("/") or split.query or split.username:
            raise InvalidArgument("a url has a host and a port, nothing else", field="url")
        return Address(split.hostname or "127.0.0.1", port or PORT, SCHEMES[split.scheme])

    @staticmethod
    def parse_all(urls: str | Sequence[str]) -> list[Address]:
        """Every address that is named, once, in order; all with TLS or all without."""
        found: dict[Address, None] = {}
        for url in [urls] if isinstance(urls, str) else urls:
            scheme, separator, rest = url.partition("://")
            for host in rest.split(",") if separator else [rest]:
                found[Address.parse(f"{scheme}{separator}{host}")] = None
        if not found:
            raise InvalidArgument("a list of urls names at least one", field="url")
        if len({address.secure for address in found}) > 1:
            raise InvalidArgument("penstock:// and penstocks:// do not mix", field="url")
        return list(found)

    def context(self, tls: Tls) -> ssl.SSLContext | None:
        if not self.secure:
            if tls:
                raise InvalidArgument("tls needs a penstocks:// url", field="tls")
            return None
        if isinstance(tls, ssl.SSLContext):
            return tls
        if isinstance(tls, str | Path):
            return ssl.create_default_context(cafile=str(tls))
        if tls is False:
            raise InvalidArgument("a penstocks:// url cannot go without tls", field="tls")
        return ssl.create_default_context()


async def open_connection(
    url: str | Sequence[str], *, api_key: str | None = None, tls: Tls = None
) -> Connection:
    """Connect to `penstock://host:port`, or with TLS to `penstocks://host:port`; where several are
    named, to the first that serves."""
    remote = Remote(url, api_key=api_key, tls=tls, client="penstock-python", spread=False)
    return await remote.connect(serving=len(remote.addresses) > 1)


async def _check_serving(connection: Connection) -> None:
    """Raises `Unavailable` if it is a node's that only joins its cluster, or leaves it."""
    if not connection.welcome.cluster:
        return
    try:
        async with asyncio.timeout(ENDPOINT_TIMEOUT_S):
            await connection.call("routes")
    except TimeoutError as error:
        connection.abort()
        raise Unavailable("the node greeted and then said nothing") from error
    except BaseException:
        connection.abort()
        raise


async def dial(
    address: Address, make: Callable[[], C], *, tls: Tls = None, timeout: float = GREETING_TIMEOUT_S
) -> C:
    """Connect and be greeted, each within `timeout`. A refused connection is told by the error's
    `refused`: nobody listens there."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            _, connection = await loop.create_connection(
                make, address.host, address.port, ssl=address.context(tls)
            )
    except (OSError, TimeoutError) as error:
        refused = True if isinstance(error, ConnectionRefusedError) else None
        raise Unavailable(f"cannot connect to {address}: {error}", refused=refused) from error
    try:
        await connection.greeted(timeout)
    except BaseException:
        connection.abort()
        raise
    return connection


async def connect_peer(
    host: str, port: int, *, cluster_key: str | None = None, tls: Tls = None, node: str
) -> PeerConnection:
    return await dial(
        Address(host, port, tls is not None),
        lambda: PeerConnection(
            cluster_key=cluster_key, client=f"penstock-node/{node}", heartbeat_s=PEER_HEARTBEAT_S
        ),
        tls=tls,
    )


class ConnectionSource(Protocol):
    """Where a client's connections come from: nodes at urls, or an engine in this process."""

    async def connect(self) -> Connection: ...

    async def close(self) -> None: ...


class Remote:
    """Connections to nodes at urls: to whichever answers, or to a certain one. Clients begin at a
    random node, so that they `spread`. After one was lost or left the others have their turn, in a
    circle: it is tried last."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_key: str | None,
        tls: Tls,
        client: str,
        codecs: Sequence[str] = (),
        spread: bool = True,
    ) -> None:
        self._given = Address.parse_all(url)
        if spread:
            random.shuffle(self._given)
        self._learned: list[Address] = []
        self._last: Address | None = None
        self._api_key, self._tls, self._client = api_key, tls, client
        self._codecs = codecs

    def learn(self, places: Iterable[tuple[str, int]]) -> None:
        """Other nodes of the same cluster, for when none of the given ones answers."""
        secure = self._given[0].secure
        found = [Address(host, port, secure) for host, port in places]
        self._learned = [address for address in found if address not in self._given]

    @property
    def addresses(self) -> list[Address]:
        """In the order in which they are tried."""
        known = self._given + self._learned
        if self._last not in known:
            return known
        behind = known.index(self._last) + 1
        return known[behind:] + known[:behind]

    async def connect(self, *, serving: bool = False) -> Connection:
        """A connection to any of them, if asked for one that serves; raises what the last one
        failed with."""
        failed: Unavailable | None = None
        addresses = self.addresses
        timeout = GREETING_TIMEOUT_S if len(addresses) == 1 else ENDPOINT_TIMEOUT_S
        for address in addresses:
            try:
                connection = await self._dial(address, timeout)
                if serving:
                    await _check_serving(connection)
            except Unavailable as error:
                failed = error
            else:
                self._last = address
                return connection
        assert failed is not None
        raise failed

    async def connect_to(self, host: str, port: int) -> Connection:
        return await self._dial(Address(host, port, self._given[0].secure), ENDPOINT_TIMEOUT_S)

    async def _dial(self, address: Address, timeout: float) -> Connection:
        return await dial(
            address,
            lambda: Connection(api_key=self._api_key, client=self._client, codecs=self._codecs),
            tls=self._tls,
            timeout=timeout,
        )

    async def close(self) -> None:
        """Urls hold nothing open."""
