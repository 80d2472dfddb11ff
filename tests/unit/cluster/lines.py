"""Connections to etcd that tests break."""

import asyncio
import ssl
from collections.abc import Callable

from penstock.cluster.etcd import EtcdOptions, EtcdStore
from penstock.testing.process import free_ports

QUICK = EtcdOptions(connect_s=1.0, request_s=3.0, lease_ttl_s=2)
OpenEtcd = Callable[[], EtcdStore]


class Line:
    """A connection to etcd that can be cut and mended, and that can ask for TLS."""

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._etcd_port = port
        self._port = free_ports(1)[0]
        self._listening: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def mend(self) -> None:
        self._listening = await asyncio.start_server(
            self._join, "127.0.0.1", self._port, ssl=self._tls
        )

    async def cut(self) -> None:
        if self._listening is not None:
            self._listening.close()
        for writer in self._open:
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._etcd_port)
        self._open |= {writer, back}
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
        self._open -= {writer, back}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()
