"""HTTP/2 frames as they pass by: how much of which gRPC message has come, and is not whole.

Nothing is buffered, decoded or refused here; the gRPC library does all of that behind. It holds
what has come of a message until the message is whole, and tells nobody how much that is, so the
frames are read along: 9 bytes of header each, and of a DATA frame the 5 bytes before each message.
"""

from __future__ import annotations

from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD: Final = 9  # bytes of a frame's header
PREFIX: Final = 5  # bytes before a gRPC message: compressed or not, and its length
DATA, HEADERS, RST_STREAM = 0, 1, 3
END_STREAM: Final = 0x1
PADDED: Final = 0x8


class PartialMessage:
    """A gRPC message of which not all bytes have come."""

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
        self._type = 0
        self._data = False  # the frame under way is DATA
        self._stream = self._flags = 0

    def feed(self, data: bytes, at: int, *, frames_max: int) -> int:
        """Read on from `at` for so many frames; returns where the next one has to go on."""
        end = len(data)
        while at < end and frames_max > 0:
            if self._left:
                take = min(self._left, end - at)
                if self._data:
                    self.on_data(data, at, take)
                self._left -= take
                at += take
            else:
                part = data[at : at + HEAD - len(self._head)]
                at += len(part)
                self._head += part
                if len(self._head) < HEAD:
                    break
                self._begin(self._head)
                self._head = b""
                frames_max -= 1
            if not self._left and not self._head:
                self.on_frame_end(self._stream, self._flags)
        return at

    def _begin(self, head: bytes) -> None:
        self._left = head[0] << 16 | head[1] << 8 | head[2]
        self._flags = head[4]
        self._stream = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
        self._type = head[3]
        self._data = self._type == DATA
        if self._type not in (DATA, HEADERS):
            self._flags = END_STREAM if self._type == RST_STREAM else 0
        self.on_frame(self._left)

    def on_frame(self, length: int) -> None:
        """A frame begins."""

    def on_data(self, data: bytes, at: int, length: int) -> None:
        """Some bytes of a DATA frame."""

    def on_frame_end(self, stream: int, flags: int) -> None:
        """A frame is over; of one that resets its stream the flags say that it ends it."""


class RequestFrames(Frames):
    """What a client sends. Invariant: `held` is the sum of `came` over `unfinished`."""

    def __init__(self) -> None:
        super().__init__()
        self._preface = len(PREFACE)  # bytes of it still to come
        self.greeted = False
        self.unfinished: dict[int, PartialMessage] = {}  # by stream
        self.held = 0
        self.open: set[int] = set()  # streams that neither side has reset and no answer has ended
        self._stream_last = 0
        self.now = 0.0  # set by the owner before `feed`
        self._padding = 0  # bytes at the end of the DATA frame under way
        self._padded = False  # the next byte says how many

    def feed(self, data: bytes, at: int, *, frames_max: int) -> int:
        if not self.greeted:
            skipped = min(self._preface, len(data) - at)
            self._preface -= skipped
            self.greeted = not self._preface
            at += skipped
        return super().feed(data, at, frames_max=frames_max)

    def on_frame(self, length: int) -> None:
        if self._type == HEADERS and self._stream > self._stream_last:
            self._stream_last = self._stream
            self.open.add(self._stream)
        self._padded = self._data and bool(self._flags & PADDED) and length > 0
        self._padding = 0

    def on_data(self, data: bytes, at: int, length: int) -> None:
        left = self._left
        if self._padded:
            self._padded, self._padding = False, data[at]
            at, length, left = at + 1, length - 1, left - 1
        length = min(length, left - self._padding)
        message = self.unfinished.get(self._stream)
        end = at + length
        while at < end:
            if message is None:
                message = self.unfinished[self._stream] = PartialMessage(self.now)
            at += self._add(message, data, at, end)
            if len(message.prefix) == PREFIX and not message.left:
                self.drop(self._stream)
                message = None

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

    def on_frame_end(self, stream: int, flags: int) -> None:
        if flags & END_STREAM:
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

    def on_frame_end(self, stream: int, flags: int) -> None:
        if flags & END_STREAM:
            self._requests.open.discard(stream)
            if self._requests.unfinished:
                self._requests.drop(stream)
