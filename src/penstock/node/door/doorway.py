"""Who may be connected, and by which names a listener may be called.

A stranger is a connection that has not greeted, has not shown a good key, or is still at its TLS
handshake. Strangers have a bound of their own, and when there are too many the oldest goes: a
newcomer always gets in, and whoever means well is past the greeting long before its turn to go
comes. One address has a part of the places only.

A web page can make a name of its own point to this machine (DNS rebinding). Its browser then takes
the listener for the site that the page came from: `Origin` and `Host` agree, and the page may read
every answer. What such a page cannot do is to send another name than its own, so a listener
answers to the names that it is known by and to no others. An address in `Host` was not looked up
by anybody, so it cannot be rebound: a listener that other machines reach takes any address, as
probes and scrapers write it; one on loopback has only loopback addresses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, Protocol

from penstock.config import Limits, host_port, is_loopback
from penstock.errors import InvalidArgument, LimitExceeded, Misdirected
from penstock.node.clock import NextTurn

GRACE_S: Final = 0.25  # for which a stranger stays, unless there are twice as many as there may be
IDLE_S: Final = 5.0  # after which a connection without a request may make way for another one
LOOKED_AT_MAX: Final = 32  # connections, for one to make way
READ_BYTES: Final = 256 << 10  # from TCP at once, as the loop does without TLS
TURN_BYTES: Final = 1 << 20  # decrypted in one turn of the loop for all connections together
REMEMBERED_MAX: Final = 256  # values of `Host` whose outcome is kept


class Guest(Protocol):
    address: str

    def idle_s(self) -> float:
        """For how long nothing has been asked of this node; 0: something is under way."""

    def expel(self) -> None:
        """End the connection at once, or soon if it is owed a word."""


class TlsIntake:
    """Where connections by TLS are read into, and whose turn it is. All connections of a loop share
    it: what was read is decrypted before another one reads.

    The loop reads from a connection until it has nothing more, up to eight megabytes, of all of
    them in each of its turns. To decrypt that takes a tenth of a second and more, and meanwhile
    nobody is served. So all connections share `TURN_BYTES` of each turn.
    """

    def __init__(self) -> None:
        self.received = memoryview(bytearray(READ_BYTES))
        self._used = 0  # bytes, of this turn of the loop
        self._resting: deque[Callable[[], None]] = deque()
        self._next = NextTurn(self._turn)

    def spend(self, size: int, go_on: Callable[[], None]) -> bool:
        """So much came from a connection. Whether it rests until `go_on` is called: all have had
        what a turn allows, or others rest and it has more."""
        self._used += size
        rests = self._used > TURN_BYTES or (bool(self._resting) and size == READ_BYTES)
        if rests:
            self._resting.append(go_on)
        self._next.ask()
        return rests

    def _turn(self) -> None:
        """Those who have rested for longest go on, as many as can use up a turn."""
        self._used = 0
        for _ in range(min(len(self._resting), TURN_BYTES // READ_BYTES)):
            self._resting.popleft()()
        if self._resting:
            self._next.ask()


class Doorway:
    """Invariant: a guest is among the strangers, or inside, or neither; never both."""

    def __init__(
        self,
        limits: Limits,
        *,
        on_refused: Callable[[str], None] = lambda reason: None,
        on_evicted: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.limits = limits
        self._on_refused, self._on_evicted = on_refused, on_evicted
        self._strangers: dict[Guest, float] = {}  # since when; the oldest first
        self._strangers_at: dict[str, dict[Guest, float]] = {}  # the same by address
        self._bytes: dict[Guest, int] = {}  # that strangers have sent
        self._bytes_total = 0
        self._inside: dict[str, dict[Guest, None]] = {}  # by address
        self.inside = 0  # in all
        self.intake = TlsIntake()

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def enter(self, guest: Guest) -> None:
        now = time.monotonic()
        self._strangers[guest] = now
        at = self._strangers_at.setdefault(guest.address, {})
        at[guest] = now
        self._trim(at, self.limits.address_strangers_max, now)
        self._trim(self._strangers, self.limits.strangers_max, now)

    def _trim(self, guests: dict[Guest, float], most: int, now: float) -> None:
        while len(guests) > most:
            oldest, since = next(iter(guests.items()))
            if now - since < GRACE_S and len(guests) <= 2 * most:
                return
            self._expel(oldest, "stranger")

    def hold(self, guest: Guest, size: int) -> None:
        if guest not in self._strangers:
            return
        self._bytes_total += size - self._bytes.get(guest, 0)
        self._bytes[guest] = size
        while self._bytes_total > self.limits.strangers_bytes_max:
            self._expel(next(iter(self._bytes)), "stranger_bytes")

    def admit(self, guest: Guest) -> None:
        """The guest may come in; raises `LimitExceeded` if there is no place for it."""
        self._forget_stranger(guest)
        inside = self._inside.setdefault(guest.address, {})
        limits = self.limits
        if len(inside) >= limits.address_connections_max:
            self._make_way(inside, f"too many connections from {guest.address}")
        elif self.inside >= limits.connections_max:
            self._make_way(max(self._inside.values(), key=len), "too many connections")
        inside[guest] = None
        self.inside += 1

    def _make_way(self, inside: dict[Guest, None], message: str) -> None:
        """Have the idlest of the oldest connections leave; raises if all of them are busy."""
        candidates = itertools.islice(inside, LOOKED_AT_MAX)
        idlest = max(candidates, key=lambda guest: guest.idle_s())
        if idlest.idle_s() < IDLE_S:
            self._on_refused("connections")
            raise LimitExceeded(message, retry_after_s=1.0)
        self._expel(idlest, "connections")

    def leave(self, guest: Guest) -> None:
        self._forget_stranger(guest)
        inside = self._inside.get(guest.address)
        if inside is not None and guest in inside:
            del inside[guest]
            self.inside -= 1
        if not inside:
            self._inside.pop(guest.address, None)

    def _forget_stranger(self, guest: Guest) -> None:
        if self._strangers.pop(guest, None) is None:
            return
        at = self._strangers_at[guest.address]
        del at[guest]
        if not at:
            del self._strangers_at[guest.address]
        self._bytes_total -= self._bytes.pop(guest, 0)

    def _expel(self, guest: Guest, reason: str) -> None:
        self.leave(guest)
        guest.expel()
        self._on_evicted(reason)


def address_of(transport: asyncio.BaseTransport) -> str:
    """Where a connection comes from; empty inside the process. Who has one IPv6 address has a whole
    network of them, so that counts as one."""
    peer: Any = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0])
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class HostNames:
    """The names of one listener, each with or without a port: a tunnel may have changed that."""

    def __init__(self, listen: str, *, names: Iterable[str] = ()) -> None:
        self._names = frozenset(_plain(name) for name in ("localhost", listen, *names) if name)
        self._exposed = not is_loopback(listen)
        self._admits = lru_cache(REMEMBERED_MAX)(self._look_up)

    def check(self, host: bytes | None) -> None:
        if host is None:
            raise InvalidArgument("a request needs a Host header", field="host")
        if not self._admits(host):
            name = host.decode("ascii", "backslashreplace")
            raise Misdirected(f"this listener does not answer to {name}", host=name)

    def _look_up(self, host: bytes) -> bool:
        try:
            name, _ = host_port(host.decode("ascii"), field="host", port=0)
        except UnicodeDecodeError as error:
            raise InvalidArgument("the Host header is not ASCII", field="host") from error
        name = _plain(name)
        return name in self._names or (_is_address(name) if self._exposed else is_loopback(name))


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
