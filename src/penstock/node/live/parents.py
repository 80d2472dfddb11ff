"""Whether the log has a parent from before the fold's memory of ids.

The fold asks when a delta has waited too long for its parent, and stands still until it is
answered; for that, all that the log holds from before this memory may have to be read. So the
parents of all that wait are looked for along with those that are asked for, and nobody's parent is
looked for twice in the same place: however many are missing, the log is read about once in the time
that a delta may wait.
"""

from __future__ import annotations

from typing import Final

from penstock.log.partition import PartitionLog
from penstock.model.delta_log import deltas_of

READ_BYTES: Final = 4 << 20  # of log at once


class Parents:
    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._found: set[bytes] = set()
        self._looked: dict[bytes, int] = {}  # by id: the log before this sequence was looked at

    def find(self, wanted: set[bytes], *, waiting: set[bytes], horizon: int) -> set[bytes]:
        """Those of the wanted that the log has before `horizon`; `waiting` may be wanted soon.

        What is neither is forgotten. Blocks.
        """
        known, first = wanted | waiting, self._log.sequence_first
        self._looked = {id_: max(first, self._looked.get(id_, 0)) for id_ in known}
        self._found &= known
        left = wanted - self._found
        begin = min((self._looked[id_] for id_ in left), default=horizon)
        end = self._read(left, known, begin, horizon)
        for id_, looked in self._looked.items():
            if begin <= looked < end:
                self._looked[id_] = end
        return wanted & self._found

    def _read(self, left: set[bytes], known: set[bytes], at: int, horizon: int) -> int:
        """Look until those that are left are found; returns how far that was."""
        while at < horizon and not left <= self._found:
            batches = self._log.read_slice(
                at, through=horizon - 1, bytes_max=READ_BYTES, nowait=False, staged=True
            )
            if not batches:
                break
            self._found |= known.intersection(deltas_of(batches).delta_ids())
            at = batches[-1].last + 1
        return at
