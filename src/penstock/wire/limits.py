"""What a message may ask for at most. A control message over one of these is refused while it is
read, before anything is made of it."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from penstock.model.topic import BATCH_ENTRIES_MAX

CONTROL_BYTES_MAX: Final = 4 << 20
GREETING_BYTES_MAX: Final = 64 << 10  # of the payload that a greeting is
OPENING_BYTES_MAX: Final = 1 << 20  # of the control that opens a stream or calls something
OFFERS_MAX: Final = 64  # versions, or codecs, in a greeting
PARTS_MAX: Final = 16_384  # of one request
TOLD_MAX: Final = 65_536  # messages from node to node in one frame
ROUTES_MAX: Final = 64  # of one subscription
ROUTE_BYTES_MAX: Final = 1024
CURSOR_BYTES_MAX: Final = 128
BATCH_MS_MAX: Final = 60_000  # that a frame may wait for more, or changes be gathered
TEXT_LENGTH_MAX: Final = 4096  # characters of any text; most have a smaller limit of their own
HEADERS_BYTES_MAX: Final = 16 << 10

Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
Route = Annotated[str, Meta(max_length=ROUTE_BYTES_MAX)]
Cursor = Annotated[str, Meta(max_length=CURSOR_BYTES_MAX)]
Headers = Annotated[bytes, Meta(max_length=HEADERS_BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=BATCH_ENTRIES_MAX)]  # of rows that are made room for
Offers = Meta(max_length=OFFERS_MAX)
Parts = Meta(max_length=PARTS_MAX)
