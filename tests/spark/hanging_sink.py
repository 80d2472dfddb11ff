"""A sink whose tasks hang until a file is there. Executors are sent this module."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from penstock.sinks.protocol import Feed, InTasks, Work

HANGS_S_MAX = 240.0


class HangingSink(InTasks):
    feed = Feed.STATES
    ordered = False

    def __init__(self, name: str, *, path: str) -> None:
        self.name, self._path = name, Path(path)

    def open(self) -> None:
        return

    def write(self, work: Work) -> None:
        deadline = time.monotonic() + HANGS_S_MAX
        while not self._path.exists():
            assert time.monotonic() < deadline, "nobody let it go on"
            time.sleep(0.05)

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return
