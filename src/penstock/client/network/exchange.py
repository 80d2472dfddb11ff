"""The exchange of frames on one connection: numbers, answers, streams, signs of life.

Every request and every stream takes a number of its own from one counter; an answer repeats it.
When the connection is lost, every waiting request fails with `Unavailable`: its outcome is
*unknown*, and whoever repeats it does so with the same producer key. The same holds for a request
that was not answered within `answer_s`. That time is counted in ticks, so that a loop that stood
still is not taken for a node that did. A request that never went out fails with `sent=False`:
nobody has to guess whether it was done.

Frames go over any transport of asyncio; between two ends in one process that is a `memory_pair`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, cast

from penstock.errors import Corruption, PenstockError, Unavailable, from_wire
from penstock.model.batch import Codec
from penstock.model.columns import Buffer
from penstock.wire import frame
from penstock.wire.frame import Frame, FrameFlag, FrameType, WireTransport
from penstock.wire.messages import Hello, SlowDown, Welcome, pack, unpack

GREETING_TIMEOUT_S: Final = 10.0
SILENT_TICKS_MAX: Final = 6  # half heartbeats; a live peer answers each of ours
CLUSTER_TICK_S_MAX: Final = 0.7  # another node may have taken over: find out within seconds
ANSWER_TICKS: Final = 10  # The time that an answer may take is counted in so many ticks.
HIGH_WATER: Final = 1 << 20  # unread bytes from which a writer is asked to pause
LOW_WATER: Final = HIGH_WATER // 4


class Receiver(Protocol):
    """What a connection hands the frames of an open stream to."""

    def on_answer(self, payload: memoryview) -> None:
        """An answer to the opening that nobody waits for: most have no use for it."""
        return

    def on_batch(self, payload: memoryview) -> None: ...

    def on_end(self, error: PenstockError | None) -> None: ...


class Exchange(asyncio.Protocol):
    """A client's end. It works from `connection_made` on: hand it to a transport first."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        cluster_key: str | None = None,  # of a node that connects to another one
        client: str = "penstock-python",
        heartbeat_s: float | None = None,  # None: as often as the server needs it
        codecs: Sequence[str] = (),  # that frames may be compressed by, the preferred one first
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hello = Hello(list(frame.VERSIONS), api_key, client, list(codecs), cluster_key)
        self._codec = Codec.NONE  # the one that the server has chosen of those in the greeting
        self.alive = False  # It was made, and neither side has ended it.
        self._transport: WireTransport | None = None
        self._decoder = frame.FrameDecoder()
        self._number = 0
        self.answer_s: float | None = None  # how long an answer may take; None: for ever
        # The server was too late with an answer, or said that other nodes should be asked.
        self.elsewhere = False
        # By number: who waits, for what, and the tick at which the answer is late.
        self._waiting: dict[int, tuple[asyncio.Future[Any], Any, float]] = {}
        self._tick = 0
        self._ticking: asyncio.TimerHandle | None = None
        self._streams: dict[int, Receiver] = {}
        self._greeting: asyncio.Future[Welcome] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._writable = asyncio.Event()  # not set while the transport says pause
        self._writable.set()
        self._lost: PenstockError | None = None
        self._left = False  # nobody will ask anything more on this connection
        self._farewell: PenstockError | None = None  # the server goes, and takes no more requests
        self._heartbeat_s = heartbeat_s
        self._heartbeat: asyncio.TimerHandle | None = None
        # Whether anything was sent, or received, since the last tick of the heartbeat.
        self._sent = self._received = True
        self._silent = 0  # ticks in a row without a byte from the peer
        self.slow: dict[str, float] = {}  # by topic: loop time until which to put nothing

    # --- state ---

    @property
    def welcome(self) -> Welcome:
        return self._greeting.result()

    def slow_until(self, topic: str) -> float:
        """The loop time until which the server wants no puts into a topic; 0: at once."""
        self.slow = {name: t for name, t in self.slow.items() if t > self._loop.time()}
        return max(self.slow.get(topic, 0.0), self.slow.get("", 0.0))

    async def greeted(self, timeout: float = GREETING_TIMEOUT_S) -> Welcome:
        """Wait until the server accepted us; raises what it refused us with."""
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._greeting)
        except TimeoutError as error:
            late = Unavailable("the server did not greet back in time")
            self._fail(late)
            raise late from error

    async def close(self) -> None:
        """Send what was written, then end; waiting requests fail with `Unavailable`."""
        if self._transport is not None:
            self._transport.close()
            self._fail(Unavailable("the connection was closed"), abort=False)
            await self._closed.wait()

    def leave(self) -> None:
        """End once everybody has an answer and every stream has ended."""
        self._left = True
        self._end_if_left()

    def _end_if_left(self) -> None:
        if self._left and self._transport is not None and not (self._waiting or self._streams):
            self._transport.close()
            self._fail(Unavailable("the connection was left for another"), abort=False)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def abort(self) -> None:
        """End now, whatever is under way."""
        self._fail(Unavailable("the connection was given up"))

    # --- sending ---

    def send(self, type: FrameType, sequence: int, *payload: Buffer, flags: int = 0) -> None:
        if self._lost is None and self._transport is not None:
            self._sent = True
            if self._codec and (packed := frame.compressed(self._codec, payload)) is not None:
                payload, flags = tuple(packed), flags | FrameFlag.COMPRESSED
            self._transport.writelines(frame.encode(type, sequence, *payload, flags=flags))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def ask(
        self,
        type: FrameType,
        answer: Any,
        *payload: Buffer,
        number: int | None = None,
        wait_s: float = 0.0,
    ) -> asyncio.Future[Any]:
        """Send a request. The future gets the answer, unpacked as `answer`, or the error; the
        answer may take `wait_s` longer than others."""
        if not self.alive:
            raise self._over()
        if number is None:
            number = self._number = self._number + 1
        self.send(type, number, *payload, flags=FrameFlag.ACK_WANTED)
        late_at = math.inf
        if self.answer_s is not None:
            late_at = self._tick + 1 + ANSWER_TICKS * (1 + wait_s / self.answer_s)
            if self._ticking is None:
                self._ticking = self._loop.call_later(self.answer_s / ANSWER_TICKS, self._on_tick)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = (future, answer, late_at)
        return future

    async def _request(
        self, type: FrameType, answer: Any, *payload: Buffer, wait_s: float = 0.0
    ) -> Any:
        """`ask` when the transport takes more; raises `Unavailable` if that takes too long."""
        while not self._writable.is_set():
            try:
                async with asyncio.timeout(self.answer_s):
                    await self._writable.wait()
            except TimeoutError:
                self.elsewhere = True
                raise Unavailable("the server does not read", sent=False) from None
        return await self.ask(type, answer, *payload, wait_s=wait_s)

    def _on_tick(self) -> None:
        """Let go of answers that are late; and of a server that gives no sign of life besides."""
        assert self.answer_s is not None
        self._tick += 1
        late = [number for number, waiting in self._waiting.items() if waiting[2] <= self._tick]
        for number in late:
            future = self._waiting.pop(number)[0]
            if not future.done():
                self.elsewhere = True
                future.set_exception(Unavailable(f"no answer within {self.answer_s:g} s"))
        self._ticking = None
        if late and self._silent > 1:  # a heartbeat of ours has no answer either
            self._fail(Unavailable("the server went silent"))
        elif self._waiting:
            self._ticking = self._loop.call_later(self.answer_s / ANSWER_TICKS, self._on_tick)
        self._end_if_left()

    async def unsubscribe(self, number: int) -> None:
        """End a stream; what the server sent before it knew still arrives before this returns."""
        if number in self._streams:
            try:
                await self.ask(FrameType.UNSUBSCRIBE, dict, number=number)
            finally:
                self._let_go(number)

    def _let_go(self, number: int) -> None:
        self._streams.pop(number, None)
        self._end_if_left()

    def _over(self) -> Unavailable:
        """Why nothing can be sent."""
        over = self._lost or self._farewell
        error = Unavailable(over.message if over else "the connection was not made yet", sent=False)
        error.__cause__ = over
        return error

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.alive = True
        self.send(FrameType.HEARTBEAT, 0, pack(self._hello))

    def data_received(self, data: bytes) -> None:
        self._received = True
        try:
            for item in self._decoder.feed(data):
                self._on_frame(item)
        except PenstockError as error:
            self._fail(error)
        if self._left:
            self._end_if_left()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        lost = Unavailable(f"the connection was lost: {exc}" if exc else "the connection was lost")
        self._fail(lost, abort=False)
        self._closed.set()

    # --- receiving ---

    def _on_frame(self, item: Frame) -> None:
        kind = item.type
        if item.flags & FrameFlag.COMPRESSED:
            item = frame.expanded(item, self._codec, bytes_max=frame.PAYLOAD_BYTES_MAX)
        if kind is FrameType.ACK:
            self._on_answer(item)
        elif kind is FrameType.BATCH:
            stream = self._streams.get(item.sequence)
            if stream is not None:
                stream.on_batch(item.payload)
        elif kind is FrameType.NACK:
            self._on_refusal(item)
        elif kind is FrameType.UNSUBSCRIBE:
            self._end_stream(item.sequence, self._error_in(item) if item.payload else None)
        elif kind is FrameType.HEARTBEAT:
            if not self._greeting.done():
                self._on_welcome(unpack(item.payload, Welcome)[0])
        elif kind is FrameType.BACKPRESSURE:
            slow, _ = unpack(item.payload, SlowDown)
            self.slow[slow.topic] = self._loop.time() + slow.retry_after_ms / 1000
        else:
            raise Corruption(f"a client cannot receive {kind.name}")

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.version not in self._hello.versions:
            raise Corruption(f"the server speaks version {welcome.version}, which was not offered")
        self._codec = frame.CODECS.get(welcome.codec, Codec.NONE)
        self._greeting.set_result(welcome)
        interval = self._heartbeat_s or welcome.heartbeat_ms / 2000
        if interval > 0:
            self._beat(min(interval, CLUSTER_TICK_S_MAX) if welcome.cluster else interval)

    def _on_answer(self, item: Frame) -> None:
        found = self._waiting.pop(item.sequence, None)
        if found is None:
            stream = self._streams.get(item.sequence)
            if stream is not None:
                stream.on_answer(item.payload)
        elif not found[0].done():
            try:
                # An answer may hold a message, which may be larger than what a request may be.
                answer = unpack(item.payload, found[1], bytes_max=frame.PAYLOAD_BYTES_MAX)[0]
            except PenstockError as error:  # it is the last answer that comes, and has to be told
                found[0].set_exception(_copy(error))
                raise
            found[0].set_result(answer)

    def _on_refusal(self, item: Frame) -> None:
        error = self._error_in(item)
        if item.sequence == 0 and error.details.get("leaving"):
            self._on_farewell(error)
            return
        if item.sequence == 0 or not self._greeting.done():
            self._fail(error)  # The server refuses the whole connection, not one request.
            return
        found = self._waiting.pop(item.sequence, None)
        if found is None:
            self._end_stream(item.sequence, error)
        elif not found[0].done():
            found[0].set_exception(error)

    def _on_farewell(self, error: PenstockError) -> None:
        """The server goes. It still answers what it was asked before, so that nobody has to guess
        whether that was done; then the connection ends."""
        self._farewell, self.alive = error, False
        self._end_streams(error)
        self.leave()

    def _end_streams(self, error: PenstockError) -> None:
        for number in list(self._streams):
            self._end_stream(number, error)

    def _end_stream(self, number: int, error: PenstockError | None) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.on_end(error)

    def _error_in(self, item: Frame) -> PenstockError:
        """The error in a frame; it is remembered if it says that others should be asked."""
        error = from_wire(unpack(item.payload, dict[str, Any])[0])
        self.elsewhere = self.elsewhere or bool(error.details.get("elsewhere"))
        # Whether that node has sent something to another one says nothing about our request.
        error.details.pop("sent", None)
        return error

    def _beat(self, interval: float) -> None:
        """Every half heartbeat: show that we live, and have the peer show that it does."""
        self._silent = 0 if self._received else self._silent + 1
        if self._silent > SILENT_TICKS_MAX:
            self._fail(Unavailable("the server went silent"))
            return
        if not (self._sent and self._received):
            self.send(FrameType.HEARTBEAT, 0)
        self._sent = self._received = False
        self._heartbeat = self._loop.call_later(interval, self._beat, interval)

    # --- ending ---

    def _fail(self, error: PenstockError, *, abort: bool = True) -> None:
        """Nothing more comes: everyone who waits learns why."""
        if self._lost is not None:
            return
        self._lost, self.alive = error, False
        for timer in (self._heartbeat, self._ticking):
            if timer is not None:
                timer.cancel()
        if not self._greeting.done():
            self._greeting.set_exception(error)
            self._greeting.exception()  # a caller that never asks must not be warned about it
        waiting, self._waiting = self._waiting, {}
        for future, _, _ in waiting.values():
            if not future.done():
                future.set_exception(_copy(error))
        self._end_streams(error)
        self.resume_writing()
        if abort and self._transport is not None:
            self._transport.abort()


def _copy(error: PenstockError) -> PenstockError:
    """One exception object per waiter: a shared one would collect everybody's traceback."""
    return from_wire(error.to_wire())


# --- inside one process ---


def memory_pair(
    client: asyncio.Protocol, server: asyncio.Protocol
) -> tuple[MemoryTransport, MemoryTransport]:
    """Link two protocols of the running loop; `connection_made` is called on the server first."""
    loop = asyncio.get_running_loop()
    near, far = MemoryTransport(loop, client), MemoryTransport(loop, server)
    near._peer, far._peer = far, near
    server.connection_made(far)
    client.connection_made(near)
    return near, far


class MemoryTransport(asyncio.Transport):
    """One of two linked ends inside a process: a connection without a socket.

    What it writes reaches the other end's protocol in a later turn of the loop, never inside the
    call to `write`, so both sides see the same order of events as over TCP. An end that writes
    faster than the other one reads is told to pause, exactly as a socket transport would tell it.
    Invariant: `_unread` counts the bytes in `_outbox`, which the peer has not had.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol: asyncio.Protocol = protocol
        self._peer: MemoryTransport = self
        self._outbox: list[Any] = []
        self._unread = 0
        self._reading = True
        self._paused_writer = False
        self._closing = False
        self._lost = False

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
        if self._unread > HIGH_WATER and not self._paused_writer:
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
        if self._paused_writer and self._unread <= LOW_WATER:
            self._paused_writer = False
            self._protocol.resume_writing()
        if self._closing and not self._outbox:
            self._lose(None)

    def get_write_buffer_size(self) -> int:
        return self._unread

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self._peer._outbox or self._peer._closing:
            self._loop.call_soon(self._peer._deliver)

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
