"""Registers of vectors: the last writer wins.

What was merged into a vector's components, existence and metadata; see `merge` for what that means.

Most vectors are set whole, so a vector has one stamp, that of the greatest CREATE or DENSE, which
is that of every component that nobody wrote since. A vector of which a few components have others,
as SPARSE came later, has a row of those (`sparse_stamps`). One of which that does not tell enough
(SPARSE came in another order, or often; a late CREATE finds components newer; a fold of operations
changes some) has a row in a second table with a stamp for each component. Both last until a CREATE
or DENSE outdoes them all. A vector with operations, of which every component is looked at again
and again, has no row of a few.

The same stamp says since when a vector is alive, and that of its metadata if that was a CREATE
without any; what else there is to say of some vectors only, when they were deleted and which
metadata they have, is kept *aside*, in a further table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.delta import Op
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.ledger import Ledger
from penstock.propagation.fold.sparse_stamps import SparseStamps
from penstock.propagation.fold.table import (
    MEMORY,
    Arena,
    Numbers,
    Space,
    Table,
    distinct,
    spread,
)

# A vector's flags. Its existence; 0: nobody has said anything of it.
ALIVE: Final = 1
DEAD: Final = 2
EXISTENCE: Final = 3
SAID: Final = 4  # what set it whole said that there is no metadata, and nothing is aside
MARK: Final = 8  # scratch
OPERATED: Final = 16  # it has a list of operations
FOLDED: Final = 32  # some of its operations were folded
PACK_MIN: Final = 1 << 20  # bytes set aside below which nobody looks for what was given up
CODES_SMALL: Final = 1 << 16  # origins that two bytes tell apart

Mask = NDArray[np.bool_]


@dataclass(slots=True)
class StampedDeltas:
    """Deltas with the numbers of their vectors, and their stamps: times and codes of writers."""

    batch: DeltaBatch
    vectors: Numbers
    times: Numbers
    writers: Numbers

    def take(self, rows: NDArray[Any]) -> StampedDeltas:
        return StampedDeltas(
            self.batch.take(rows), self.vectors[rows], self.times[rows], self.writers[rows]
        )


class Registers:
    """`table` has a row per vector: its values, the stamp that all of them have, and the numbers
    plus one of its rows in `stamps` and `asides`, which most have not. The number of a row in
    `sparse` is negative, and stands for that in `stamps`."""

    def __init__(self, ledger: Ledger, dimensions: int, space: Space = MEMORY) -> None:
        self.ledger, self.dimensions = ledger, dimensions
        stamp, told = {"time": np.int64, "writer": np.uint16}, {"flags": np.uint8}
        rows = {"stamps": np.int32, "aside": np.int32}
        self.table = Table(
            {"values": (np.float32, dimensions), **stamp, **told, **rows},
            space=space,
            name="registers",
        )
        # `vector` is its owner plus one, 0 for a row that is free.
        each = {"times": (np.int64, dimensions), "writers": (np.uint16, dimensions)}
        self.stamps = Table({"vector": np.int32, **each}, space=space, name="stamps")
        self.free: list[int] = []  # rows of `stamps`
        self.sparse = SparseStamps(dimensions, space)
        self.asides = Table(
            {
                "death_time": np.int64,
                "death_writer": np.uint16,
                "metadata_time": np.int64,
                "metadata_writer": np.uint16,
                "metadata_at": np.int64,
                "metadata_bytes": np.int32,
                "operations_at": np.int64,
                "operations_bytes": np.int32,
            },
            space=space,
            name="asides",
        )
        self.words = Arena(space=space, name="words")  # metadata and operations
        self._pack_at = PACK_MIN

    @property
    def nbytes(self) -> int:
        tables = (self.table, self.stamps, self.sparse.table, self.asides)
        return sum(table.nbytes for table in tables) + self.words.end

    def widen(self) -> None:
        if len(self.ledger.ranks) > CODES_SMALL and self.table["writer"].dtype == np.uint16:
            for table in (self.table, self.stamps, self.sparse.table, self.asides):
                for name in table.names():
                    if table[name].dtype == np.uint16:
                        table.widen(name, np.uint32)

    # --- many deltas ---

    def set(self, rows: StampedDeltas, fresh: Mask) -> None:
        """Offer deltas, ascending by stamp, to the registers. `fresh`: which have a greater time
        than anything that their vector was given before, so that no component is compared."""
        self.widen()
        newest = bool(fresh.all())
        op = rows.batch.op
        whole, gone = op <= Op.DENSE, op == Op.DELETE
        texts = rows.batch.fixed["metadata_bytes"] > 0
        speaking = whole | gone | texts
        if speaking.any():
            self._tell(rows, whole=whole, texts=texts, newest=newest)
        if whole.any():
            self._set_rows(rows if whole.all() else rows.take(whole), fresh[whole])
        few = op == Op.SPARSE
        if few.any():
            some, fresh = rows if few.all() else rows.take(few), fresh[few]
            if whole.any():  # than what has just been set, too
                fresh &= some.times > self.table["time"][some.vectors]
            self._set_components(some, fresh)
        if gone.any():
            self._bury(rows.take(gone))
        if speaking.any():
            self._see_who_lives(rows.vectors[whole | gone])

    def _set_rows(self, rows: StampedDeltas, fresh: Mask) -> None:
        vectors, stamps = rows.vectors, self.table["stamps"]
        values = rows.batch.components()[2].reshape(-1, self.dimensions)
        held = stamps[vectors]
        if fresh.all():
            if held.any():
                self._free(vectors[held != 0])
            self._set_whole(rows, values)
            return
        if (held < 0).any():
            self.expand(distinct(vectors[(held < 0) & ~fresh]))
            self._free(vectors[stamps[vectors] < 0])  # which are outdone
        stamped = stamps[vectors] > 0
        newer = self._newer(rows, self.table["time"], self.table["writer"], vectors)
        if stamped.any():
            self._set_stamped(rows.take(stamped), values[stamped], newer[stamped])
            newer &= ~stamped
        if newer.all():
            self._set_whole(rows, values)
        else:
            self._set_whole(rows.take(newer), values[newer])

    def _set_whole(self, rows: StampedDeltas, values: NDArray[np.float32]) -> None:
        """Of two rows of a vector the last stays, which is the newer one."""
        table, vectors = self.table, rows.vectors
        table["time"][vectors], table["writer"][vectors] = rows.times, rows.writers
        table["values"][vectors] = values

    def _set_stamped(self, rows: StampedDeltas, values: NDArray[np.float32], newer: Mask) -> None:
        """Set whole vectors of which each component has a stamp; `newer` than the vector's own."""
        table, stamps, ranks = self.table, self.stamps, self.ledger.ranks
        vectors = rows.vectors
        at = table["stamps"][vectors] - 1
        time, writer = rows.times[:, None], rows.writers[:, None]
        before, old = stamps["times"][at], stamps["writers"][at]
        wins = (time > before) | ((time == before) & (ranks[writer] > ranks[old]))
        # Of two rows of a vector the last stays; where it is not the newer one, the old value is.
        table["values"][vectors] = np.where(wins, values, table["values"][vectors])
        stamps["times"][at] = np.where(wins, time, before)
        stamps["writers"][at] = np.where(wins, writer, old)
        table["time"][vectors[newer]] = rows.times[newer]
        table["writer"][vectors[newer]] = rows.writers[newer]
        self._free(vectors[wins.all(axis=1)])

    def _set_components(self, rows: StampedDeltas, fresh: Mask) -> None:
        _, indices, values = rows.batch.components()
        n = rows.batch.n.astype(np.int64)
        writes = _Writes(rows.vectors, rows.times, rows.writers, n, indices, values)
        if not fresh.all():
            self._set_each(self._without_late(writes.take(~fresh)), newest=False)
            writes = writes.take(fresh)
        if not len(writes.vectors):
            return
        held = self.table["stamps"][writes.vectors]
        rows_known = np.where(held < 0, -1 - held, -1)
        nth, before, fits = self.sparse.places(writes.vectors, rows_known, writes.n)
        fits &= held <= 0
        fits &= (self.table["flags"][writes.vectors] & OPERATED) == 0
        if fits.all():
            self._set_few(writes, nth, before)
        else:
            self._set_each(writes.take(~fits), newest=True)
            if fits.any():
                self._set_few(writes.take(fits), nth[fits], before[fits])

    def _set_few(self, writes: _Writes, nth: Numbers, before: Numbers) -> None:
        """Set components of vectors that have no stamp for each of them."""
        stamps, vectors = self.table["stamps"], writes.vectors
        lacking = stamps[vectors] == 0
        if lacking.any():
            new = vectors[lacking & (nth == 0)]
            stamps[new] = -1 - self.sparse.add(new)
        self.sparse.append(
            -1 - stamps[vectors].astype(np.int64), nth, before, times=writes.times,
            writers=writes.writers, indices=writes.indices, n=writes.n,
        )  # fmt: skip
        place = spread(vectors * self.dimensions, writes.n)
        place += writes.indices
        self.table["values"].reshape(-1)[place] = writes.values

    def _set_each(self, writes: _Writes, *, newest: bool) -> None:
        """Set components that have a stamp each, from now on at least."""
        lacking = self.table["stamps"][writes.vectors] <= 0
        if lacking.any():
            self.expand(distinct(writes.vectors[lacking]))
        indices, values, n = writes.indices, writes.values, writes.n
        row = self.table["stamps"][writes.vectors].astype(np.int64) - 1
        place = spread(row * self.dimensions, n)
        place += indices
        value_place = spread(writes.vectors * self.dimensions, n)
        value_place += indices
        each = _Stamps(spread(writes.times, n), spread(writes.writers, n))
        times, writers = self.stamps["times"].reshape(-1), self.stamps["writers"].reshape(-1)
        if not newest:
            newer = self._newer(each, times, writers, place)
            if not newer.all():
                place, value_place, values = place[newer], value_place[newer], values[newer]
                each = _Stamps(each.times[newer], each.writers[newer])
        # Where a component is named twice the last assignment stays: that of the greater stamp.
        times[place] = each.times
        writers[place] = each.writers
        self.table["values"].reshape(-1)[value_place] = values

    def _without_late(self, writes: _Writes) -> _Writes:
        """Leave out what is older than all components of its vector."""
        table = self.table
        late = table["stamps"][writes.vectors] == 0
        late &= ~self._newer(writes, table["time"], table["writer"], writes.vectors)
        return writes.take(~late) if late.any() else writes

    def _newer(
        self,
        rows: StampedDeltas | _Stamps | _Writes,
        times: Numbers,
        writers: Numbers,
        place: Numbers,
    ) -> Mask:
        """Which stamps are greater than those that registers have at these places."""
        before, ranks, writer = times[place], self.ledger.ranks, rows.writers
        newer: Mask = rows.times > before
        if not newer.all():
            tied = np.flatnonzero(rows.times == before)
            newer[tied] = ranks[writer[tied]] > ranks[writers[place[tied]]]
        return newer

    # --- a stamp for each component ---

    def expand(self, vectors: Numbers) -> None:
        """Give vectors rows of stamps, each once; they have none, or a few."""
        if not len(vectors):
            return
        stamps, table = self.stamps, self.table
        few = -1 - table["stamps"][vectors].astype(np.int64)
        used = min(len(self.free), len(vectors))
        rows = np.empty(len(vectors), np.int64)
        if used:
            rows[:used] = self.free[-used:]
            del self.free[-used:]
        first = stamps.extend(len(vectors) - used)
        rows[used:] = np.arange(first, stamps.count)
        stamps["vector"][rows] = vectors + 1
        table["stamps"][vectors] = rows + 1
        times, writers = table["time"][vectors], table["writer"][vectors]
        if used:
            again = rows[:used]
            stamps["times"][again] = times[:used, None]
            stamps["writers"][again] = writers[:used, None]
        if times[used:].any():  # else new rows are those of nobody, as they are
            stamps["times"][first : stamps.count] = times[used:, None]
            stamps["writers"][first : stamps.count] = writers[used:, None]
        some = np.flatnonzero(few >= 0)
        if len(some):
            columns = stamps["times"].reshape(-1), stamps["writers"].reshape(-1)
            self.sparse.replay(few[some], rows[some] * self.dimensions, *columns)
            self.sparse.release(few[some])

    def _free(self, vectors: Numbers) -> None:
        held = distinct(self.table["stamps"][vectors]).astype(np.int64)
        self.table["stamps"][vectors] = 0
        rows = held[held > 0] - 1
        self.stamps["vector"][rows] = 0
        self.free += rows.tolist()
        self.sparse.release(-1 - held[held < 0])

    def stamps_of(self, vector: int) -> tuple[Numbers, NDArray[Any]]:
        """Times and writers of a vector's components. A component that nobody set comes before
        every stamp: its time is 0."""
        table, row = self.table, int(self.table["stamps"][vector]) - 1
        if row >= 0:
            return self.stamps["times"][row], self.stamps["writers"][row]
        width = self.dimensions
        times = np.full(width, table["time"][vector])
        writers = np.full(width, table["writer"][vector])
        if row < -1:
            self.sparse.replay_one(-2 - row, times, writers)
        return times, writers

    def component_stamps(self, vectors: Numbers) -> tuple[Numbers, NDArray[Any]]:
        """The same for many, a row each."""
        table, width = self.table, self.dimensions
        times = np.repeat(table["time"][vectors][:, None], width, axis=1)
        writers = np.repeat(table["writer"][vectors][:, None], width, axis=1)
        held = table["stamps"][vectors].astype(np.int64)
        some = np.flatnonzero(held > 0)
        rows = held[some] - 1
        times[some], writers[some] = self.stamps["times"][rows], self.stamps["writers"][rows]
        few = np.flatnonzero(held < 0)
        self.sparse.replay(-1 - held[few], few * width, times.reshape(-1), writers.reshape(-1))
        return times, writers

    # --- what is said of a vector as a whole ---

    def _tell(self, rows: StampedDeltas, *, whole: Mask, texts: Mask, newest: bool) -> None:
        """Bring metadata up to date, before any vector's own stamp changes. A vector of which this
        batch has nothing but CREATE without metadata keeps nothing aside, if it did not before."""
        op, vectors, flags = rows.batch.op, rows.vectors, self.table["flags"]
        told = (op == Op.CREATE) | (op == Op.DELETE) | texts
        alone = self.table["aside"][vectors] == 0
        newer = np.ones(len(op), np.bool_)
        if not newest:
            newer = self._newer(rows, self.table["time"], self.table["writer"], vectors)
        plain = (op == Op.CREATE) & ~texts & alone & newer
        other = (whole | told) & ~plain
        if other.any():
            if plain.any():
                some = vectors[other]
                flags[some] |= MARK
                plain &= (flags[vectors] & MARK) == 0
                flags[some] &= ~np.uint8(MARK)
            silenced = whole & newer & ((flags[vectors] & SAID) > 0)
            leaving = alone & ~plain & (told | silenced)
            if leaving.any():
                self._set_aside(distinct(vectors[leaving]))
            self._say(rows.take(told & ~plain))
        flags[vectors[plain]] |= SAID

    def _set_aside(self, vectors: Numbers) -> None:
        """Give vectors rows aside, each once; they have none."""
        table, asides = self.table, self.asides
        first = asides.extend(len(vectors))
        table["aside"][vectors] = np.arange(first + 1, asides.count + 1)
        said = (table["flags"][vectors] & SAID) > 0
        asides["metadata_time"][first : asides.count] = np.where(said, table["time"][vectors], 0)
        asides["metadata_writer"][first : asides.count] = np.where(
            said, table["writer"][vectors], 0
        )
        table["flags"][vectors] &= ~np.uint8(SAID)

    def aside_of(self, vector: int) -> int:
        """A vector's row aside, a new one if it has none."""
        if not self.table["aside"][vector]:
            self._set_aside(np.array([vector]))
        return int(self.table["aside"][vector]) - 1

    def _say(self, rows: StampedDeltas) -> None:
        asides = self.asides
        at = self.table["aside"][rows.vectors].astype(np.int64) - 1
        newer = self._newer(rows, asides["metadata_time"], asides["metadata_writer"], at)
        if not newer.all():
            rows, at = rows.take(newer), at[newer]
        if not len(at):
            return
        asides["metadata_time"][at], asides["metadata_writer"][at] = rows.times, rows.writers
        texts = rows.batch.metadata_of(np.arange(len(at)))
        self.put_metadata(at, texts)

    def put_metadata(self, at: Numbers, texts: list[bytes]) -> None:
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        start = self.words.append(b"".join(texts))
        self.asides["metadata_at"][at] = start + np.cumsum(sizes) - sizes
        self.asides["metadata_bytes"][at] = sizes
        self.pack_when_due()

    def pack_when_due(self) -> None:
        """Drop the bytes that were given up, once they are half of all."""
        if self.words.end <= self._pack_at:
            return
        asides = self.asides
        kinds = ("metadata", "operations")
        sizes = np.concatenate([asides.rows(f"{kind}_bytes") for kind in kinds]).astype(np.int64)
        if 2 * int(sizes.sum()) <= self.words.end:
            starts = np.concatenate([asides.rows(f"{kind}_at") for kind in kinds])
            kept = self.words.take(starts, sizes)
            self.words.replace(kept.blob)
            ends = np.cumsum(sizes)
            for number, kind in enumerate(kinds):
                some = slice(number * asides.count, (number + 1) * asides.count)
                asides[f"{kind}_at"][: asides.count] = (ends - sizes)[some]
        self._pack_at = max(PACK_MIN, 2 * self.words.end)

    def _bury(self, rows: StampedDeltas) -> None:
        asides = self.asides
        at = self.table["aside"][rows.vectors].astype(np.int64) - 1
        newer = self._newer(rows, asides["death_time"], asides["death_writer"], at)
        asides["death_time"][at[newer]] = rows.times[newer]
        asides["death_writer"][at[newer]] = rows.writers[newer]

    def _see_who_lives(self, vectors: Numbers) -> None:
        table, asides, ranks = self.table, self.asides, self.ledger.ranks
        flags = table["flags"]
        state = np.full(len(vectors), ALIVE, np.uint8)
        some = np.flatnonzero(table["aside"][vectors])
        if len(some):
            at, known = table["aside"][vectors[some]] - 1, vectors[some]
            death, life = asides["death_time"][at], table["time"][known]
            later = ranks[asides["death_writer"][at]] > ranks[table["writer"][known]]
            state[some[(death > life) | ((death == life) & later)]] = DEAD
        flags[vectors] = (flags[vectors] & ~np.uint8(EXISTENCE)) | state

    def metadata_of(self, vectors: Numbers, *, hidden: Mask) -> Binary:
        """Of each vector, empty where it has none or is hidden."""
        if not self.asides.count:
            return Binary(np.zeros(len(vectors) + 1, np.int32), b"")
        at = self.table["aside"][vectors].astype(np.int64) - 1
        has = (at >= 0) & ~hidden
        sizes = np.where(has, self.asides["metadata_bytes"][at], 0)
        return self.words.take(np.where(has, self.asides["metadata_at"][at], 0), sizes)

    def existence_stamps(self, vectors: Numbers) -> tuple[Numbers, Numbers]:
        table, asides = self.table, self.asides
        at = table["aside"][vectors].astype(np.int64) - 1
        dead = (table["flags"][vectors] & DEAD) > 0
        time = np.where(dead, asides["death_time"][at], table["time"][vectors])
        return time, np.where(dead, asides["death_writer"][at], table["writer"][vectors])

    def metadata_stamps(self, vectors: Numbers) -> tuple[Numbers, Numbers]:
        table, asides = self.table, self.asides
        at = table["aside"][vectors].astype(np.int64) - 1
        said = (table["flags"][vectors] & SAID) > 0
        time = np.where(said, table["time"][vectors], 0)
        writer = np.where(said, table["writer"][vectors], 0)
        has = at >= 0
        return (
            np.where(has, asides["metadata_time"][at], time),
            np.where(has, asides["metadata_writer"][at], writer),
        )

    # --- as a snapshot says ---

    def put_stamps(self, vectors: Numbers, some: Numbers, columns: tuple[Numbers, ...]) -> None:
        """Give some of the vectors, each once, the times and writers of their components, and the
        others none."""
        self._free(vectors[self.table["stamps"][vectors] != 0])
        if len(some):
            self.expand(some)
            rows = self.table["stamps"][some] - 1
            self.stamps["times"][rows], self.stamps["writers"][rows] = columns

    def put_sparse(self, some: Numbers, columns: dict[str, NDArray[Any]]) -> None:
        """Give vectors that have no stamps of components, each once, a few."""
        rows = self.sparse.add(some)
        self.table["stamps"][some] = -1 - rows
        for name, column in columns.items():
            self.sparse.table[name][rows] = column

    def put_asides(self, vectors: Numbers, some: Numbers, columns: dict[str, Numbers]) -> None:
        """Keep aside of some of the vectors, each once, what the columns say, and of the others
        nothing that their own stamps do not say."""
        table, asides = self.table, self.asides
        known = vectors[table["aside"][vectors] > 0]
        rows = table["aside"][known] - 1
        for name in asides.names():
            asides[name][rows] = 0
        said = (table["flags"][known] & SAID) > 0
        asides["metadata_time"][rows] = np.where(said, table["time"][known], 0)
        asides["metadata_writer"][rows] = np.where(said, table["writer"][known], 0)
        table["flags"][known] &= ~np.uint8(SAID)
        self._set_aside(some[table["aside"][some] == 0])
        for name, column in columns.items():
            asides[name][table["aside"][some] - 1] = column

    def validate(self) -> None:
        table, stamps = self.table, self.stamps
        rows = table.rows("stamps")
        owners, few = np.flatnonzero(rows > 0), np.flatnonzero(rows < 0)
        assert (stamps["vector"][rows[owners] - 1] == owners + 1).all(), "stamps of another vector"
        assert len(owners) + len(self.free) == stamps.count, "a row of stamps is lost"
        assert (self.sparse.table["vector"][-1 - rows[few]] == few + 1).all(), "of another vector"
        assert len(few) + len(self.sparse.free) == self.sparse.table.count, "a row is lost"
        self.sparse.validate()
        owners = np.flatnonzero(rows)
        times, writers = self.component_stamps(owners)
        own = table["time"][owners][:, None], table["writer"][owners][:, None]
        assert (times >= own[0]).all(), "a component is older than the vector"
        same = (times == own[0]) & (writers == own[1])
        assert not same.all(axis=1).any(), "a row of stamps is of no use"
        asides = table.rows("aside")
        assert sorted(asides[asides > 0].tolist()) == list(range(1, self.asides.count + 1))
        assert not (table.rows("flags") & MARK).any(), "a mark was left behind"


class _Stamps(NamedTuple):
    times: Numbers
    writers: Numbers


class _Writes(NamedTuple):
    """Components of vectors, those of each behind one another, with their stamps."""

    vectors: Numbers
    times: Numbers
    writers: Numbers
    n: Numbers
    indices: NDArray[np.uint16]
    values: NDArray[np.float32]

    def take(self, rows: Mask) -> _Writes:
        each = spread(rows, self.n)
        return _Writes(
            self.vectors[rows], self.times[rows], self.writers[rows], self.n[rows],
            self.indices[each], self.values[each],
        )  # fmt: skip
