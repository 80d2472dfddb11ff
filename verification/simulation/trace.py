"""What happened: all events of one run, a hash of them, and the last ones in words."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import xxhash

Event = tuple[Any, ...]  # the time in microseconds first, then whatever there is to tell

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=repr)


class Trace:
    """Nothing is put into words or hashed before somebody asks: most runs are never looked at."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.add = self.events.append  # called for most of what happens: no step between

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(_encoder.encode(self.events))

    def lines(self, last: int | None = None) -> list[str]:
        events = self.events[-last:] if last else self.events
        return [f"{e[0] / 1000:>10.3f} {' '.join(str(x) for x in e[1:])}" for e in events]
