"""What a message may ask for at most, and what a caller may make a node hold.

A control message over one of the constants is refused while it is read, before anything is made of
it. `Limits` are those that an operator may change."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.errors import InvalidArgument
from penstock.model.entries import BATCH_ENTRIES_MAX, HEADERS_BYTES_MAX
from penstock.wire.frame import CONTROL_BYTES_MAX as CONTROL_BYTES_MAX
from penstock.wire.frame import PAYLOAD_BYTES_MAX

GREETING_BYTES_MAX: Final = 64 << 10  # of the payload that a greeting is
OPENING_BYTES_MAX: Final = 1 << 20  # of the control that opens a stream or calls something
OFFERS_MAX: Final = 64  # versions, or codecs, in a greeting
# Of the messages in an answer, or in a delivery; one message may be larger by itself. Encoded as
# messages of gRPC they stay below 4 MiB, which is what a client of that takes by default.
ANSWER_BYTES_MAX: Final = 3 << 20
PAGE_BYTES_MAX: Final = 1 << 20  # of the rows in a page of any other list, or one row
SEARCH_MAX: Final = 1000  # neighbours that one search may ask a node for
PARTS_MAX: Final = 16_384  # of one request
TOLD_MAX: Final = 65_536  # messages from node to node in one frame
ROUTES_MAX: Final = 64  # of one subscription
ROUTE_BYTES_MAX: Final = 1024
CURSOR_BYTES_MAX: Final = 128
BATCH_MS_MAX: Final = 60_000  # that a frame may wait for more, or changes be gathered
TEXT_LENGTH_MAX: Final = 4096  # characters of any text; most have a smaller limit of their own

Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
Route = Annotated[str, Meta(max_length=ROUTE_BYTES_MAX)]
Cursor = Annotated[str, Meta(max_length=CURSOR_BYTES_MAX)]
Headers = Annotated[bytes, Meta(max_length=HEADERS_BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=BATCH_ENTRIES_MAX)]  # of rows that are made room for
Offers = Meta(max_length=OFFERS_MAX)
Parts = Meta(max_length=PARTS_MAX)


def bounded(value: int, low: int, high: int, field: str) -> int:
    """The value of this field, which must be within the bounds."""
    if not low <= value <= high:
        raise InvalidArgument(f"{field} must be from {low} to {high}", field=field, limit=high)
    return value


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What callers may make the node hold, and for how long."""

    frame_bytes_max: int = PAYLOAD_BYTES_MAX  # payload of one frame, HTTP body, gRPC message
    raw_bytes_max: int = PAYLOAD_BYTES_MAX  # the same after decompression
    header_bytes_max: int = 64 << 10  # HTTP headers or gRPC metadata of one request
    idle_s: float = 60.0  # silence after which a connection is closed
    connections_max: int = 4096
    address_connections_max: int = 2048  # of them, from one address
    strangers_max: int = 1024  # connections that have not shown yet that they may be here
    address_strangers_max: int = 256  # of them, from one address
    strangers_bytes_max: int = 8 << 20  # that the node holds for these
    greeting_s: float = 10.0  # for a TLS handshake, and for the greeting after it
    streams_max: int = 1000  # open at once on one connection
    held_bytes_max: int = 112 << 20  # that the node holds for all its callers
    frame_s: float = 10.0  # until a frame or an HTTP body is whole, beside the time for its bytes
    bytes_per_s_min: int = 64 << 10  # at which those are expected to come
    write_s: float = 20.0  # for which an answer may wait to be read

    @property
    def held_bytes_least(self) -> int:
        """Below this, the largest frame would not fit into one caller's part of what is held."""
        return max(self.frame_bytes_max, self.raw_bytes_max) // 4 * 7


_COUNT: Final = (1, 1 << 20)
_SECONDS: Final = (0.001, 366 * 24 * 3600.0)
LIMIT_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "frame_bytes_max": (64 << 10, PAYLOAD_BYTES_MAX),
    "raw_bytes_max": (64 << 10, 1 << 30),
    "header_bytes_max": (1 << 10, 1 << 20),
    "idle_s": _SECONDS,
    "connections_max": _COUNT,
    "address_connections_max": _COUNT,
    "strangers_max": _COUNT,
    "address_strangers_max": _COUNT,
    "strangers_bytes_max": (64 << 10, 1 << 50),
    "greeting_s": _SECONDS,
    "streams_max": _COUNT,
    "held_bytes_max": (112 << 10, 1 << 50),
    "frame_s": _SECONDS,
    "bytes_per_s_min": (1, 1 << 40),
    "write_s": _SECONDS,
}
