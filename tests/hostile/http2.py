"""HTTP/2 as bytes, as far as attacks on gRPC need it: what no gRPC library would send."""

from __future__ import annotations

import struct
from collections import Counter
from enum import IntEnum
from typing import Final

from hpack import Encoder, NeverIndexedHeaderTuple
from tests.hostile.crowd import CHUNK, Puppet
from tests.hostile.site import HOST, Site

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW: Final = 65_535  # that either side begins with
FRAME_BYTES_MAX: Final = 16_384
INITIAL_WINDOW_SIZE: Final = 4  # of the settings
END_STREAM: Final = 1
END_HEADERS: Final = 4
ACK: Final = 1
_SETTING: Final = struct.Struct(">HI")
_MESSAGE: Final = struct.Struct(">BI")


class H2Type(IntEnum):
    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8


def h2_frame(type: H2Type, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", type, flags, stream)
    return head + payload


def opening(window: int = WINDOW) -> bytes:
    """What a client sends first; `window` is what it lets each stream send."""
    setting = _SETTING.pack(INITIAL_WINDOW_SIZE, window)
    return PREFACE + h2_frame(H2Type.SETTINGS, 0, setting)


def call_head(site: Site, path: str, key: str | None = None) -> bytes:
    """The header block of a gRPC call. It leaves no trace in the compression's table, so that the
    same bytes open every stream."""
    fields = {
        ":method": "POST",
        ":scheme": "https" if site.profile.tls else "http",
        ":path": path,
        ":authority": f"{HOST}:{site.ports['grpc']}",
        "te": "trailers",
        "content-type": "application/grpc",
    } | ({"x-api-key": key} if key else {})
    return Encoder().encode([NeverIndexedHeaderTuple(n, v) for n, v in fields.items()])


def message(payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A gRPC message; `length` says another one than it has."""
    return _MESSAGE.pack(0, len(payload) if length is None else length) + payload


def call(stream: int, block: bytes, payload: bytes | None = None) -> bytes:
    """A call's head, and its whole request."""
    head = h2_frame(H2Type.HEADERS, stream, block, END_HEADERS)
    if payload is None:
        return head
    return head + h2_frame(H2Type.DATA, stream, message(payload), END_STREAM)


class Ear:
    """Listens to what the node says on a connection: counts frames and keeps windows."""

    def __init__(self, puppet: Puppet) -> None:
        self._puppet = puppet
        self._rest = b""
        self.counts: Counter[H2Type] = Counter()
        self.answered: set[int] = set()  # streams with a head or data
        self.reset: set[int] = set()
        self._initial = WINDOW
        self._connection = WINDOW
        self._streams: dict[int, int] = {}  # what may still be sent
        self._left: dict[int, int] = {}  # what is still to be sent
        puppet.heard = self.hear
        if puppet.kept:
            self.hear(puppet.kept)

    def hear(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while len(data) - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + length:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            payload = data[at + 9 : at + 9 + length]
            self._on_frame(data[at + 3], data[at + 4], stream, payload)
            at += 9 + length
        self._rest = data[at:]
        self._send()

    def _on_frame(self, type: int, flags: int, stream: int, payload: bytes) -> None:
        if type not in H2Type.__members__.values():
            return
        self.counts[H2Type(type)] += 1
        if type in (H2Type.HEADERS, H2Type.DATA):
            self.answered.add(stream)
        elif type == H2Type.RST_STREAM:
            self.reset.add(stream)
            self._left.pop(stream, None)
        elif type == H2Type.SETTINGS and not flags & ACK:
            self._on_settings(payload)
        elif type == H2Type.PING and not flags & ACK:
            self._puppet.write(h2_frame(H2Type.PING, 0, payload, ACK))
        elif type == H2Type.WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self._streams[stream] = self._streams.get(stream, self._initial) + more
            else:
                self._connection += more

    def _on_settings(self, payload: bytes) -> None:
        for name, value in _SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self._streams:
                    self._streams[stream] += value - self._initial
                self._initial = value
        self._puppet.write(h2_frame(H2Type.SETTINGS, 0, b"", ACK))

    # --- sending within windows ---

    def send_unfinished(self, stream: int, block: bytes, *, says: int, sends: int) -> None:
        """Begin a call whose message is said to be longer than what comes of it."""
        begin = h2_frame(H2Type.DATA, stream, message(length=says))
        self._puppet.write(call(stream, block) + begin)
        self._connection -= 5
        self._streams[stream] = self._streams.get(stream, self._initial) - 5
        self._left[stream] = sends
        self._send()

    def _send(self) -> None:
        for stream, left in list(self._left.items()):
            pieces = []
            while left and (size := self._room(stream, left)) > 0:
                pieces.append(h2_frame(H2Type.DATA, stream, CHUNK[:size]))
                self._connection -= size
                self._streams[stream] -= size
                left -= size
            self._left[stream] = left
            if pieces:
                self._puppet.write(b"".join(pieces))

    def _room(self, stream: int, left: int) -> int:
        return min(left, FRAME_BYTES_MAX, self._connection, self._streams[stream])
