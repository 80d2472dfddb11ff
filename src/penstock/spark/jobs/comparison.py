"""What differs between the fold and a sink, told by the digests of both.

A task is given all digests of its share of the keys, of both sides, and says what differs as a
`Comparison`; those of all shares are added up. A difference may have *excuses*: the sink is
`behind` the log, or `ahead` of the fold because the log has grown meanwhile, or the vector is in
its dead letters (`dead`). Whether one holds is decided where the sinks' progress is known.

**Vectors.** A row of a lower revision than the fold's is behind, one of a higher revision is ahead.
Two of the same revision must be equal always. A sink that keeps several revisions of a vector is
taken by the highest of them, and is to hold that one with one content.

**Deltas** are found by their place among the released ones, so one that is missing, there twice or
beyond the end is seen by counting.

**Messages** are counted by the id of their delta.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.spark.jobs.digests import (
    COMPARED,
    DEAD,
    DELTA,
    DIGEST,
    EXPECTED,
    HELD,
    STATE,
    Keys,
    content_of,
    keys_in,
)
from penstock.spark.jobs.takers import taken_by
from penstock.spark.jobs.tasks import Parcel, table_of

Excuse = Literal["behind", "ahead", "dead"]
Kind = Literal["vectors", "history", "messages"]
Places = NDArray[np.int64]
SHOWN_MAX: Final = 20  # differences that are described one by one; all are counted
_NAMED: Final = ("namespace", "vector_id")
_SHOWN: Final = ("topic", "partition", "ordinal", "sequence", *_NAMED)
Difference = tuple[frozenset[Excuse], str]


@dataclass
class Comparison:
    """Differences by the excuses that each of them has; one of them is enough."""

    expected: int = 0
    compared: int = 0
    _counts: Counter[Difference] = field(default_factory=Counter)
    _shown: dict[Difference, list[dict[str, Any]]] = field(default_factory=dict)

    def differ(
        self, kind: str, rows: Any, describe: Callable[[Any], dict[str, Any]], *excuses: Excuse
    ) -> None:
        """Count the differing rows, and keep the first of them, as described, for people."""
        if len(rows):
            key = frozenset(excuses), kind
            self._counts[key] += len(rows)
            shown = self._shown.setdefault(key, [])
            shown += ({"kind": kind, **describe(r)} for r in rows[: SHOWN_MAX - len(shown)])

    def add(self, other: Comparison) -> None:
        self.expected += other.expected
        self.compared += other.compared
        self._counts += other._counts
        for key, some in other._shown.items():
            shown = self._shown.setdefault(key, [])
            shown += some[: SHOWN_MAX - len(shown)]

    def wrong(self, excused: Set[Excuse] = frozenset()) -> Counter[str]:
        """The differences by kind that none of the accepted excuses covers."""
        total = Counter[str]()
        for (excuses, kind), count in self._counts.items():
            if not excuses & excused:
                total[kind] += count
        return total

    def pending(self, excused: Set[Excuse]) -> int:
        return self._counts.total() - self.wrong(excused).total()

    def shown(self, excused: Set[Excuse] = frozenset()) -> list[dict[str, Any]]:
        """The first of the differences without an excuse."""
        found = [one for (e, _), some in self._shown.items() if not e & excused for one in some]
        return found[:SHOWN_MAX]

    def to_dict(self, excused: Set[Excuse] = frozenset()) -> dict[str, Any]:
        document: dict[str, Any] = {"expected": self.expected, "compared": self.compared}
        if pending := self.pending(excused):
            document["pending"] = pending
        if wrong := self.wrong(excused):
            document |= {"differences": dict(wrong), "first_differences": self.shown(excused)}
        return document


def total(found: Iterable[Comparison]) -> Comparison:
    whole = Comparison()
    for one in found:
        whole.add(one)
    return whole


def compare_share(
    parcels: Iterable[Parcel], *, kind: Kind, taker: int, others: bool = False
) -> Iterator[Comparison]:
    """One task: `taker` is the sink's number among the takers of expected rows. With `others` the
    sink may rightly hold messages of which nothing is expected."""
    tables = [table_of(one) for one in parcels]
    rows = pa.concat_tables(tables) if tables else DIGEST.empty_table()
    rows = rows.filter(pa.array(taken_by(rows["takers"].to_numpy(), taker)))
    yield compare(rows, kind=kind, others=others)


def compare(rows: pa.Table, *, kind: Kind, others: bool = False) -> Comparison:
    side = rows["side"].to_numpy()
    expected, held, dead = (rows.filter(pa.array(side == one)) for one in (EXPECTED, HELD, DEAD))
    if kind == "vectors":
        return compare_states(expected, held, dead=keys_in(dead))
    if kind == "history":
        return compare_deltas(expected, held)
    return compare_messages(keys_in(expected), keys_in(held), others=others)


def find_sorted(held: NDArray[Any], wanted: NDArray[Any]) -> Places:
    """Where each value stands among those held, which ascend; -1: nowhere."""
    at = np.searchsorted(held, wanted)
    at[at == len(held)] = -1
    if len(held):
        at[held[at] != wanted] = -1
    return at


def _shower(rows: pa.Table, *names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda row: {name: rows[name][int(row)].as_py() for name in names}


# --- vectors ---


def compare_states(expected: pa.Table, held: pa.Table, *, dead: Keys) -> Comparison:
    """`dead`: vectors that the sink once refused."""
    return _States(_newest(expected), _present(held), dead).compare()


def _newest(rows: pa.Table) -> pa.Table:
    """Of a vector that two topics have, sinks keep the higher revision."""
    keys, revisions = keys_in(rows), rows["revision"].to_numpy()
    order = np.lexsort((revisions, keys))
    last = np.ones(len(order), np.bool_)
    last[:-1] = keys[order][1:] != keys[order][:-1]
    return rows.take(pa.array(order[last]))


def _present(held: pa.Table) -> pa.Table:
    """The living rows of a sink. One that keeps several revisions says which are deleted."""
    several = held["deleted"].is_valid().to_numpy()
    if not several.all():
        return held
    keys, revisions = keys_in(held), held["revision"].to_numpy()
    deleted = held["deleted"].to_numpy()
    contents = np.array(held["content"].to_pylist(), np.object_)
    order = np.lexsort((revisions, keys))
    _, group = np.unique(keys[order], return_inverse=True)
    greatest = np.zeros(group.max(initial=-1) + 1, np.int64)
    np.maximum.at(greatest, group, revisions[order])
    newest = order[revisions[order] == greatest[group]]
    met: set[tuple[bytes, bytes, bool]] = set()
    kept = []
    for row in newest.tolist():
        same = bytes(keys[row]), contents[row], bool(deleted[row])
        if same not in met and not deleted[row]:
            kept.append(row)
        met.add(same)
    return held.take(pa.array(kept, pa.int64()))


class _States:
    def __init__(self, expected: pa.Table, held: pa.Table, dead: Keys) -> None:
        self._expected, self._held = expected, held
        self._keys = keys_in(expected)  # ascending
        self._alive = ~expected["deleted"].to_numpy()
        self._revision = expected["revision"].to_numpy()
        self._dead = np.isin(self._keys, dead)
        self._places = find_sorted(self._keys, keys_in(held))
        alive = int(np.count_nonzero(self._alive))
        self._found = Comparison(expected=alive, compared=held.num_rows)

    def compare(self) -> Comparison:
        show = _shower(self._held, *_NAMED)
        self._found.differ("extra", np.flatnonzero(self._places < 0), show, "ahead")
        known = np.flatnonzero(self._places >= 0)
        same = self._compare_revisions(known)
        alive = self._alive[self._places[same]]
        self._found.differ("deleted but present", same[~alive], show)
        self._compare_contents(same[alive])
        self._compare_counts(known)
        return self._found

    def _compare_revisions(self, known: Places) -> Places:
        """The rows that have the fold's revision; the others are told."""
        places = self._places[known]
        gap = self._held["revision"].to_numpy()[known] - self._revision[places]
        refused, show = self._dead[places], self._revisions
        self._found.differ("revision", known[(gap < 0) & ~refused], show, "behind")
        self._found.differ("revision", known[(gap < 0) & refused], show, "behind", "dead")
        self._found.differ("revision", known[gap > 0], show, "ahead")
        return np.asarray(known[gap == 0])

    def _revisions(self, row: int) -> dict[str, Any]:
        told = _shower(self._held, *_NAMED, "revision")(row)
        return told | {"expected": int(self._revision[self._places[row]])}

    def _compare_contents(self, rows: Places) -> None:
        """Rows of one revision: values bit for bit, metadata by what they say."""
        mine = content_of(self._held, STATE)[rows]
        wanted = content_of(self._expected, STATE)[self._places[rows]]
        size = mine["dimensions"] != wanted["dimensions"]
        self._found.differ("dimensions", np.flatnonzero(size), self._sizes(rows, mine, wanted))
        show = self._both(rows)
        values = ~size & (mine["values"] != wanted["values"])
        self._found.differ("values", np.flatnonzero(values), show)
        metadata = ~size & (mine["metadata"] != wanted["metadata"])
        self._found.differ("metadata", np.flatnonzero(metadata), show)

    def _both(self, rows: Places) -> Callable[[Any], dict[str, Any]]:
        """A vector's name, and where its changes are in the log."""
        show = _shower(self._held, *_NAMED)
        home = _shower(self._expected, "topic", "partition")
        return lambda at: show(rows[at]) | home(self._places[rows[at]])

    def _sizes(
        self, rows: Places, mine: NDArray[Any], wanted: NDArray[Any]
    ) -> Callable[[Any], dict[str, Any]]:
        show = _shower(self._held, *_NAMED)
        return lambda at: (
            show(rows[at])
            | {
                "dimensions": int(mine["dimensions"][at]),
                "expected": int(wanted["dimensions"][at]),
            }
        )

    def _compare_counts(self, known: Places) -> None:
        met = np.bincount(self._places[known], minlength=len(self._keys))
        show = _shower(self._expected, *_NAMED, "topic", "partition")
        self._found.differ("twice", np.flatnonzero(met > 1), show)
        # Not yet there, or there once and deleted since.
        missing = self._alive & (met == 0)
        refused, lost = np.flatnonzero(missing & self._dead), np.flatnonzero(missing & ~self._dead)
        self._found.differ("missing", refused, show, "behind", "ahead", "dead")
        self._found.differ("missing", lost, show, "behind", "ahead")


# --- deltas and messages ---


def compare_deltas(expected: pa.Table, held: pa.Table) -> Comparison:
    found = Comparison(expected=expected.num_rows, compared=held.num_rows)
    expected = expected.take(pa.array(np.argsort(keys_in(expected), kind="stable")))
    places = find_sorted(keys_in(expected), keys_in(held))
    found.differ("extra", np.flatnonzero(places < 0), _shower(held, *_SHOWN), "ahead")
    known = np.flatnonzero(places >= 0)
    times = np.bincount(places[known], minlength=expected.num_rows)
    show = _shower(expected, *_SHOWN)
    found.differ("missing", np.flatnonzero(times == 0), show, "behind")
    found.differ("twice", np.flatnonzero(times > 1), show)
    mine, wanted = content_of(held, DELTA)[known], content_of(expected, DELTA)[places[known]]
    told = _shower(held, *_SHOWN)
    for number, name in enumerate(COMPARED):
        unequal = mine["columns"][:, number] != wanted["columns"][:, number]
        found.differ(f"column {name}", known[unequal], told)
    equal = (mine["columns"] == wanted["columns"]).all(axis=1)
    found.differ("content", known[equal & (mine["row"] != wanted["row"])], told)
    return found


def compare_messages(expected: Keys, held: Keys, *, others: bool) -> Comparison:
    found = Comparison(expected=len(expected), compared=len(held))
    distinct, times = np.unique(held, return_counts=True)
    found.differ("missing", expected[~np.isin(expected, distinct)], _message, "behind")
    ours = np.isin(distinct, expected)
    found.differ("twice", distinct[ours & (times > 1)], _message)
    if not others:
        found.differ("extra", distinct[~ours], _message, "ahead")
    return found


def _message(one: bytes) -> dict[str, str]:
    return {"delta_id": one.ljust(16, b"\0").hex()}  # numpy leaves out zeros at the end
