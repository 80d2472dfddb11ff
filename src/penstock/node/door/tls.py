"""The node's end of a TLS connection, and TLS contexts from PEM files.

The connection is a protocol to TCP, and a transport to whoever is served by it.

The loop has TLS of its own, but what that keeps nobody can bound: 256 KiB for each connection that
has ever sent so much at once, as much again in its copy for the library, half a megabyte of what
comes while it is told not to read, and whatever it was given to send, of which it says that nothing
is left. This one keeps what the library needs for a piece (`PIECE_BYTES`) in each direction, reads
nothing while it is paused, and tells the size of all that waits to be sent.

The loop's own way would also show a connection to nobody before its handshake is done, so nobody
could count it, or make it give way. This one is a stranger at the doorway until then.

Errors about the files of a context name the option and the file.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from penstock.config import TlsOptions
from penstock.errors import InvalidArgument
from penstock.model.columns import Buffer
from penstock.node.door.doorway import Doorway, address_of

RECORD_BYTES: Final = 16 << 10  # that are decrypted at once; a record has no more
# Given to the library at once, in both directions: its own buffers grow to the most they ever held.
PIECE_BYTES: Final = 4 << 10
END_S: Final = 5.0  # in which some of what is left is read when the connection is to end


class TlsLink(asyncio.BufferedProtocol, asyncio.Transport):
    """`factory` makes the protocol that is served by the connection once TLS is agreed on.

    Invariant: something waits to be encrypted only while TCP takes no more (`_full`)."""

    def __init__(
        self, context: ssl.SSLContext, factory: Callable[[], asyncio.Protocol], doorway: Doorway
    ) -> None:
        super().__init__()
        self._context, self._factory, self._doorway = context, factory, doorway
        self._intake = doorway.intake
        self.address = ""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._tcp: asyncio.Transport | None = None
        self._protocol: asyncio.Protocol | None = None
        self._reading = True  # as far as who is served by it is concerned
        self._resting = False  # until others had their turn
        self._tcp_reading = True  # what comes of both
        self._kept = b""  # decrypted with the end of the handshake, when it was not to be read
        self._unsent: deque[Buffer] = deque()
        self._unsent_bytes = 0
        self._full = False
        self._told_full = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    # --- as the protocol of TCP ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tcp = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        within_s = self._doorway.limits.greeting_s
        self._timer = asyncio.get_running_loop().call_later(within_s, self.abort)
        self.address = address_of(self)
        self._doorway.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tcp, self._closing = None, True
        self._forget_unsent()
        self._stop_timer()
        protocol, self._protocol = self._protocol, None
        # Who was served may keep this object for a while, but not what the library keeps for it.
        del self._tls, self._incoming, self._outgoing
        if protocol is not None:
            protocol.connection_lost(exc)
        else:
            self._doorway.leave(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._intake.received

    def buffer_updated(self, nbytes: int) -> None:
        if self._intake.spend(nbytes, self._go_on):
            self._resting = True
            self._steer()
        if self._closing:
            return
        plain: list[bytes] = []
        try:
            ended = self._decrypt(self._intake.received[:nbytes], plain)
        except ssl.SSLError:
            self._fail()
            return
        self._send_own()
        if plain:
            self._deliver(plain[0] if len(plain) == 1 else b"".join(plain))
        if ended:
            self.eof_received()

    def eof_received(self) -> bool:
        """The caller sends no more. What it is owed is sent before TCP is closed."""
        if self._protocol is None:
            return False
        if not self._closing:
            self._protocol.eof_received()
            self.close()
        return True

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._flush()
        if self._closing and not self._unsent:
            self._say_goodbye()

    # --- what comes in ---

    def _decrypt(self, data: memoryview, plain: list[bytes]) -> bool:
        """Whether the caller has said that this is all."""
        for at in range(0, len(data), PIECE_BYTES):
            self._incoming.write(data[at : at + PIECE_BYTES])
            if self._protocol is None and not self._agree():
                continue
            try:
                while part := self._tls.read(RECORD_BYTES):
                    plain.append(part)
            except ssl.SSLWantReadError:
                continue
            return True
        return False

    def _agree(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._stop_timer()
        self._protocol = self._factory()
        self._doorway.leave(self)
        self._protocol.connection_made(self)
        return True

    def _deliver(self, data: bytes) -> None:
        if not self._reading:
            self._kept += data
        elif self._protocol is not None and not self._closing:
            self._protocol.data_received(data)

    def pause_reading(self) -> None:
        self._reading = False
        self._steer()

    def resume_reading(self) -> None:
        if self._reading or self._closing:
            return
        self._reading = True
        asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        """Deliver what was kept, then read again, unless reading was paused anew."""
        if self._reading and self._kept:
            kept, self._kept = self._kept, b""
            self._deliver(kept)
        self._steer()

    def _go_on(self) -> None:
        self._resting = False
        self._steer()

    def _steer(self) -> None:
        reading = self._reading and not self._resting
        if reading is self._tcp_reading or self._tcp is None or self._tcp.is_closing():
            return
        self._tcp_reading = reading
        (self._tcp.resume_reading if reading else self._tcp.pause_reading)()

    # --- what goes out ---

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer], /) -> None:
        if self._closing:
            return
        for data in list_of_data:
            if len(data):
                self._unsent.append(data)
                self._unsent_bytes += len(data)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and not self._full and self._tcp is not None:
                self._tls.write(self._next_piece())
                self._tcp.write(self._outgoing.read())
        except ssl.SSLError:
            self._fail()
        self._tell()

    def _next_piece(self) -> Buffer:
        unsent = self._unsent
        if len(unsent[0]) > PIECE_BYTES:
            view = memoryview(unsent[0])
            unsent[0] = view[PIECE_BYTES:]
            self._unsent_bytes -= PIECE_BYTES
            return view[:PIECE_BYTES]
        small, size = [], 0
        while unsent and size + len(unsent[0]) <= PIECE_BYTES:
            size += len(unsent[0])
            small.append(unsent.popleft())
        self._unsent_bytes -= size
        return b"".join(small)

    def _send_own(self) -> None:
        """What the library itself has to say: its part of the handshake, tickets, alerts."""
        if self._outgoing.pending and self._tcp is not None:
            self._tcp.write(self._outgoing.read())
            self._tell()

    def _tell(self) -> None:
        if self._full is not self._told_full and self._protocol is not None:
            self._told_full = self._full
            (self._protocol.pause_writing if self._full else self._protocol.resume_writing)()

    def get_write_buffer_size(self) -> int:
        beneath = 0 if self._tcp is None else self._tcp.get_write_buffer_size()
        return self._unsent_bytes + beneath

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._tcp is not None:
            self._tcp.set_write_buffer_limits(high, low)

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes, self._kept = 0, b""

    # --- the end ---

    def close(self) -> None:
        if self._closing:
            return
        if self._protocol is None:
            self.abort()
            return
        self._closing = True
        self._kept = b""
        self._watch_end()
        if not self._unsent:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        with suppress(ssl.SSLError):  # the caller's own farewell is not waited for
            self._tls.unwrap()
        self._end()

    def _fail(self) -> None:
        """What came is no TLS, or not what was agreed on; the library has put that into words."""
        self._closing = True
        self._forget_unsent()
        self._watch_end()
        self._end()

    def _end(self) -> None:
        if self._tcp is not None:
            self._tcp.write(self._outgoing.read())
            self._tcp.close()

    def _watch_end(self, before: int | None = None) -> None:
        """End the connection at once if nothing of what is left was read for a while."""
        left = self.get_write_buffer_size()
        if before is not None and left >= before:
            self.abort()
            return
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(END_S, self._watch_end, left)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        self._closing = True
        self._forget_unsent()
        if self._tcp is not None:
            self._tcp.abort()

    def is_closing(self) -> bool:
        return self._closing

    # --- as a stranger ---

    def idle_s(self) -> float:
        return 0.0

    def expel(self) -> None:
        self.abort()

    # --- what is known of it ---

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._context
        if self._tcp is None:
            return default
        return self._tls if name == "ssl_object" else self._tcp.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)


# --- contexts ---


def server_context(options: TlsOptions) -> ssl.SSLContext:
    """With a `ca`, a client's certificate is verified if sent, or demanded by `require_client`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    _load_cert(context, options)
    if options.ca is not None:
        _load_ca(context, options.ca)
        context.verify_mode = ssl.CERT_REQUIRED if options.require_client else ssl.CERT_OPTIONAL
    return context


def client_context(options: TlsOptions) -> ssl.SSLContext:
    """The peer is verified by name and `ca` (or the system's); `cert` and `key` are shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    if options.ca is not None:
        _load_ca(context, options.ca)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if options.cert is not None:
        _load_cert(context, options)
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


def _load_cert(context: ssl.SSLContext, options: TlsOptions) -> None:
    cert, key = options.cert, options.key
    _check_readable(cert, "tls.cert")
    _check_readable(key, "tls.key")
    assert cert is not None
    try:
        # an encrypted key would otherwise stop the start with a prompt
        context.load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        raise InvalidArgument(
            f"{cert} and {key} are not a certificate and its key: {error.reason or error}",
            field="tls.cert",
        ) from error


def _refuse_password() -> str:
    raise InvalidArgument("tls.key is encrypted; give one without a password", field="tls.key")


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _check_readable(ca, "tls.ca")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise InvalidArgument(f"{ca} has no certificate in it", field="tls.ca") from error


def _check_readable(path: Path | None, field: str) -> None:
    if path is None:
        raise InvalidArgument(f"{field} is not set", field=field)
    try:
        path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field=field) from error
