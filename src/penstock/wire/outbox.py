"""Frames that are sent in one turn of the loop, in one write.

A transport writes at once what it is given. Between nodes that is a system call for every slice
and every answer of every partition, and each wakes the other side for little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from penstock.model.columns import Buffer

GATHER_BYTES_MAX: Final = 64 << 10  # more is written at once, so that the transport can say: enough


class WireTransport(Protocol):
    """What is needed of a transport of asyncio."""

    def writelines(self, list_of_data: Iterable[Buffer], /) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int: ...


class Outbox:
    """A transport before a transport; `soon` calls back at the end of the turn."""

    def __init__(
        self, transport: WireTransport, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._transport, self._soon = transport, soon
        self._gathered: list[Buffer] = []
        self._bytes = 0
        self.is_closing = transport.is_closing
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def writelines(self, list_of_data: Iterable[Buffer], /) -> None:
        buffers = list(list_of_data)
        if not self._gathered:
            self._soon(self.flush)
        self._gathered += buffers
        self._bytes += sum(map(len, buffers))
        if self._bytes >= GATHER_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        if self._gathered:
            gathered, self._gathered, self._bytes = self._gathered, [], 0
            if not self._transport.is_closing():
                self._transport.writelines(gathered)

    def get_write_buffer_size(self) -> int:
        return self._bytes + self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the transport after everything that was handed over is written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._gathered.clear()
        self._transport.abort()
