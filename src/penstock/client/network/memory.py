"""Two linked transports inside one process: a connection without a socket.

What one end writes reaches the other end's protocol in a later turn of the loop, never inside the
call to `write`, so both sides see the same order of events as over TCP. An end that writes faster
than the other one reads is told to pause, exactly as a socket transport would tell it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, cast

HIGH_WATER: Final = 1 << 20  # unread bytes from which a writer is asked to pause
LOW_WATER: Final = HIGH_WATER // 4


def memory_pair(
    client: asyncio.Protocol, server: asyncio.Protocol
) -> tuple[MemoryTransport, MemoryTransport]:
    """Link two protocols of the running loop; `connection_made` is called on the server first."""
    loop = asyncio.get_running_loop()
    near, far = MemoryTransport(loop, client), MemoryTransport(loop, server)
    near.link(far)
    far.link(near)
    server.connection_made(far)
    client.connection_made(near)
    return near, far


class MemoryTransport(asyncio.Transport):
    """One end. Invariant: `_unread` counts the bytes in `_outbox`, which the peer has not had."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": None, "memory": True})
        self._loop = loop
        self._protocol: asyncio.Protocol = protocol
        self._peer: MemoryTransport = self
        self._outbox: list[Any] = []
        self._unread = 0
        self._high, self._low = HIGH_WATER, LOW_WATER
        self._reading = True
        self._paused_writer = False
        self._closing = False
        self._lost = False

    def link(self, peer: MemoryTransport) -> None:
        self._peer = peer

    # --- writing ---

    def write(self, data: Any) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if self._closing:
            return
        if not self._outbox:
            self._loop.call_soon(self._deliver)
        for data in list_of_data:
            # A caller may reuse a mutable buffer once this returns; immutable ones are shared.
            self._outbox.append(data if type(data) is bytes else bytes(data))
            self._unread += len(data)
        if self._unread > self._high and not self._paused_writer:
            self._paused_writer = True
            self._protocol.pause_writing()

    def _deliver(self) -> None:
        peer = self._peer
        if self._lost or not peer._reading:
            return
        if self._outbox:
            data = b"".join(self._outbox)
            self._outbox.clear()
            self._unread = 0
            if not peer._lost:
                peer._protocol.data_received(data)
        if self._paused_writer and self._unread <= self._low:
            self._paused_writer = False
            self._protocol.resume_writing()
        if self._closing and not self._outbox:
            self._lose(None)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unread

    # --- reading ---

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self._peer._outbox or self._peer._closing:
            self._loop.call_soon(self._peer._deliver)

    # --- ending ---

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Let the peer read what was written, then end both sides."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._deliver)

    def abort(self) -> None:
        """End both sides now; what was not read is gone."""
        self._closing = True
        self._outbox.clear()
        self._unread = 0
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        for end in (self, self._peer):
            if not end._lost:
                end._lost = end._closing = True
                # The two ends refer to each other, so what they hold would wait for the collector.
                end._outbox.clear()
                end._unread = 0
                end._loop.call_soon(end._protocol.connection_lost, error)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)
