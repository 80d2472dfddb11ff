"""A sink within the node that keeps nothing: what the live path itself can do.

As a `[[live.sink]]` its kind is `penstock.testing.live_sink:NullSink`. It looks at the columns that
a real one would begin with. With a `gate` it opens when that file exists: so whoever measures it
decides when it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import Unavailable, Unsupported
from penstock.sinks.protocol import Feed, Work


class NullSink:
    feed = Feed.ROWS
    ordered = True
    inline = True
    volatile = True

    def __init__(self, name: str, *, gate: str = "") -> None:
        self.name, self._gate = name, Path(gate) if gate else None
        self.rows = self.newest = 0

    def open(self) -> None:
        if self._gate is not None and not self._gate.exists():
            raise Unavailable("the gate is shut")

    def write(self, work: Work) -> None:
        rows = work.rows
        if rows is not None and len(rows):
            self.rows += len(rows)
            self.newest = max(self.newest, int(rows.batch.sequences[-1]))

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[Any]:
        raise Unsupported("it keeps nothing")

    def reset(self) -> None:
        self.rows = self.newest = 0

    def close(self) -> None:
        """There is nothing to let go of."""
