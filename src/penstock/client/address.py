"""Where a node is: `penstock://host:port`, with TLS `penstocks://host:port`."""

from __future__ import annotations

import ssl
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
