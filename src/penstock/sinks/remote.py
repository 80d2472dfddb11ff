"""The remote sink: another node's delta topic gets every delta, byte for byte.

The destination folds the same deltas to the same vectors, whatever its partitions are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from penstock.errors import Unsupported
from penstock.sinks.forward import Forwarder
from penstock.sinks.protocol import Feed, Items, TopicWriter, Work


class RemoteSink:
    feed = Feed.DELTAS | Feed.PAYLOADS
    ordered = True

    def __init__(
        self, name: str, *, writer: TopicWriter, topic: str | None = None, pipeline: str = ""
    ) -> None:
        self.name = name
        self._writer = writer
        self._forwarder = Forwarder(
            name, writer, topic=lambda source: topic or source, items=messages
        )

    def open(self) -> None:
        """The writer connects when it is first needed."""

    def write(self, work: Work) -> None:
        self._forwarder.forward(work)

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise Unsupported("another node's topic is audited there")

    def reset(self) -> None:
        raise Unsupported("another node's log cannot be emptied from here")

    def close(self) -> None:
        self._writer.close()


def messages(deltas: pa.Table) -> Items:
    """The deltas as they were sent."""
    return Items(
        sequences=deltas["ordinal"].to_numpy(),
        payloads=deltas["payload"].combine_chunks(),
        headers=deltas["headers"].combine_chunks(),
    )
