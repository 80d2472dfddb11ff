"""What stands before the gRPC library: it accepts connections, counts, and passes bytes on.

The library listens on a socket in the file system that nobody else can reach. It bounds one call,
but neither connections per address nor what all callers together make it hold, and it reads
messages from whoever asks. So each connection comes through here, where its frames are read along:
messages that are not whole count in the node's budget, have a deadline, and wait while there is no
room for more; answers that are not read have a deadline too. A handler learns by
`FrontConnection.name` whom a call comes from, and admits the connection once it has a good key.

Of HTTP/2 nothing is buffered, decoded or refused here; the library does all of that behind. It
holds what has come of a message until the message is whole, and tells nobody how much that is. So
of each frame the 9 bytes of its header are read, and of a DATA frame the 5 bytes before each
message.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import tempfile
import time
from pathlib import Path
from typing import Final, cast

from penstock.config import Config
from penstock.node.door.budget import Budget, Held
from penstock.node.door.doorway import Doorway, address_of
from penstock.server import operations
from penstock.server.operations import key_id_of, listen

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD: Final = 9  # bytes of a frame's header
PREFIX: Final = 5  # bytes before a gRPC message: compressed or not, and its length
DATA, HEADERS, RST_STREAM = 0, 1, 3
GREETING: Final = -1  # the preface, which is read as a frame without a header
END_STREAM: Final = 0x1
PADDED: Final = 0x8
ANY: Final = 1 << 40  # more frames than one piece of bytes can hold


class PartialMessage:
    __slots__ = ("came", "left", "moved", "prefix", "since")

    def __init__(self, since: float) -> None:
        self.prefix = b""
        self.came = 0  # bytes of it so far
        self.left = 0  # bytes still to come, once the prefix is known
        self.since = self.moved = since


class Frames:
    """Splits what one side sends. Invariant: `_left` bytes of the frame under way are to come."""

    def __init__(self) -> None:
        self._head = b""  # of a frame's header, what has come of it
        self._left = 0
        self._type = self._flags = self._stream = 0

    def feed(self, data: bytes, at: int = 0, *, frames_max: int = ANY) -> int:
        """Read on from `at` for so many frames; returns where the next one has to go on."""
        end = len(data)
        while at < end and frames_max > 0:
            if self._left:
                take = self._left if self._left < end - at else end - at
                if self._type == DATA:
                    self.on_data(data, at, take)
                self._left -= take
                at += take
            else:
                missing = HEAD - len(self._head)
                self._head += data[at : at + missing]
                at += missing
                if at > end:
                    return end
                self._begin(int.from_bytes(self._head, "big"))
                self._head = b""
                frames_max -= 1
            if self._flags & END_STREAM and not self._left:
                self.on_stream_end(self._stream)
        return at

    def _begin(self, head: int) -> None:
        self._left = head >> 48
        self._type = head >> 40 & 0xFF
        self._flags = head >> 32 & 0xFF
        self._stream = head & 0x7FFFFFFF
        if self._type > HEADERS:  # whose flags mean other things
            self._flags = END_STREAM if self._type == RST_STREAM else 0

    def on_data(self, data: bytes, at: int, length: int) -> None:
        """Some bytes of a DATA frame."""

    def on_stream_end(self, stream: int) -> None:
        """The frame that is over ends or resets its stream."""


class RequestFrames(Frames):
    """What a client sends. Invariant: `held` is the sum of `came` over `unfinished`."""

    def __init__(self) -> None:
        super().__init__()
        self._type, self._left = GREETING, len(PREFACE)
        self.unfinished: dict[int, PartialMessage] = {}  # by stream
        self.held = 0
        self.open: set[int] = set()  # streams that neither side has reset and no answer has ended
        self._stream_last = 0
        self.now = 0.0  # set by the owner before `feed`
        self._padding = 0  # bytes at the end of the DATA frame under way
        self._padded = False  # the next byte says how many

    @property
    def greeted(self) -> bool:
        return self._type != GREETING or not self._left

    def _begin(self, head: int) -> None:
        super()._begin(head)
        if self._type == HEADERS and self._stream > self._stream_last:
            self._stream_last = self._stream
            self.open.add(self._stream)
        self._padded = self._type == DATA and bool(self._flags & PADDED) and self._left > 0
        self._padding = 0

    def on_data(self, data: bytes, at: int, length: int) -> None:
        left = self._left
        if self._padded:
            self._padded, self._padding = False, data[at]
            at, length, left = at + 1, length - 1, left - 1
        end = at + min(length, left - self._padding)
        while at < end:
            message = self.unfinished.get(self._stream)
            if message is None:
                behind = at + PREFIX + int.from_bytes(data[at + 1 : at + PREFIX], "big")
                if behind <= end:  # the whole of it is here
                    at = behind
                    continue
                message = self.unfinished[self._stream] = PartialMessage(self.now)
            at += self._add(message, data, at, end)
            if len(message.prefix) == PREFIX and not message.left:
                self.drop(self._stream)

    def _add(self, message: PartialMessage, data: bytes, at: int, end: int) -> int:
        if len(message.prefix) < PREFIX:
            part = data[at : min(end, at + PREFIX - len(message.prefix))]
            message.prefix += part
            taken = len(part)
            if len(message.prefix) == PREFIX:
                message.left = int.from_bytes(message.prefix[1:], "big")
        else:
            taken = min(message.left, end - at)
            message.left -= taken
        message.came += taken
        message.moved = self.now
        self.held += taken
        return taken

    def on_stream_end(self, stream: int) -> None:
        if self._type == RST_STREAM:
            self.open.discard(stream)
        if self.unfinished:
            self.drop(stream)

    def drop(self, stream: int) -> None:
        message = self.unfinished.pop(stream, None)
        if message is not None:
            self.held -= message.came


class AnswerFrames(Frames):
    """What the library sends. A stream that it has ended waits for nothing more of its request."""

    def __init__(self, requests: RequestFrames) -> None:
        super().__init__()
        self._requests = requests

    def on_stream_end(self, stream: int) -> None:
        self._requests.open.discard(stream)
        if self._requests.unfinished:
            self._requests.drop(stream)


FRAMES_PER_TURN: Final = 256  # of one connection, then the others have theirs
STRANGER_STREAMS: Final = 16  # calls that are open on a connection without a good key so far
UNREAD_BYTES: Final = 256 << 10  # of answers in a connection's buffer, from which no more is taken


class FrontConnection(asyncio.Protocol):
    """One caller's connection. Its other end is a `Back`, which is the library's client."""

    def __init__(self, front: GrpcFront) -> None:
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._back: Back | None = None
        self._requests = RequestFrames()
        self.answers = AnswerFrames(self._requests)
        self._pending = b""  # received and not passed on yet
        self._at = 0  # where the rest of it begins
        self._turning = False  # the rest of it has its turn soon
        self._waits_for_room = False
        self._unread_since: float | None = None
        self._admitted = False
        self._key_id: str | None = None
        self._greeting: asyncio.TimerHandle | None = None
        self.account = front.budget.account(self)
        self.address = ""
        self.name = ""  # as the library calls it
        self.calls = 0
        self.used = time.monotonic()

    # --- who it is ---

    def admit(self, api_key: str | None) -> None:
        """A call has shown a good key; raises `LimitExceeded` if there is no place for it."""
        if not self._admitted:
            self._front.doorway.admit(self)
            self._admitted = True
            self._go_on()
        key_id = key_id_of(api_key)
        if key_id is not None and key_id != self._key_id:
            self._key_id = key_id
            self.account.join(key_id)

    @property
    def receiving(self) -> bool:
        return bool(self._requests.unfinished)

    def idle_s(self) -> float:
        return 0.0 if self.calls else time.monotonic() - self.used

    def expel(self) -> None:
        self.abort()

    # --- its beginning and its end ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.pause_reading()
        self._transport.set_write_buffer_limits(UNREAD_BYTES)
        self.address = address_of(transport)
        self._front.connections.add(self)
        self._front.doorway.enter(self)
        self._greeting = self._loop.call_later(operations.HEAD_S, self._check_greeted)
        self._front.open_back(self)

    def joined(self, back: Back, name: str) -> None:
        """The front has opened the way to the library; now the caller may be read."""
        self._back, self.name = back, name
        if self._transport is not None:
            self._transport.resume_reading()
        else:
            back.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._greeting is not None:
            self._greeting.cancel()
        if self._back is not None:
            self._back.close()
        self._pending = b""
        budget = self._front.budget
        budget.waiting.pop(self._on_room, None)
        budget.unwatch(self)
        self.account.hold(0, Held.MESSAGES)
        self.account.close()
        self._front.on_lost(self)

    def _check_greeted(self) -> None:
        if not self._requests.greeted:
            self.abort()

    def close(self) -> None:
        """The library has ended the connection: let what it said be read."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- from the caller ---

    def data_received(self, data: bytes) -> None:
        self._pending = self._pending[self._at :] + data if self._pending else data
        self._at = 0
        if not self._turning:
            self._pass_on()

    def _pass_on(self) -> None:
        self._turning = False
        if self._transport is None or self._back is None:
            return
        frames_max = FRAMES_PER_TURN if self._admitted else self._frames_max()
        if not frames_max:
            self.steer()
            return
        requests, data = self._requests, self._pending
        requests.now = time.monotonic()
        end = requests.feed(data, self._at, frames_max=frames_max)
        self._back.write(data if self._at == 0 and end == len(data) else data[self._at : end])
        if end < len(data):
            self._at = end
            self._turning = True
            self._loop.call_soon(self._pass_on)
        else:
            self._pending, self._at = b"", 0
        if requests.held or self.account.by_kind[Held.MESSAGES]:
            self._count()
        self.steer()

    def _frames_max(self) -> int:
        """How many frames of a stranger may be passed on now. It has few calls open: the library
        would refuse others for the sake of a flood of them."""
        return max(0, STRANGER_STREAMS - len(self._requests.open))

    def _go_on(self) -> None:
        if self._pending and not self._turning:
            self._turning = True
            self._loop.call_soon(self._pass_on)

    def _count(self) -> None:
        held, budget = self._requests.held, self._front.budget
        self.account.hold(held, Held.MESSAGES)
        if not self._admitted:
            self._front.doorway.hold(self, held)
        stuck = held or self._unread_since is not None
        (budget.watch if stuck else budget.unwatch)(self)
        self._waits_for_room = bool(held) and not self.account.has_room(0)
        if self._waits_for_room:
            budget.waiting[self._on_room] = None

    def _on_room(self) -> None:
        self._waits_for_room = False
        self._count()
        self.steer()

    def steer(self) -> None:
        """Read while what came was passed on and there is room for more."""
        if self._transport is None or self._transport.is_closing():
            return
        blocked = self._back is None or self._back.blocked
        if self._pending or self._waits_for_room or blocked:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # --- to the caller ---

    def write(self, data: bytes) -> None:
        self.answers.feed(data)
        if self.account.by_kind[Held.MESSAGES]:
            self._count()
        if self._pending:
            self._go_on()
        if self._transport is not None:
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        self._front.budget.watch(self)
        if self._back is not None:
            self._back.pause(True)

    def resume_writing(self) -> None:
        self._unread_since = None
        if self._back is not None:
            self._back.pause(False)

    # --- what the budget asks ---

    def stuck_s(self) -> float:
        now = time.monotonic()
        unfinished = self._requests.unfinished
        since = [message.since for message in unfinished.values()]
        if self._unread_since is not None:
            since.append(self._unread_since)
        return now - min(since) if since else 0.0

    def overdue(self) -> str | None:
        now, limits = time.monotonic(), self._front.config.limits
        for message in self._requests.unfinished.values():
            wanted_s = limits.frame_s + message.came / limits.bytes_per_s_min
            if now - message.since > wanted_s or now - message.moved > limits.frame_s:
                return "frame_time"
        if self._unread_since is not None and now - self._unread_since > limits.write_s:
            return "write_time"
        return None

    def evict(self, reason: str) -> None:
        self.account.hold(0, Held.MESSAGES)
        self.abort()


class Back(asyncio.Protocol):
    def __init__(self, front: FrontConnection) -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self.blocked = False  # the library does not read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._front.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._front.close()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause(self, paused: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        self._front.steer()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class GrpcFront:
    """Listens from `start` to `stop`. `path` is where the library has to listen."""

    def __init__(self, config: Config, *, budget: Budget, doorway: Doorway) -> None:
        self.config, self.budget, self.doorway = config, budget, doorway
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-grpc-")  # nobody else's
        self.path = Path(self._folder.name) / "socket"
        self._prefix = f"penstock-{secrets.token_hex(8)}"
        self._numbers = 0
        self.named: dict[str, FrontConnection] = {}  # as the library names who calls
        self._opening: set[asyncio.Task[None]] = set()
        self.connections: set[FrontConnection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, tls: ssl.SSLContext | None) -> None:
        self._server, self.port = await listen(
            lambda: FrontConnection(self),
            host=self.config.host, port=self.config.grpc_port, doorway=self.doorway, tls=tls,
        )  # fmt: skip

    def close(self) -> None:
        """Accept no further connections; those that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def stop(self) -> None:
        self.close()
        for task in self._opening:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        self._folder.cleanup()

    def open_back(self, connection: FrontConnection) -> None:
        self._numbers += 1
        task = asyncio.ensure_future(self._open_back(connection, f"{self._prefix}-{self._numbers}"))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_back(self, connection: FrontConnection, name: str) -> None:
        loop = asyncio.get_running_loop()
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.setblocking(False)
        try:
            link.bind(b"\0" + name.encode())  # so that a call can be told whom it comes from
            await loop.sock_connect(link, str(self.path))
            _, back = await loop.create_unix_connection(lambda: Back(connection), sock=link)
        except OSError:
            link.close()
            connection.abort()
            return
        peer = f"unix-abstract:{name}"
        if connection in self.connections:
            self.named[peer] = connection
        connection.joined(back, peer)

    def on_lost(self, connection: FrontConnection) -> None:
        self.connections.discard(connection)
        self.doorway.leave(connection)
        self.named.pop(connection.name, None)
