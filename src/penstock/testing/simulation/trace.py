"""What happened, as a hash of everything and the last events in words."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import xxhash

TAIL: Final = 400


class Trace:
    def __init__(self, *, keep: int = TAIL) -> None:
        self._hash = xxhash.xxh3_64()
        self.events: deque[tuple[Any, ...]] = deque(maxlen=keep or None)
        self.count = 0

    def add(self, *event: Any) -> None:
        self.count += 1
        self.events.append(event)
        self._hash.update(repr(event).encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def lines(self, last: int | None = None) -> list[str]:
        events = list(self.events)[-last:] if last else list(self.events)
        return [f"{e[0] / 1000:>10.3f} {' '.join(str(x) for x in e[1:])}" for e in events]
