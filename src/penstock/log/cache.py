"""Recently written and read batches in memory, bounded by bytes.

A message that was just enqueued is delivered from here, without touching the disk. The cache is
asked on the event loop and by reader threads alike, hence the lock, which is only held for
dictionary steps.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Final

from penstock.model.batch import Batch

_OVERHEAD: Final = 512  # of the objects round a body


class BatchCache:
    """Least recently used first out; keyed by a batch's first sequence."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._lock = Lock()
        self._batches: OrderedDict[int, Batch] = OrderedDict()

    def get(self, first: int) -> Batch | None:
        with self._lock:
            batch = self._batches.get(first)
            if batch is not None:
                self._batches.move_to_end(first)
            return batch

    def put(self, batch: Batch) -> None:
        with self._lock:
            old = self._batches.pop(batch.first, None)
            if old is not None:
                self.bytes -= len(old.body) + _OVERHEAD
            self._batches[batch.first] = batch
            self.bytes += len(batch.body) + _OVERHEAD
            while self.bytes > self.bytes_max and self._batches:
                _, out = self._batches.popitem(last=False)
                self.bytes -= len(out.body) + _OVERHEAD

    def forget(self, first: int, last: int) -> None:
        """Drop every batch that begins in `[first, last]`."""
        with self._lock:
            for key in [key for key in self._batches if first <= key <= last]:
                self.bytes -= len(self._batches.pop(key).body) + _OVERHEAD
