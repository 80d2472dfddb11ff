"""Messages out of the log: payloads stay there and are read when they are delivered."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from itertools import accumulate, count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, NotFound
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.columns import Buffer, Columns, Value
from penstock.model.entries import DELIVERY
from penstock.model.plain import faults_of

_BINARY: Final = ("key", "headers", "payload")
_TIME: Final = struct.Struct("<q")
_OVERHEAD: Final = 2048  # bytes of the objects round an opened batch
_COPIED_MAX: Final = 300  # entries that are copied out at once: lists and bytes are picked faster


class _Decoded:
    """A batch opened for picking messages. One that is what was written, as its CRC says, and yet
    holds no columns has empty messages, and `fault` says why."""

    __slots__ = ("cells", "fault", "first", "last", "places", "priority", "size", "time_ms")

    def __init__(self, batch: Batch) -> None:
        self.first, self.last, self.time_ms = batch.first, batch.last, batch.time_ms
        self.size = _OVERHEAD
        self.fault = ""
        self.priority: Sequence[int] | None = None
        self.cells: dict[str, _Slices] = {}  # by column; a message lacks what is not here
        self.places: dict[int, int] | None = None
        try:
            columns = batch.columns()
            columns.validate()
        except Corruption as error:
            self.fault = error.message
        else:
            self._open(batch, columns)

    def _open(self, batch: Batch, columns: Columns) -> None:
        self.size = len(columns.body) + _OVERHEAD
        priority = columns.views.get("priority")
        self.priority = priority
        if priority is not None and len(priority) <= _COPIED_MAX:
            self.priority = priority.tolist()
        self.cells = {n: _slices(columns, n) for n in _BINARY if n in columns.views}
        if batch.compacted:
            sequences = columns.fixed("sequence").tolist()
            self.places = {sequence: i for i, sequence in enumerate(sequences)}

    def place(self, sequence: int) -> int:
        if self.places is None:
            return sequence - self.first
        place = self.places.get(sequence)
        if place is None:
            raise NotFound(f"message {sequence} was compacted away")
        return place

    @property
    def bytes(self) -> int:
        return sum([ends[-1] for ends, _ in self.cells.values()])

    def only(self, sequences: list[int]) -> _Decoded:
        """A copy with just these messages, in this order, that does not hold on to the batch."""
        places = [self.place(sequence) for sequence in sequences]
        some = copy(self)
        some.priority = None if self.priority is None else [self.priority[p] for p in places]
        some.cells = {name: _copied(slices, places) for name, slices in self.cells.items()}
        some.places = None
        return some


_Slices = tuple[Sequence[int], Buffer]  # offsets, and the blob that they point into
_Picks = list[tuple[_Decoded, list[int]]]  # batches, and the entries wanted of each


def _slices(columns: Columns, name: str) -> _Slices:
    ends = columns.views[name]
    if len(ends) > _COPIED_MAX:
        return ends, columns.blobs[name]
    return ends.tolist(), bytes(columns.blobs[name])


def _copied(slices: _Slices, places: list[int]) -> _Slices:
    values = [bytes(value) for value in _picked(slices, places)]
    return list(accumulate(map(len, values), initial=0)), b"".join(values)


def _picked(slices: _Slices | None, places: list[int]) -> list[Buffer]:
    if slices is None:
        return [b""] * len(places)
    ends, blob = slices
    return [blob[ends[place] : ends[place + 1]] for place in places]


class MessageRows:
    __slots__ = ("picks", "sequences")

    def __init__(self, sequences: list[int], picks: _Picks) -> None:
        self.sequences, self.picks = sequences, picks

    def faults(self) -> dict[int, str]:
        """By row, why it cannot be read: a log may be older than the checks of today."""
        found: dict[int, str] = {}
        row = 0
        for batch, places in self.picks:
            if batch.fault:
                found |= dict.fromkeys(range(row, row + len(places)), f"body: {batch.fault}")
            elif "headers" in batch.cells:
                values = [bytes(value) for value in _picked(batch.cells["headers"], places)]
                for at, fault in faults_of(values).items():
                    found[row + at] = f"headers: {fault.text}"
            row += len(places)
        return found

    def exceed(self, bytes_max: int) -> bool:
        """Whether the keys, headers and payloads are more than this. The batches that hold them
        nearly always answer that; else the messages are looked at."""
        left = bytes_max - sum([batch.size for batch, _ in self.picks])
        if left >= 0:
            return False
        left = bytes_max
        for batch, places in self.picks:
            for ends, _ in batch.cells.values():
                left -= sum([ends[place + 1] - ends[place] for place in places])
        return left < 0

    def encode(self, attempts: NDArray[np.uint32]) -> bytes:
        times: list[bytes] = []
        priorities: list[int] = []
        for batch, places in self.picks:
            times.append(_TIME.pack(batch.time_ms) * len(places))
            if batch.priority is None:
                priorities += [0] * len(places)
            else:
                priorities += map(batch.priority.__getitem__, places)
        values: dict[str, Value | None] = {
            "message": np.array(self.sequences, np.uint64),
            "time_ms": np.frombuffer(b"".join(times), np.int64),
            "priority": priorities,
            "attempts": attempts if attempts.any() else None,
        }
        for name in _BINARY:
            if name == "payload" or any(name in batch.cells for batch, _ in self.picks):
                values[name] = self._column(name)
        return DELIVERY.encode(len(self.sequences), values)

    def _column(self, name: str) -> list[Buffer]:
        values: list[Buffer] = []
        for batch, places in self.picks:
            values += _picked(batch.cells.get(name), places)
        return values


class ReadCache:
    """Opened batches of a node, bounded by bytes: the order of priority visits each many times."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._held: OrderedDict[tuple[int, int], _Decoded] = OrderedDict()

    def get(self, owner: int, first: int) -> _Decoded | None:
        found = self._held.get((owner, first))
        if found is not None:
            self._held.move_to_end((owner, first))
        return found

    def put(self, owner: int, decoded: _Decoded) -> None:
        self.drop(owner, decoded.first)
        self._held[owner, decoded.first] = decoded
        self._bytes += decoded.size
        while self._bytes > self._bytes_max:
            _, out = self._held.popitem(last=False)
            self._bytes -= out.size

    def drop(self, owner: int, first: int) -> None:
        old = self._held.pop((owner, first), None)
        if old is not None:
            self._bytes -= old.size

    def drop_all(self, owner: int) -> None:
        for held, first in list(self._held):
            if held == owner:
                self.drop(held, first)


class MessageReader:
    _owners = count()

    def __init__(self, log: PartitionLog, cache: ReadCache) -> None:
        self._log, self._cache = log, cache
        self._owner = next(self._owners)

    def gather(self, sequences: list[int]) -> MessageRows | None:
        """The messages in the order asked for; None if one is not in memory."""
        picks: _Picks = []
        places: list[int] = []
        batch, first, last = None, 1, 0
        for sequence in sequences:
            if batch is None or not first <= sequence <= last:
                batch = self._batch(sequence, guess=last + 1)
                if batch is None:
                    return None
                first, last = batch.first, batch.last
                places = []
                picks.append((batch, places))
            places.append(sequence - first if batch.places is None else batch.place(sequence))
        return MessageRows(sequences, picks)

    def load(self, sequences: list[int], bytes_max: int | None = None) -> MessageRows | None:
        """`gather` from wherever they are; blocks, so it runs in a thread. None if several of them
        are more than `bytes_max`, which is found before all of them are read. The messages are
        taken out of their batches, which may be too many for the memory, or to be open at once."""
        left = bytes_max
        found: dict[int, tuple[_Decoded, int]] = {}
        wanted = sorted(sequences)
        at = 0
        while at < len(wanted):
            batch = self._log.reader.read(wanted[at], nowait=False)
            assert batch is not None
            end = bisect_right(wanted, batch.last)
            some = _Decoded(batch).only(wanted[at:end])
            if left is not None and len(wanted) > 1:
                left -= some.bytes
                if left < 0:
                    return None
            found.update((sequence, (some, i)) for i, sequence in enumerate(wanted[at:end]))
            at = end
        picks = [(some, [i]) for some, i in map(found.__getitem__, sequences)]
        return MessageRows(sequences, picks)

    def forget(self) -> None:
        """The log's files changed (compaction), or the partition is closed."""
        self._cache.drop_all(self._owner)

    def _batch(self, sequence: int, *, guess: int) -> _Decoded | None:
        """The batch of a message; `guess` is where it begins if it follows the one before."""
        found = self._cache.get(self._owner, guess)
        if found is not None and found.first <= sequence <= found.last:
            return found
        first = self._log.reader.first_of(sequence)
        found = None if first is None else self._cache.get(self._owner, first)
        # After a rewrite an older, shorter batch may still be here under the same first sequence.
        if found is None or sequence > found.last:
            batch = self._log.reader.read(sequence, nowait=True)
            if batch is None:
                return None
            found = _Decoded(batch)
            self._cache.put(self._owner, found)
        return found
