"""Messages on their way in: checked against the topic, then laid out as the columns of an ENQ body.

Both listeners reduce what they were sent to an `Entry`, or to `GatewayEntries`, a list per column.
`check` finds the first value over its limit with a few passes over whole columns, and names it as
the caller wrote it; nothing reaches the log before it has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    ENQ,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    PRODUCER_NUMBER_MAX,
    RETRIES_MAX,
    EntryRun,
    run_columns,
)
from penstock.model.partitioning import partitions_of, partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind

_DEFAULTS: Final = (b"", b"", 0, -1)  # key, headers, delay, retries: nothing to check
_pack: Final = msgspec.msgpack.Encoder(order="sorted").encode


class Entry(NamedTuple):
    """One message; the fields are the columns of `GatewayEntries`."""

    payload: bytes
    priority: int
    key: bytes
    headers: bytes
    delay_ms: int
    max_retries: int
    run: EntryRun | None

    def check(self, config: TopicConfig, *, bytes_max: int) -> None:
        """Raise `InvalidArgument` for the first value over its limit."""
        payload_bytes_max = min(config.payload_bytes_max, bytes_max)
        if len(self.payload) > payload_bytes_max:
            raise InvalidArgument(
                f"payload has {len(self.payload)} bytes, at most {payload_bytes_max}",
                field="payload",
                limit=payload_bytes_max,
            )
        if self[2:6] != _DEFAULTS:
            GatewayEntries.of((self,)).check(config, names="{1}")


class GatewayEntries(NamedTuple):
    """Columns of equal length; None stands for a column of defaults."""

    payloads: Sequence[bytes]
    priorities: Sequence[int]
    keys: Sequence[bytes] | None = None
    headers: Sequence[bytes] | None = None  # msgpack maps, or empty
    delays_ms: Sequence[int] | None = None
    max_retries: Sequence[int] | None = None  # -1: the topic's default
    runs: Sequence[EntryRun] = ()

    @staticmethod
    def of(entries: Sequence[Entry]) -> GatewayEntries:
        """Entries side by side; columns that hold only defaults are left out."""
        payloads, priorities, keys, headers, delays_ms, retries, runs = zip(*entries, strict=True)
        return GatewayEntries(
            payloads,
            priorities,
            keys if any(keys) else None,
            headers if any(headers) else None,
            delays_ms if any(delays_ms) else None,
            retries if max(retries) >= 0 else None,
            joined_runs(runs) if runs[0] is not None else (),
        )

    def body(self) -> bytes:
        count = len(self.payloads)
        return ENQ.encode(
            count,
            {
                "priority": np.fromiter(self.priorities, np.int64, count),
                "delay_ms": self.delays_ms,
                "max_retries": self.max_retries,
                "key": self.keys,
                "headers": self.headers,
                "payload": self.payloads,
                **run_columns(self.runs),
            },
            runs=len(self.runs),
        )

    @property
    def size(self) -> int:
        """How many bytes the body will have, nearly, without making it."""
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


def producer_run(producer_id: str, *, epoch: int, seq: int | None, count: int) -> EntryRun | None:
    """The run of a request that carries a producer key; None when it carries none."""
    if seq is not None and seq > PRODUCER_NUMBER_MAX - count:
        raise InvalidArgument("seq is too large", field="seq", limit=PRODUCER_NUMBER_MAX - count)
    if epoch > PRODUCER_NUMBER_MAX:
        raise InvalidArgument("epoch is too large", field="epoch", limit=PRODUCER_NUMBER_MAX)
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
    return EntryRun(count, epoch, seq, producer)


def joined_runs(runs: tuple[EntryRun, ...]) -> list[EntryRun]:
    joined = [runs[0]]
    for run in runs[1:]:
        last = joined[-1]
        follows = last.sequence + last.entries == run.sequence
        if follows and (last.producer, last.epoch) == (run.producer, run.epoch):
            joined[-1] = last._replace(entries=last.entries + run.entries)
        else:
            joined.append(run)
    return joined


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
