"""Where nodes are: `penstock://host:port`, with TLS `penstocks://host:port`.

Several nodes of one cluster stand in one url, `penstock://a:7440,b:7440`, or in a list of urls.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from penstock.errors import InvalidArgument

PORT: Final = 7440
SCHEMES: Final = {"penstock": False, "penstocks": True}

# A context, the path of a file with the authorities to trust, True for the system's, or nothing.
Tls = ssl.SSLContext | str | Path | bool | None


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

    @staticmethod
    def looks_like(text: str) -> bool:
        """True for a url, False for what can only be a folder's path."""
        return "://" in text

    def context(self, tls: Tls) -> ssl.SSLContext | None:
        """The TLS context for this address; None for a plain one."""
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
