"""Merge one released delta into the state of its vector, as `merge` does with columns.

Most deltas are stamped after everything that was merged into their vector: then every register
they name is theirs, and nothing has to be compared.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.model.delta_format import Op
from penstock.propagation.merge import Merge
from penstock.propagation.operations import Operation
from penstock.propagation.quick_row import WIDE, Row
from penstock.propagation.registers import ALIVE, DEAD

_CREATE: Final = int(Op.CREATE)
_DENSE: Final = int(Op.DENSE)
_SPARSE: Final = int(Op.SPARSE)
_SCALE: Final = int(Op.SCALE)
_OFFSET: Final = int(Op.OFFSET)
_DELETE: Final = int(Op.DELETE)
PROBES: Final = 16  # components looked at for one that was set before an operation


class QuickMerge:
    def __init__(self, merge: Merge) -> None:
        self._merge, self._registers, self._operations = merge, merge.registers, merge.operations
        self._ledger, self._width = merge.ledger, merge.registers.dimensions
        self._probes = range(min(PROBES, self._width))
        self._touched: dict[int, None] = {}

    @property
    def version(self) -> int:
        """Grows when views are out of date."""
        return self._merge.table.version + self._registers.table.version

    @property
    def room(self) -> int:
        """Vectors that there may be before anything moves."""
        return min(self._merge.table.capacity, self._registers.table.capacity)

    def prepare(self, count: int) -> None:
        """Make room for so many vectors more, and look at the arrays that there are then."""
        merge, registers = self._merge, self._registers
        merge.reserve()
        registers.table.reserve(count)
        merge.table.reserve(count)
        registers.widen(len(self._ledger.codes))
        view = registers.table.view
        self._values: Any = view("values")  # of floats, which a memoryview is not known to have
        self._times, self._writers = view("times"), view("writers")
        self._existence = view("existence")
        self._said = {
            name: (view(f"{name}_time"), view(f"{name}_writer"))
            for name in ("existence", "metadata")
        }
        view = merge.table.view
        self._revision, self._newest, self._lane = view("revision"), view("time"), view("lane")
        self._sequence, self._log_time_ms = view("sequence"), view("log_time_ms")

    def reserve(self) -> None:
        """Enter the vectors that came since; there is room."""
        self._merge.reserve()

    def merge(self, row: Row) -> bool:
        """Merge a delta, unless it has to be taken with care: then nothing has happened."""
        op, vector, time = row.op, row.vector, row.time
        newest = time > self._newest[vector]
        operations = self._operations
        if vector in operations.folds and (time, row.origin) <= operations.folds[vector]:
            return False
        if op == _SPARSE:
            if row.n > WIDE:
                if not newest:
                    return False
                self._set_many(row)
            elif newest:
                self._set(row)
            else:
                self._offer(row)
            if vector in operations.lists:
                self._prune(vector)
        elif op <= _DENSE:
            if not newest:
                return False
            self._set_all(row)
        elif op in (_SCALE, _OFFSET):
            if operations.count(vector) >= operations.operations_max:
                return False
            self._operate(row)
            if not newest:
                operations.prune(vector, self._ledger.ranks)
        elif op == _DELETE and self._say("existence", row):
            self._existence[vector] = DEAD
        if op != _SPARSE and (row.metadata_bytes or op in (_CREATE, _DELETE)):
            self._set_metadata(row)
        self._count(row, newest)
        return True

    def _prune(self, vector: int) -> None:
        """Drop operations that were overwritten, unless it is plain that none was."""
        times, first = self._times, vector * self._width
        for operation in self._operations.lists[vector]:
            time, named = operation.time, operation.indices
            for index in self._probes if named is None else named[:PROBES].tolist():
                if times[first + index] < time:
                    break
            else:
                self._operations.prune(vector, self._ledger.ranks)
                return

    def _set(self, row: Row) -> None:
        values, times, writers = self._values, self._times, self._writers
        first, time, code = row.vector * self._width, row.time, row.code
        for index, value in zip(row.indices, row.values):  # type: ignore[arg-type] # noqa: B905
            place = first + index
            values[place], times[place], writers[place] = value, time, code

    def _offer(self, row: Row) -> None:
        """Set the components that were not set by a greater stamp."""
        times, writers, ranks = self._times, self._writers, self._ledger.ranks
        first, time, code = row.vector * self._width, row.time, row.code
        assert row.indices is not None
        for index, value in zip(row.indices, row.values, strict=True):
            place = first + index
            before = times[place]
            if time > before or (time == before and ranks[code] > ranks[writers[place]]):
                self._values[place], times[place], writers[place] = value, time, code

    def _set_many(self, row: Row) -> None:
        table, vector, named = self._registers.table, row.vector, row.indices
        table["values"][vector][named] = row.values
        table["times"][vector][named] = row.time
        table["writers"][vector][named] = row.code

    def _set_all(self, row: Row) -> None:
        table, vector = self._registers.table, row.vector
        table["values"][vector] = row.values
        table["times"][vector] = row.time
        table["writers"][vector] = row.code
        self._operations.lists.pop(vector, None)  # they were all stamped before it
        if self._say("existence", row):
            self._existence[vector] = ALIVE

    def _operate(self, row: Row) -> None:
        operation = Operation(
            row.time,
            self._ledger.origin_name(row.code),
            row.code,
            row.op == _SCALE,
            None if row.indices is None else np.array(row.indices, np.uint16),
            np.array(row.values, np.float32),
        )
        self._operations.add(row.vector, operation)

    def _set_metadata(self, row: Row) -> None:
        if not self._say("metadata", row):
            return
        if row.metadata_bytes:
            self._registers.metadata[row.vector] = row.metadata()
        else:
            self._registers.metadata.pop(row.vector, None)

    def _say(self, name: str, row: Row) -> bool:
        """Stamp a register, unless that of a greater stamp."""
        times, writers = self._said[name]
        vector, time, code = row.vector, row.time, row.code
        before, ranks = times[vector], self._ledger.ranks
        if time < before or (time == before and ranks[code] <= ranks[writers[vector]]):
            return False
        times[vector], writers[vector] = time, code
        return True

    def _count(self, row: Row, newest: bool) -> None:
        vector = row.vector
        self._revision[vector] += 1
        if newest:
            self._newest[vector] = row.time
        # What was merged before came before, so these are maxima too.
        self._sequence[vector], self._log_time_ms[vector] = row.sequence, row.time_ms
        if self._merge.noting:
            self._touched[vector] = None
            if row.priority < self._lane[vector]:
                self._lane[vector] = row.priority

    def finish(self) -> None:
        """Note the vectors that were changed."""
        if self._touched:
            self._merge.touched.append(np.array(list(self._touched), np.int64))
            self._touched.clear()
