"""What one connection makes the node hold, and when it is read no further.

Three things pile up for a client: requests that have no answer yet, the beginning of a frame whose
rest has not come, and answers that it does not read. The first two count in the node's bound. Past
a bound of its own a connection is not read until there is less, and TCP holds the sender back.

It is the same between nodes, and cannot lock two of them up: the client's end of a connection
always reads, so what this end has to send gets away. Nor do acknowledgements of replicas wait
behind their slices: streams stop at the transport's own mark, far below `UNREAD_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from penstock.errors import Backpressure, Unavailable
from penstock.node.engine import Engine
from penstock.wire.outbox import Transport

INFLIGHT_BYTES_MAX: Final = 32 << 20  # of one connection's requests
NODE_INFLIGHT_BYTES_MAX: Final = 512 << 20  # of all; past it, requests are refused for a while
UNREAD_BYTES_MAX: Final = 4 << 20  # of one connection's answers, beside what the kernel has taken


class Flow:
    """Invariant: `reading` says whether the transport is to read; both change in `_steer` alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: Transport | None = None
        self._requests = 0  # bytes without an answer
        self.frame_bytes = 0  # of a large frame that is not whole yet
        self._drained = asyncio.Event()  # clear: too many answers are unread
        self._drained.set()
        self.reading = True
        self._unsent = 0  # when it was last looked at
        self.heard = time.monotonic()  # the last sign of life

    def start(self, transport: Transport) -> None:
        self._transport = transport

    def end(self) -> None:
        """The connection is lost. Requests under way are given back as they are answered."""
        self._transport = None
        self.hold_frame(0)
        self._drained.set()

    # --- what comes in ---

    def check_room(self, size: int) -> None:
        """Raise `Backpressure` unless the node may hold so much more."""
        if self._engine.inflight_bytes + size > NODE_INFLIGHT_BYTES_MAX:
            raise Backpressure("too many enqueues are under way", retry_after_s=0.1)

    def take(self, size: int) -> None:
        self._requests += size
        self._engine.inflight_bytes += size
        if self._requests > INFLIGHT_BYTES_MAX:
            self._steer()

    def give_back(self, size: int) -> None:
        self._requests -= size
        self._engine.inflight_bytes -= size
        if not self.reading:
            self._steer()

    def hold_frame(self, held: int) -> None:
        """So many bytes of an unfinished frame are here now."""
        self._engine.inflight_bytes += held - self.frame_bytes
        self.frame_bytes = held

    # --- what goes out ---

    def on_unsent(self) -> None:
        """Something was sent while the transport's buffer is full."""
        if self._transport is None or not self._drained.is_set():
            return
        self._unsent = self._transport.get_write_buffer_size()
        if self._unsent > UNREAD_BYTES_MAX:
            self._drained.clear()
            self._steer()

    def on_drained(self) -> None:
        self._drained.set()
        self._steer()

    @property
    def unread(self) -> bool:
        return not self._drained.is_set()

    async def room(self) -> None:
        """Until there is room for another answer; raises `Unavailable` if there never will be."""
        if self.unread:
            await self._drained.wait()
            if self._transport is None:
                raise Unavailable("the connection was lost")

    # --- both ---

    def silent_s(self) -> float:
        """Time without a sign of life. Who is not read may still show one: by reading. And who is
        not read because this node is slow to answer need not show any."""
        if self._transport is not None and not self.reading:
            before, self._unsent = self._unsent, self._transport.get_write_buffer_size()
            if not self.unread or self._unsent != before:
                self.heard = time.monotonic()
        return time.monotonic() - self.heard

    def _steer(self) -> None:
        reading = self._requests <= INFLIGHT_BYTES_MAX and not self.unread
        if reading is self.reading or self._transport is None:
            return
        self.reading = reading
        self.heard = time.monotonic()
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
