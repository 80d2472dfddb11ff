"""The notify sink: one small message per released delta in a queue topic.

Its priority is the delta's class, so that consumers of a MIN topic hear of urgent changes first.
A notice says what changed and where to find it, not the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import Unsupported
from penstock.model.delta_format import Op
from penstock.sinks.forward import Forwarder
from penstock.sinks.protocol import Feed, Items, TopicWriter, Work


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What a message of the topic holds, as a msgpack map."""

    topic: str
    partition: int
    sequence: int  # of the delta in its log
    ordinal: int
    namespace: str
    vector_id: str
    op: str
    delta_id: bytes
    origin: str
    time: int


_encoder: Final = msgspec.msgpack.Encoder()
_OPS: Final = {int(op): op.name.lower() for op in Op}
_FIELDS: Final = (
    "topic", "partition", "sequence", "ordinal", "namespace", "vector_id", "op", "delta_id",
    "origin", "time",
)  # fmt: skip


class NotifySink:
    feed = Feed.DELTAS
    ordered = True

    def __init__(
        self, name: str, *, writer: TopicWriter, topic: str | None = None, pipeline: str = ""
    ) -> None:
        self.name = name
        self._writer = writer
        self._forwarder = Forwarder(
            name, writer, topic=lambda source: topic or f"{source}-changes", items=notices
        )

    def open(self) -> None:
        """The writer connects when it is first needed."""

    def write(self, work: Work) -> None:
        self._forwarder.forward(work)

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise Unsupported("a queue holds notices, not vectors")

    def reset(self) -> None:
        raise Unsupported("what consumers were told cannot be taken back")

    def close(self) -> None:
        self._writer.close()


def notices(deltas: pa.Table) -> Items:
    """One message per delta."""
    columns = [deltas[name].to_pylist() for name in _FIELDS]
    payloads = [
        _encoder.encode(
            Notice(
                topic=topic, partition=partition, sequence=sequence, ordinal=ordinal,
                namespace=namespace, vector_id=vector_id, op=_OPS[op], delta_id=delta_id,
                origin=origin, time=time,
            )
        )
        for topic, partition, sequence, ordinal, namespace, vector_id, op, delta_id, origin, time
        in zip(*columns, strict=True)
    ]  # fmt: skip
    return Items(
        sequences=deltas["ordinal"].to_numpy(),
        payloads=pa.array(payloads, pa.binary()),
        priorities=deltas["priority"].to_numpy().astype(np.int64),
    )
