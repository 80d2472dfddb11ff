"""Sinks within the node for those who measure it.

As a `[[live.sink]]` their kinds are `penstock.bench.live.sinks:NullSink`, `…:GatedIndex` and
`…:GatedCache`. With a `gate` they open when that file exists: so whoever measures decides when they
begin.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock.errors import Unavailable, Unsupported
from penstock.sinks.cache import CacheSink
from penstock.sinks.memory_index import MemoryIndexSink
from penstock.sinks.protocol import Feed, Work

STAMP: Final = struct.Struct("<Qd")  # a position, and when what is up to there was committed


class NullSink:
    """It keeps nothing: what the live path itself can do. It looks at the columns that a real one
    would begin with. With `stamps` it writes into that file when its rows were committed."""

    feed = Feed.ROWS
    ordered = True
    inline = True
    volatile = True

    def __init__(self, name: str, *, gate: str = "", stamps: str = "") -> None:
        self.name, self._gate, self._path = name, gate, stamps
        self._stamps: int | None = None  # the open file
        self.rows = self.newest = 0

    def open(self) -> None:
        pass_gate(self._gate)
        if self._path:
            self._stamps = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, work: Work) -> None:
        rows = work.rows
        if rows is not None and len(rows):
            self.rows += len(rows)
            self.newest = max(self.newest, int(rows.batch.sequences[-1]))
        if self._stamps is not None and work.committed_at is not None:
            os.write(self._stamps, STAMP.pack(work.last, work.committed_at))

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[Any]:
        raise Unsupported("it keeps nothing")

    def reset(self) -> None:
        self.rows = self.newest = 0

    def close(self) -> None:
        if self._stamps is not None:
            os.close(self._stamps)
            self._stamps = None


class GatedIndex(MemoryIndexSink):
    """The index in memory, as the kind `memory` is."""

    def __init__(self, name: str, *, gate: str = "") -> None:
        super().__init__(name)
        self._gate = gate

    def open(self) -> None:
        pass_gate(self._gate)


class GatedCache(CacheSink):
    """The cache in Redis, as the kind `cache` is."""

    def __init__(self, name: str, *, url: str, gate: str = "") -> None:
        super().__init__(name, url=url)
        self._gate = gate

    def open(self) -> None:
        pass_gate(self._gate)
        super().open()


def pass_gate(gate: str) -> None:
    if gate and not Path(gate).exists():
        raise Unavailable("the gate is shut")
