"""What a message may ask for at most. A control message over one of these is refused while it is
read, before anything is made of it."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

CONTROL_BYTES_MAX: Final = 4 << 20
GREETING_BYTES_MAX: Final = 64 << 10  # of the payload that a greeting is
OPENING_BYTES_MAX: Final = 1 << 20  # of the control that opens a stream or calls something
VERSIONS_MAX: Final = 64  # versions, or codecs, that a greeting may offer
PARTS_MAX: Final = 16_384  # of one request
ROUTES_MAX: Final = 64  # of one subscription
ROUTE_BYTES_MAX: Final = 1024
CURSOR_BYTES_MAX: Final = 128
NAME_LENGTH_MAX: Final = 1024  # characters of any name; most have a smaller limit of their own
BATCH_MS_MAX: Final = 60_000  # that a frame may wait for more, or changes be gathered

Name = Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]
