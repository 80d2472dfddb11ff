"""Messages on their way in: checked against the topic, then laid out as the columns of an ENQ body.

Both listeners reduce what they were sent to `Entries`, a list per column. `check` finds the first
value over its limit with a few passes over whole columns, and names it as the caller wrote it;
nothing reaches the log before it has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.partitioning import partitions_of, partitions_of_deltas
from penstock.model.topic import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    RETRIES_MAX,
    TopicConfig,
    TopicKind,
)

FRAME_SLACK: Final = 64 << 10  # for offsets, numbers and the control message of a frame
SEQUENCE_MAX: Final = (1 << 63) - 1
_ENQ: Final = SCHEMAS[Kind.ENQ]
_pack: Final = msgspec.msgpack.Encoder(order="sorted").encode


class Run(NamedTuple):
    """Entries that one producer numbered `sequence`, `sequence + 1`, …"""

    entries: int
    epoch: int
    sequence: int
    producer: bytes


class Entries(NamedTuple):
    """Columns of equal length; None stands for a column of defaults."""

    payloads: Sequence[bytes]
    priorities: Sequence[int]
    keys: Sequence[bytes] | None = None
    headers: Sequence[bytes] | None = None  # msgpack maps, or empty
    delays_ms: Sequence[int] | None = None
    max_retries: Sequence[int] | None = None  # -1: the topic's default
    runs: Sequence[Run] = ()

    def body(self) -> bytes:
        """The ENQ body."""
        runs = self.runs
        return _ENQ.encode(
            len(self.payloads),
            {
                "priority": np.fromiter(self.priorities, np.int64, len(self.payloads)),
                "delay_ms": self.delays_ms,
                "max_retries": self.max_retries,
                "key": self.keys,
                "headers": self.headers,
                "payload": self.payloads,
                "run_count": [run.entries for run in runs] if runs else None,
                "run_epoch": [run.epoch for run in runs] if runs else None,
                "run_sequence": [run.sequence for run in runs] if runs else None,
                "run_producer": [run.producer for run in runs] if runs else None,
            },
            runs=len(runs),
        )

    @property
    def size(self) -> int:
        """Nearly the bytes of the body, without making it."""
        columns = (self.payloads, self.keys or (), self.headers or ())
        return sum(sum(map(len, column)) for column in columns) + 40 * len(self.payloads)

    def check(self, config: TopicConfig, *, names: str = "messages[{}].{}") -> None:
        """Raise `InvalidArgument` for the first value over its limit. `names` makes its name."""
        if len(self.payloads) > BATCH_ENTRIES_MAX:
            raise InvalidArgument(
                f"{len(self.payloads)} messages in one batch, at most {BATCH_ENTRIES_MAX}",
                field="messages",
                limit=BATCH_ENTRIES_MAX,
            )
        _check_sizes(self.payloads, config.payload_bytes_max, names, "payload")
        _check_sizes(self.keys, KEY_BYTES_MAX, names, "key")
        _check_sizes(self.headers, HEADERS_BYTES_MAX, names, "headers")
        _check_range(self.delays_ms, (0, DELAY_MS_MAX), names, "delay_ms")
        _check_range(self.max_retries, (-1, RETRIES_MAX), names, "max_retries")

    def partition(self, config: TopicConfig) -> int:
        """The one partition all entries belong to, for a call that names its last sequence."""
        if config.partitions == 1:
            return 0
        found = set(self._partitions(config).tolist())
        if len(found) != 1:
            raise InvalidArgument(
                "expected_sequence needs messages whose keys (or vectors) share a partition",
                field="expected_sequence",
            )
        return int(found.pop())

    def _partitions(self, config: TopicConfig) -> NDArray[np.int64]:
        """Where the entries belong; none if one of them belongs nowhere by itself."""
        if config.kind is TopicKind.DELTA:
            return partitions_of_deltas(self.payloads, config.partitions)
        keys = self.keys or ()
        return partitions_of(keys, config.partitions) if all(keys) else np.empty(0, np.int64)


def producer_run(producer_id: str, *, epoch: int, seq: int | None, count: int) -> Run | None:
    """The run of a request that carries a producer key; None when it carries none."""
    if seq is not None and seq > SEQUENCE_MAX - count:
        raise InvalidArgument("seq is too large", field="seq", limit=SEQUENCE_MAX - count)
    if epoch > SEQUENCE_MAX:
        raise InvalidArgument("epoch is too large", field="epoch", limit=SEQUENCE_MAX)
    if not producer_id:
        if seq is not None:
            raise InvalidArgument("seq needs a producer_id", field="producer_id")
        return None
    producer = producer_id.encode()
    if len(producer) > PRODUCER_ID_BYTES_MAX:
        raise InvalidArgument(
            f"producer_id has {len(producer)} bytes, at most {PRODUCER_ID_BYTES_MAX}",
            field="producer_id",
            limit=PRODUCER_ID_BYTES_MAX,
        )
    if seq is None:
        raise InvalidArgument("producer_id needs a seq", field="seq")
    return Run(count, epoch, seq, producer)


def packed_headers(headers: Mapping[str, str]) -> bytes:
    return _pack(dict(headers)) if headers else b""


def _check_sizes(values: Sequence[bytes] | None, limit: int, names: str, field: str) -> None:
    if values and max(map(len, values)) > limit:
        at, size = next((i, len(v)) for i, v in enumerate(values) if len(v) > limit)
        name = names.format(at, field)
        raise InvalidArgument(f"{name} has {size} bytes, at most {limit}", field=name, limit=limit)


def _check_range(
    values: Sequence[int] | None, bounds: tuple[int, int], names: str, field: str
) -> None:
    low, high = bounds
    if values and (min(values) < low or max(values) > high):
        at, value = next((i, v) for i, v in enumerate(values) if not low <= v <= high)
        name = names.format(at, field)
        raise InvalidArgument(
            f"{name} is {value}, must be from {max(low, 0)} to {high}", field=name, limit=high
        )
