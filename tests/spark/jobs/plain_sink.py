"""A sink as users write them: no part in tasks, no pieces, and only this process can import it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import scanned_rows

MAKE = "create table if not exists v (n text, i text, r int, d int, x blob, m, primary key (n, i))"
PUT = "insert into v values (?, ?, ?, ?, ?, ?) on conflict do update set r = excluded.r, d ="
PUT += " excluded.d, x = excluded.x, m = excluded.m where excluded.r > v.r"
NAMES = ["namespace", "vector_id", "revision", "deleted", "vector", "metadata"]


class PlainSink:
    feed = Feed.STATES
    ordered = False

    def __init__(self, name: str, *, path: str) -> None:
        self.name, self._path = name, path

    def open(self) -> None:
        self._rows = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        self._rows.execute(MAKE)

    def write(self, work: Work) -> None:
        if work.states is not None:
            rows = zip(*(work.states[name].to_pylist() for name in NAMES), strict=True)
            bits = [(*row[:4], np.array(row[4], np.float32).tobytes(), row[5]) for row in rows]
            self._rows.executemany(PUT, bits)

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        for n, i, r, x, m in self._rows.execute("select n, i, r, x, m from v where not d"):
            yield scanned_rows([(n, i, np.frombuffer(x, np.float32), m, r)])

    def reset(self) -> None:
        self._rows.execute("delete from v")

    def close(self) -> None:
        self._rows.close()
