"""Messages out of the log: payloads stay there and are read when they are delivered."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import NotFound
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.columns import Binary, Buffer
from penstock.model.delivery import DELIVERY

_DECODED_MAX: Final = 512  # decoded batches kept; they are views into the log's own cache


class _Decoded:
    """A batch opened for picking single messages out of it."""

    __slots__ = ("first", "headers", "keys", "last", "payloads", "places", "priority", "time_ms")

    def __init__(self, batch: Batch) -> None:
        columns = batch.columns()
        self.first, self.last, self.time_ms = batch.first, batch.last, batch.time_ms
        self.priority: list[int] = columns.fixed("priority").tolist()
        self.payloads = _slices(columns.binary("payload"))
        self.keys = _slices(columns.binary("key"))
        self.headers = _slices(columns.binary("headers"))
        self.places: dict[int, int] | None = None
        if batch.compacted:
            sequences = columns.fixed("sequence").tolist()
            self.places = {sequence: i for i, sequence in enumerate(sequences)}

    def place(self, sequence: int) -> int:
        if self.places is None:
            return sequence - self.first
        if sequence not in self.places:
            raise NotFound(f"message {sequence} was compacted away")
        return self.places[sequence]


class _Slices:
    __slots__ = ("blob", "ends")

    def __init__(self, cell: Binary) -> None:
        self.blob: Buffer = cell.blob
        self.ends: list[int] = cell.offsets.tolist()

    def __getitem__(self, i: int) -> Buffer:
        return self.blob[self.ends[i] : self.ends[i + 1]]


def _slices(cell: Binary | None) -> _Slices | None:
    return None if cell is None else _Slices(cell)


class Rows:
    """Messages gathered from the log, as columns."""

    __slots__ = ("headers", "keys", "payloads", "priorities", "sequences", "times_ms")

    def __init__(self, sequences: list[int]) -> None:
        self.sequences = sequences
        self.times_ms: list[int] = []
        self.priorities: list[int] = []
        self.payloads: list[Buffer] = []
        self.keys: list[Buffer] = []
        self.headers: list[Buffer] = []

    def encode(self, attempts: NDArray[np.uint32]) -> bytes:
        """The rows as a DELIVERY body."""
        return DELIVERY.encode(
            len(self.sequences),
            {
                "message": np.array(self.sequences, np.uint64),
                "time_ms": np.array(self.times_ms, np.int64),
                "priority": np.array(self.priorities, np.int64),
                "attempts": attempts if attempts.any() else None,
                "key": self.keys if any(self.keys) else None,
                "headers": self.headers if any(self.headers) else None,
                "payload": self.payloads,
            },
        )


class MessageReader:
    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._decoded: OrderedDict[int, _Decoded] = OrderedDict()

    def gather(self, sequences: list[int], *, nowait: bool) -> Rows | None:
        """The messages in the order asked for; None if `nowait` and one is not in memory."""
        rows = Rows(sequences)
        priorities, times = rows.priorities.append, rows.times_ms.append
        payloads, keys, headers = rows.payloads.append, rows.keys.append, rows.headers.append
        batch: _Decoded | None = None
        for sequence in sequences:
            if batch is None or not batch.first <= sequence <= batch.last:
                batch = self._batch(sequence, nowait)
                if batch is None:
                    return None
            place = batch.place(sequence)
            priorities(batch.priority[place])
            times(batch.time_ms)
            payloads(b"" if batch.payloads is None else batch.payloads[place])
            keys(b"" if batch.keys is None else batch.keys[place])
            headers(b"" if batch.headers is None else batch.headers[place])
        return rows

    def warm(self, sequences: list[int]) -> None:
        """Bring the messages' batches into memory; blocks, so it runs in a thread."""
        for sequence in sequences:
            self._log.read(sequence, nowait=False)

    def forget(self) -> None:
        """The log's files changed under the cache (compaction)."""
        self._decoded.clear()

    def _batch(self, sequence: int, nowait: bool) -> _Decoded | None:
        batch = self._log.read(sequence, nowait=nowait)
        if batch is None:
            return None
        found = self._decoded.get(batch.first)
        if found is None:
            found = self._decoded[batch.first] = _Decoded(batch)
            if len(self._decoded) > _DECODED_MAX:
                self._decoded.popitem(last=False)
        return found
