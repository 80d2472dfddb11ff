"""Deltas that a sink passed on to a topic, held against what the log released: each of them once.

A remote topic holds the deltas themselves, and perhaps others from elsewhere; a queue of notices
holds nothing but notices. Both are read from their logs, whatever consumers have done since, and
compared by delta id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import Unsupported
from penstock.model.batch import Batch
from penstock.sinks.notify import Notice
from penstock.spark.fold.log_deltas import deltas_of
from penstock.spark.jobs.differences import Comparison
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.rows import pieces

Ids = NDArray[np.void]  # sixteen bytes each
_ID: Final = np.dtype([("low", "<u8"), ("high", "<u8")])
_notices: Final = msgspec.msgpack.Decoder(Notice)


def compare_forwarded(released: Sequence[pa.Table], held: Ids, *, only_ours: bool) -> Comparison:
    """`held` are the ids in the destination; if it has `only_ours`, others do not belong there."""
    ids = [np.frombuffer(_bytes(table["delta_id"]), _ID) for table in released]
    expected = np.concatenate([np.empty(0, _ID), *ids])
    found = Comparison(expected=len(expected), compared=len(held))
    distinct, times = np.unique(held, return_counts=True)
    missing = expected[~np.isin(expected, distinct)]
    found.differ("missing", map(_named, missing), len(missing), "behind")
    ours = np.isin(distinct, expected)
    twice = distinct[ours & (times > 1)]
    found.differ("twice", map(_named, twice), len(twice))
    if only_ours:
        extra = distinct[~ours]
        found.differ("extra", map(_named, extra), len(extra), "ahead")
    return found


def delta_ids(access: NodeAccess, topic: str) -> Ids:
    """The ids of all deltas in a delta topic."""

    def ids(batches: Sequence[Batch]) -> Ids:
        deltas = deltas_of(pieces(batches, first=0, last=1 << 62))
        return np.ascontiguousarray(deltas.delta_id).view(_ID).reshape(-1)

    return _read(access, topic, ids)


def notice_ids(access: NodeAccess, topic: str) -> Ids:
    """The ids that the notices in a queue topic speak of."""

    def ids(batches: Sequence[Batch]) -> Ids:
        payloads = [p for batch in batches for p in batch.columns().binary("payload") or ()]
        return np.frombuffer(b"".join(_notices.decode(p).delta_id for p in payloads), _ID)

    return _read(access, topic, ids)


def _read(access: NodeAccess, topic: str, ids: Callable[[Sequence[Batch]], Ids]) -> Ids:
    found = [np.empty(0, _ID)]
    for status in access.log_status(topic):
        if status.sequence_first > 1:
            raise Unsupported(f"the log of {topic} no longer goes back to its beginning")
        last = status.readable
        for batches in access.read_range(topic, status.partition, 1, last):
            if any(batch.compacted for batch in batches):
                raise Unsupported(f"the log of {topic} was compacted: settled messages are gone")
            found.append(ids(batches))
    return np.concatenate(found)


def _bytes(column: Any) -> bytes:
    return b"".join(_chunks(column))


def _chunks(column: pa.ChunkedArray) -> Iterator[bytes]:
    """The values of a fixed-size binary column one behind the other."""
    for chunk in column.chunks:
        width = chunk.type.byte_width
        data = chunk.buffers()[1]
        yield bytes(data[chunk.offset * width : (chunk.offset + len(chunk)) * width])


def _named(one: Any) -> dict[str, str]:
    return {"delta_id": one.tobytes().hex()}
