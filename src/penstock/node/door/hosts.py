"""Which names an HTTP listener answers to.

A web page can make a name of its own point to this machine (DNS rebinding). Its browser then takes
the listener for the site that the page came from: `Origin` and `Host` agree, and the page may read
every answer. What such a page cannot do is to send another name than its own, so a listener
answers to the names that it is known by and to no others. An address in `Host` was not looked up
by anybody, so it cannot be rebound: a listener that other machines reach takes any address, as
probes and scrapers write it; one on loopback has only loopback addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from penstock.config import host_port, is_loopback
from penstock.errors import InvalidArgument, Misdirected

REMEMBERED_MAX: Final = 256  # values of `Host` whose outcome is kept


class HostNames:
    """The names of one listener, each with or without a port: a tunnel may have changed that."""

    def __init__(self, listen: str, *, names: Iterable[str] = ()) -> None:
        self._names = frozenset(_plain(name) for name in ("localhost", listen, *names) if name)
        self._exposed = not is_loopback(listen)
        self._admits = lru_cache(REMEMBERED_MAX)(self._look_up)

    def check(self, host: bytes | None) -> None:
        """Raise unless `host`, as it stands in the request, is a name of this listener."""
        if host is None:
            raise InvalidArgument("a request needs a Host header", field="host")
        if not self._admits(host):
            name = host.decode("ascii", "backslashreplace")
            raise Misdirected(f"this listener does not answer to {name}", host=name)

    def _look_up(self, host: bytes) -> bool:
        try:
            name, _ = host_port(host.decode("ascii"), field="host", port=0)
        except UnicodeDecodeError as error:
            raise InvalidArgument("the Host header is not ASCII", field="host") from error
        name = _plain(name)
        return name in self._names or (_is_address(name) if self._exposed else is_loopback(name))


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
