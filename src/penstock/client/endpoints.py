"""The nodes that a client was told of, and those that it learns of: any of them will do."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from penstock.client.address import Address, Tls
from penstock.client.connection import ENDPOINT_TIMEOUT_S, Connection, dial
from penstock.client.exchange import GREETING_TIMEOUT_S
from penstock.errors import Unavailable


class Remote:
    """Connections to nodes at urls: to whichever answers, or to a certain one.

    Clients begin at a random node, so that they spread. After one was lost or left the others have
    their turn, in a circle: it is tried last.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_key: str | None,
        tls: Tls,
        client: str,
        codecs: Sequence[str] = (),
    ) -> None:
        self._given = Address.parse_all(url)
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

    async def connect(self) -> Connection:
        """A connection to any of them; raises what the last one failed with."""
        failed: Unavailable | None = None
        known = self.addresses
        for address in known:
            timeout = GREETING_TIMEOUT_S if len(known) == 1 else ENDPOINT_TIMEOUT_S
            try:
                connection = await self._dial(address, timeout)
            except Unavailable as error:
                failed = error
            else:
                self._last = address
                return connection
        assert failed is not None
        raise failed

    async def connect_to(self, host: str, port: int) -> Connection:
        """A connection to the node at one of the learned places."""
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
