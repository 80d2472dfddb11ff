"""Admit, order and merge a few deltas, one row at a time.

The columns of `order` and `merge` cost about the same for one row as for a thousand. A node folds
what was just committed, which is a row or ten: here each is read from its payload with plain
numbers (`DeltaRow`), and entered into the very same tables.

Only what is plainly in order is taken: a sound delta that is a duplicate, or whose causes were all
released, of a vector that nothing waits for. At the first row that is anything else the fold by
rows stops, and the columns take the rest. As a fold does not depend on how a log is cut, nobody can
tell which of the two a delta went through.

Most deltas are stamped after everything that was merged into their vector: then every register
they name is theirs, and nothing has to be compared.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from operator import lt
from typing import Any, Final

import numpy as np

from penstock.model.columns import Buffer
from penstock.model.delta import CLOCK, HAS_INDICES, HAS_PARENT, HEADER, TIME_MAX, Op, PriorityClass
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import shapes
from penstock.propagation.fold.ledger import CHANGED, PENDING, WAITS, Ledger, Waitlist
from penstock.propagation.fold.merge import Merge
from penstock.propagation.fold.registers import ALIVE, DEAD, FOLDED, OPERATED, SAID
from penstock.propagation.fold.table import KeyView, views

WIDE: Final = 32  # values above which arrays are quicker than numbers
# The header and the delta's own clock entry: ids as two numbers, without version and source.
_FIXED: Final = struct.Struct("<xBBxHBBQQQQ16sqQQHHI16xQ")
_HEADER: Final = HEADER.size
_CLOCK: Final = CLOCK.size
_OPS: Final = len(Op)
_PRIORITIES: Final = len(PriorityClass)


class DeltaRow:
    """The row at hand: one object is read into again and again."""

    __slots__ = (
        "_at", "_blob", "_dimensions", "_least", "_most", "_start", "chain", "clocks", "code",
        "counter", "flags", "high", "indices", "low", "metadata_bytes", "n", "namespace_bytes",
        "op", "origin", "parent_high", "parent_low", "priority", "sequence", "time", "time_ms",
        "values", "vector", "vector_high", "vector_id_bytes", "vector_low",
    )  # fmt: skip

    indices: Sequence[int] | None  # or an array, as `values`, if there are many
    values: Sequence[float]
    vector: int  # numbers in the ledger
    chain: int
    code: int
    sequence: int
    time_ms: int

    def __init__(self, dimensions: int) -> None:
        least, most = shapes(dimensions)
        self._dimensions, self._least, self._most = dimensions, least.tolist(), most.tolist()

    def read(self, blob: Buffer, start: int) -> bool:
        """Read a payload whose sizes are right; says whether it has the shape of a delta."""
        (
            op, self.priority, n, clocks, flags, self.low, self.high, self.parent_low,
            self.parent_high, self.origin, time, self.vector_low, self.vector_high,
            self.namespace_bytes, self.vector_id_bytes, self.metadata_bytes, self.counter,
        ) = _FIXED.unpack_from(blob, start)  # fmt: skip
        self._blob, self._start, self._at = blob, start, start + _HEADER + _CLOCK * clocks
        self.op, self.n, self.clocks, self.flags, self.time = op, n, clocks, flags, time
        if op >= _OPS or self.priority >= _PRIORITIES or not 1 <= time <= TIME_MAX:
            return False
        shape = op | (flags & HAS_INDICES) << 2
        if not self._least[shape] <= n <= self._most[shape]:
            return False
        if n > WIDE:
            return self._read_many(n, indexed=bool(flags & HAS_INDICES))
        return self._read_few(n, indexed=bool(flags & HAS_INDICES))

    def _read_few(self, n: int, *, indexed: bool) -> bool:
        numbers = _numbers(n, indexed).unpack_from(self._blob, self._at)
        self.indices, self.values = None, numbers
        if indexed:
            indices, self.values = numbers[:n], numbers[n:]
            self.indices = indices
            if indices[-1] >= self._dimensions or not all(map(lt, indices, indices[1:])):
                return False
        total = sum(self.values)
        return bool(total - total == 0)  # a number that is not finite leaves a trace in the sum

    def _read_many(self, n: int, *, indexed: bool) -> bool:
        at, self.indices = self._at, None
        if indexed:
            indices = np.frombuffer(self._blob, "<u2", n, at)
            self.indices, at = indices, at + 2 * n  # type: ignore[assignment]
            if indices[-1] >= self._dimensions or not (indices[1:] > indices[:-1]).all():
                return False
        values = np.frombuffer(self._blob, "<f4", n, at)
        self.values = values  # type: ignore[assignment]
        return bool(np.isfinite(values).all())

    def causes(self) -> Iterator[tuple[Any, ...]]:
        """The clock entries (origin, counter) but the delta's own."""
        return CLOCK.iter_unpack(self._blob[self._start + _HEADER + _CLOCK : self._at])

    def index_bytes(self) -> bytes:
        return bytes(self._blob[self._at : self._at + 2 * self.n])

    def names(self) -> tuple[bytes, bytes]:
        start = self._names_at()
        middle = start + self.namespace_bytes
        return bytes(self._blob[start:middle]), bytes(
            self._blob[middle : middle + self.vector_id_bytes]
        )

    def metadata(self) -> bytes:
        start = self._names_at() + self.namespace_bytes + self.vector_id_bytes
        return bytes(self._blob[start : start + self.metadata_bytes])

    def _names_at(self) -> int:
        return int(self._at + self.n * (4 + (self.flags & HAS_INDICES)))


@cache  # at most as many as there may be numbers, twice
def _numbers(n: int, indexed: bool) -> struct.Struct:
    return struct.Struct(f"<{n}H{n}f" if indexed else f"<{n}f")


_CREATE: Final = int(Op.CREATE)
_DENSE: Final = int(Op.DENSE)
_SPARSE: Final = int(Op.SPARSE)
_SCALE: Final = int(Op.SCALE)
_OFFSET: Final = int(Op.OFFSET)
_DELETE: Final = int(Op.DELETE)
PROBES: Final = 16  # components looked at for one that was set before an operation
ROWS_MAX: Final = 64  # of a feed: with more the columns are quicker
CHAINS_FEW: Final = 8
NEVER: Final = 1 << 63


class RowFold:
    def __init__(self, ledger: Ledger, waitlist: Waitlist, merge: Merge) -> None:
        self.ledger, self.waitlist, self._merge = ledger, waitlist, merge
        self._registers, self._operations = merge.registers, merge.operations
        self._width = merge.registers.dimensions
        self._probes = range(min(PROBES, self._width))
        self._row = DeltaRow(self._width)
        # Rows that the tables have room for where they lie; 0: the columns may have moved them.
        self.left = 0

    def take(
        self, batch: DeltaBatch, sequences: list[int], times_ms: list[int]
    ) -> tuple[int, list[int]]:
        """Take rows up to the first that is not plain; which that is, and which were released. The
        others are duplicates. Log times do not step back."""
        if self.left < len(sequences):
            self._look(len(sequences))
        self.left -= len(sequences)
        overdue = self._overdue() if self.waitlist.by_id else NEVER
        stop, released, vectors = 0, list[int](), dict[int, None]()
        row, blob, dedup_ms = self._row, batch.blob, self.ledger.dedup_ms
        for number, start in enumerate(batch.starts.tolist()):
            row.time_ms = times_ms[number]
            if row.time_ms >= overdue or not row.read(blob, start):
                break
            entry = self._ids.find(row.low, row.high)
            if entry < 0:
                entry = self._ids.put(row.low, row.high)
            state = self._id_states[entry]
            if state <= 0 or self._id_times[entry] < row.time_ms - dedup_ms:
                row.sequence = sequences[number]
                if state == PENDING or not (self._ready(row) and self._take_in(row)):
                    break
                self._release(row, entry)
                released.append(number)
                vectors[row.vector] = None
            stop = number + 1
        if stop:
            self.ledger.time_ms = times_ms[stop - 1]
        if vectors and self._merge.noting:
            self._merge.touched.append(np.array(list(vectors), np.int64))
        return stop, released

    def _overdue(self) -> int:
        """The log time at which something that waits is to be turned out."""
        waitlist = self.waitlist
        if len(waitlist) > waitlist.pending_max:
            return 0
        eldest = waitlist.eldest()
        return NEVER if eldest is None else eldest.log_time_ms + waitlist.pending_ms

    def _look(self, count: int) -> None:
        """Make room for so many rows, and take views of where the tables lie then."""
        ledger, merge, registers = self.ledger, self._merge, self._registers
        merge.reserve()
        registers.widen()
        chains = ledger.chains
        growing = (ledger.ids, ledger.vectors, chains.table, chains.further, merge.table)
        sparse = registers.sparse
        own = (registers.table, registers.stamps, sparse.table, registers.asides)
        self.left = min(table.reserve(count) for table in (*growing, *own))
        self._ids, self._vectors = KeyView(ledger.ids), KeyView(ledger.vectors)
        self._further = KeyView(chains.further)
        (self._further_chains,) = views(chains.further.table, "chain")
        self._id_states, self._id_times = views(ledger.ids.table, "vector", "log_time_ms")
        self._order_flags, self._first = views(ledger.vectors.table, "flags", "chain")
        self._chain_origins, self._next, self._seen, self._chain_times, self._heads = views(
            chains.table, "high", "next", "seen", "time", "head"
        )
        self._values, self._time, self._writer, self._flags = views(
            registers.table, "values", "time", "writer", "flags"
        )
        self._stamps, self._asides = views(registers.table, "stamps", "aside")
        self._owners, self._times, self._writers = views(
            registers.stamps, "vector", "times", "writers"
        )
        self._writes_max, self._names_max = sparse.writes_max, sparse.names_max
        self._few_owners, self._few_counts, self._few_sizes = views(
            sparse.table, "vector", "count", "size"
        )
        self._few_times, self._few_writers, self._few_ends = views(
            sparse.table, "times", "writers", "ends"
        )
        self._few_names = sparse.table["names"].reshape(-1).view(np.uint8).data
        self._rows = registers.table["values"]
        self._row_stamps = [registers.stamps[name] for name in ("times", "writers")]
        self._said = {
            name: views(registers.asides, f"{name}_time", f"{name}_writer")
            for name in ("death", "metadata")
        }
        self._texts = views(registers.asides, "metadata_at", "metadata_bytes")
        self._revision, self._newest, self._sequence, self._log_time_ms, self._lane = views(
            merge.table, "revision", "time", "sequence", "log_time_ms", "lane"
        )

    # --- order ---

    def _ready(self, row: DeltaRow) -> bool:
        """Whether all causes were released, and nothing of the vector waits. Vectors and chains are
        entered on sight: they count from their first release on."""
        vector = self._vectors.find(row.vector_low, row.vector_high)
        if vector < 0:
            vector = self._new_vector(row)
        code = self.ledger.codes.get(row.origin)
        if code is None or self._order_flags[vector] & WAITS:
            return False
        chain = self._first[vector] - 1
        if chain < 0 or self._chain_origins[chain] != code:
            chain = self._find_chain(vector, code)
            if chain < 0:
                chain = self._new_chain(vector, code)
        row.vector, row.chain, row.code = vector, chain, code
        if row.counter != self._seen[chain] + 1:
            return False
        if row.clocks > 1 and not self._causes_seen(row):
            return False
        last = self._chain_times[chain]
        if row.time <= last:
            row.time = last + 1  # an origin's later delta stays the later one
        return not row.flags & HAS_PARENT or self._parent_released(row)

    def _new_vector(self, row: DeltaRow) -> int:
        ledger = self.ledger
        vector = self._vectors.put(row.vector_low, row.vector_high)
        namespace, vector_id = row.names()
        ledger.names.add(namespace, vector_id)
        self._merge.reserve()
        return vector

    def _find_chain(self, vector: int, code: int) -> int:
        """A vector's chain, or -1. It has few of them: going through those is the quickest."""
        origins, following = self._chain_origins, self._next
        chain: int = self._first[vector] - 1
        for _ in range(CHAINS_FEW):
            if chain < 0 or origins[chain] == code:
                return chain
            chain = following[chain] - 1
        entry = self._further.find(vector, code)
        return -1 if entry < 0 else int(self._further_chains[entry])

    def _new_chain(self, vector: int, code: int) -> int:
        table = self.ledger.chains.table
        chain = table.count
        table.count = chain + 1
        table["low"][chain], self._chain_origins[chain] = vector, code
        first = self._first[vector] - 1
        if first < 0:
            self._first[vector] = chain + 1
        else:
            self._further.find(vector, code)  # its place
            self._further_chains[self._further.put(vector, code)] = chain
            self._next[chain], self._next[first] = self._next[first], chain + 1
        return chain

    def _causes_seen(self, row: DeltaRow) -> bool:
        codes, vector = self.ledger.codes, row.vector
        for origin, counter in row.causes():
            code = codes.get(origin)
            chain = -1 if code is None else self._find_chain(vector, code)
            if chain < 0 or self._seen[chain] < counter:
                return False
        return True

    def _parent_released(self, row: DeltaRow) -> bool:
        low, high, heads, at = row.parent_low, row.parent_high, self._heads, 2 * row.chain
        if heads[at] == low and heads[at + 1] == high:
            return True
        entry = self._ids.find(low, high)
        if entry < 0 or self._id_states[entry] != row.vector + 1:
            return False
        recent: bool = self._id_times[entry] >= row.time_ms - self.ledger.dedup_ms
        return recent

    def _release(self, row: DeltaRow, entry: int) -> None:
        chain, at = row.chain, 2 * row.chain
        self._seen[chain], self._chain_times[chain] = row.counter, row.time
        self._heads[at], self._heads[at + 1] = row.low, row.high
        self._id_states[entry], self._id_times[entry] = row.vector + 1, row.time_ms
        if entry < self.ledger.ids_saved:
            self.ledger.ids_changed.add(entry)

    # --- merge ---

    def _take_in(self, row: DeltaRow) -> bool:
        """Merge a delta, unless it has to be taken with care: then nothing has happened."""
        op, vector, time = row.op, row.vector, row.time
        newest = time > self._newest[vector]
        operations, flags = self._operations, self._flags[vector]
        if flags & FOLDED and operations.is_late(vector, time, row.origin):
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
            if flags & OPERATED:
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
                operations.prune(vector)
        if op > _SPARSE and (row.metadata_bytes or op == _DELETE):
            self._set_metadata(row)
        if op == _DELETE:
            self._delete(row)
        self._count(row, newest)
        return True

    def _prune(self, vector: int) -> None:
        """Drop operations that were overwritten, unless it is plain that none was."""
        if self._stamps[vector] < 0:
            self._expand(vector)
        first = (self._stamps[vector] - 1) * self._width
        for operation in self._operations.of(vector):
            time, named = operation.time, operation.indices
            for index in self._probes if named is None else named[:PROBES].tolist():
                before = self._time[vector] if first < 0 else self._times[first + index]
                if before < time:
                    break
            else:
                self._operations.prune(vector)
                return

    def _set(self, row: DeltaRow) -> None:
        vector, time, code, width = row.vector, row.time, row.code, self._width
        first = vector * width
        values = self._values[first : first + width]
        stamps = self._stamps[vector] - 1
        if stamps < 0:
            if self._append(row):
                for index, value in zip(row.indices, row.values):  # type: ignore[arg-type] # noqa: B905
                    values[index] = value
                return
            stamps = self._expand(vector)
        at = stamps * width
        times, writers = self._times[at : at + width], self._writers[at : at + width]
        for index, value in zip(row.indices, row.values):  # type: ignore[arg-type] # noqa: B905
            values[index], times[index], writers[index] = value, time, code

    def _append(self, row: DeltaRow) -> bool:
        """Add a write to the few of its vector, if it fits; there is room for a row of those."""
        held, n, each = self._stamps[row.vector], row.n, self._writes_max
        at = -1 - held
        if held:
            count, size = self._few_counts[at], self._few_sizes[at]
            if count == each:
                return False
        else:
            count = size = 0
        if size + n > self._names_max or self._flags[row.vector] & OPERATED:
            return False
        if not held:
            sparse = self._registers.sparse
            at = sparse.free.pop() if sparse.free else sparse.table.extend(1)
            self._few_owners[at], self._stamps[row.vector] = row.vector + 1, -1 - at
        slot, end = at * each + count, size + n
        self._few_times[slot], self._few_writers[slot], self._few_ends[slot] = (
            row.time, row.code, end,
        )  # fmt: skip
        self._few_counts[at], self._few_sizes[at] = count + 1, end
        first = 2 * at * self._names_max
        self._few_names[first + 2 * size : first + 2 * end] = row.index_bytes()
        return True

    def _expand(self, vector: int) -> int:
        """Give a vector a row of stamps, for which there is room."""
        registers, few = self._registers, -1 - self._stamps[vector]
        row = registers.free.pop() if registers.free else registers.stamps.extend(1)
        self._owners[row], self._stamps[vector] = vector + 1, row + 1
        times, writers = self._row_stamps
        times[row].fill(self._time[vector])
        writers[row].fill(self._writer[vector])
        if few >= 0:
            registers.sparse.replay_one(few, times[row], writers[row])
            self._release_few(few)
        return row

    def _release_few(self, few: int) -> None:
        self._few_owners[few] = self._few_counts[few] = self._few_sizes[few] = 0
        self._registers.sparse.free.append(few)

    def _offer(self, row: DeltaRow) -> None:
        """Set the components that were not set by a greater stamp."""
        times, writers, ranks = self._times, self._writers, self.ledger.ranks
        vector, time, code = row.vector, row.time, row.code
        stamps = self._stamps[vector] - 1
        if stamps < 0:
            if stamps == -1 and not self._is_newer(
                time, code, self._time[vector], self._writer[vector]
            ):
                return
            stamps = self._expand(vector)
        first, at = vector * self._width, stamps * self._width
        assert row.indices is not None
        for index, value in zip(row.indices, row.values, strict=True):
            place = at + index
            before = times[place]
            if time > before or (time == before and ranks[code] > ranks[writers[place]]):
                self._values[first + index], times[place], writers[place] = value, time, code

    def _is_newer(self, time: int, code: int, before: int, writer: int) -> bool:
        ranks = self.ledger.ranks
        return time > before or (time == before and bool(ranks[code] > ranks[writer]))

    def _set_many(self, row: DeltaRow) -> None:
        vector, named = row.vector, row.indices
        self._rows[vector][named] = row.values
        stamps = self._stamps[vector] - 1
        if stamps < 0:
            if self._append(row):
                return
            stamps = self._expand(vector)
        times, writers = self._row_stamps
        times[stamps][named], writers[stamps][named] = row.time, row.code

    def _set_all(self, row: DeltaRow) -> None:
        vector = row.vector
        flags = self._flags[vector]
        if flags & OPERATED:
            self._operations.put(vector, [])  # they were all stamped before it
            flags &= ~OPERATED
        aside = self._asides[vector] - 1
        if row.metadata_bytes or (row.op == _CREATE and aside >= 0):
            self._set_metadata(row)
            flags &= ~SAID
        elif row.op == _CREATE:
            flags |= SAID
        elif flags & SAID:
            self._aside(vector)  # metadata are older than the rest from now on
            flags &= ~SAID
        stamps = self._stamps[vector] - 1
        if stamps >= 0:
            self._owners[stamps] = self._stamps[vector] = 0
            self._registers.free.append(stamps)
        elif stamps < -1:
            self._release_few(-2 - stamps)
            self._stamps[vector] = 0
        self._rows[vector] = row.values
        self._time[vector], self._writer[vector] = row.time, row.code
        self._flags[vector] = flags & ~DEAD | ALIVE

    def _operate(self, row: DeltaRow) -> None:
        self._operations.add(
            row.vector,
            row.time,
            row.code,
            scale=row.op == _SCALE,
            indices=None if row.indices is None else np.array(row.indices, np.uint16),
            values=np.array(row.values, np.float32),
        )

    def _set_metadata(self, row: DeltaRow) -> None:
        aside = self._aside(row.vector)
        if self._say("metadata", aside, row):
            data = row.metadata() if row.metadata_bytes else b""
            at, size = self._texts
            at[aside], size[aside] = self._registers.words.append(data), len(data)
            self._registers.pack_when_due()

    def _aside(self, vector: int) -> int:
        """A vector's row aside, a new one if it has none, for which there is room."""
        row: int = self._asides[vector] - 1
        if row < 0:
            row = self._registers.asides.extend(1)
            self._asides[vector] = row + 1
            if self._flags[vector] & SAID:
                times, writers = self._said["metadata"]
                times[row], writers[row] = self._time[vector], self._writer[vector]
                self._flags[vector] &= ~SAID
        return row

    def _delete(self, row: DeltaRow) -> None:
        vector = row.vector
        if self._say("death", self._asides[vector] - 1, row) and self._is_newer(
            row.time, row.code, self._time[vector], self._writer[vector]
        ):
            self._flags[vector] = self._flags[vector] & ~ALIVE | DEAD

    def _say(self, name: str, aside: int, row: DeltaRow) -> bool:
        """Stamp a register, unless that of a greater stamp."""
        times, writers = self._said[name]
        if not self._is_newer(row.time, row.code, times[aside], writers[aside]):
            return False
        times[aside], writers[aside] = row.time, row.code
        return True

    def _count(self, row: DeltaRow, newest: bool) -> None:
        vector = row.vector
        self._revision[vector] += 1
        self._order_flags[vector] |= CHANGED
        if newest:
            self._newest[vector] = row.time
        # What was merged before came before, so these are maxima too.
        self._sequence[vector], self._log_time_ms[vector] = row.sequence, row.time_ms
        if self._merge.noting and row.priority < self._lane[vector]:
            self._lane[vector] = row.priority
