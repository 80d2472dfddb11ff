"""Deltas that the fold could not place, on their way to `<topic>-quarantine`.

It is a sink like any other, ordered, with a cursor of its own; the pipeline brings it along. A
partition's quarantined deltas are numbered like its released ones, and that numbers their letters.
A delta that is sent to its topic again is a new message there; should it fail again, it gets a new
number and a new letter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from penstock.errors import Unsupported
from penstock.sinks import letters
from penstock.sinks.protocol import Feed, Work

NAME: Final = "_quarantine"  # no configured sink can be called so


class Quarantine:
    """Takes the quarantine sections as `Work.deltas`."""

    name = NAME
    feed = Feed.DELTAS
    ordered = True

    def __init__(self, box: letters.LetterBox) -> None:
        self._box = box

    def open(self) -> None:
        return

    def write(self, work: Work) -> None:
        table = work.deltas
        if table is None:
            return
        self._box.post(
            table,
            to=letters.quarantine_topic,
            pipeline=work.pipeline,
            purpose="quarantine",
            reasons=list(_reasons(table)),
        )

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise Unsupported("the quarantine is a queue: it holds deltas, not vectors")

    def reset(self) -> None:
        raise Unsupported("the quarantine is a queue: purge its topic instead")

    def close(self) -> None:
        return


def _reasons(table: pa.Table) -> Iterator[dict[str, str]]:
    rows = zip(table["reason"].to_pylist(), table["missing"].to_pylist(), strict=True)
    for reason, missing in rows:
        yield {letters.REASON: reason} | ({letters.MISSING: missing.hex()} if missing else {})
