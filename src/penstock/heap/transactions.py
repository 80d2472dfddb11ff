"""Atomic batches over partitions: what is prepared here, and what was decided.

A PREPARE puts this partition's share of the batch into the log, invisible. A DECIDE in the home
partition is the outcome; the first one holds, and the driver repeats it in every other partition.
What a home does not know it decides against, so what it may forget differs by outcome:

- A *commit* is kept until each participant has its copy, however long that takes and however much
  is decided meanwhile: a participant that asks later and finds nothing would abort its share. Where
  the shares lie stands in the home's DECIDE; that all of them have it is a record of its own.
- An *abort* is what is assumed anyway. It is kept so that a driver that is late finds it, and that
  a PREPARE that comes after it follows it. A home whose own share is prepared needs no memory for
  the first: the share is gone with the abort, and without it the home does not decide for.
- Copies, and commits that all have, are kept for whoever repeats a decision.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from penstock.errors import Corruption
from penstock.heap.dedup import ProducerRun
from penstock.model.batch import Decision

DECIDED_MAX: Final = 1 << 16  # so many commits that all have, and so many aborts, are kept
DECIDED_MS: Final = 24 * 3600 * 1000  # they are kept for so long at most, in log time
ABORTED_MS: Final = 120_000  # an abort is kept for so long at least: its driver is done by then
UNCONFIRMED_MAX: Final = 1 << 16  # past so many commits that may be asked for, no more are made
_PLACE: Final = struct.Struct("<IQ")


class SharePlace(NamedTuple):
    partition: int
    sequence: int


class Doubts(NamedTuple):
    """What a participant answers to a home: which batches of that home wait for a decision here.
    That is so in the log up to `sequence`, all of which is committed."""

    sequence: int
    transactions: frozenset[bytes]


class UnconfirmedCommit(NamedTuple):
    """A decision for a batch, which its other participants may still ask for."""

    time_ms: int
    places: tuple[SharePlace, ...]


class Share(NamedTuple):
    """One PREPARE batch: its messages and whose they are."""

    first: int
    size: int
    runs: tuple[ProducerRun, ...]


class Transaction(msgspec.Struct, array_like=True):
    """An atomic batch that is prepared here and not decided yet."""

    id: bytes
    home: int  # the partition whose log holds the decision
    time_ms: int
    shares: list[Share] = []

    @property
    def first(self) -> int:
        return self.shares[0].first

    @property
    def count(self) -> int:
        return sum(share.size for share in self.shares)


class Transactions:
    def __init__(self) -> None:
        self.decided_max, self.unconfirmed_max = DECIDED_MAX, UNCONFIRMED_MAX
        self.prepared: dict[bytes, Transaction] = {}
        self.unconfirmed: dict[bytes, UnconfirmedCommit] = {}  # oldest first, as the others
        self.committed: dict[bytes, int] = {}  # other commits, with their time
        self.aborted: dict[bytes, int] = {}

    @property
    def untouched(self) -> bool:
        """Whether no atomic batch was heard of, as far as is remembered."""
        return not (self.prepared or self.unconfirmed or self.committed or self.aborted)

    def outcome(self, transaction: bytes) -> bool | None:
        """True: committed, False: aborted, None: not decided, as far as this log knows."""
        if transaction in self.unconfirmed or transaction in self.committed:
            return True
        return False if transaction in self.aborted else None

    def prepare(self, transaction: bytes, *, home: int, time_ms: int, share: Share) -> None:
        found = self.prepared.get(transaction)
        if found is None:
            found = self.prepared[transaction] = Transaction(transaction, home, time_ms)
        found.shares.append(share)

    def decide(
        self, transaction: bytes, decision: int, time_ms: int, places: tuple[SharePlace, ...] = ()
    ) -> Transaction | None:
        """Note the first outcome; returns what was waiting for it here."""
        if decision == Decision.CONFIRMED:
            self._confirm(transaction, time_ms)
            return None
        if self.outcome(transaction) is not None:
            return None
        if not decision:
            self.aborted[transaction] = time_ms
        elif places:
            self.unconfirmed[transaction] = UnconfirmedCommit(time_ms, places)
        else:
            self.committed[transaction] = time_ms
        self._forget(time_ms)
        return self.prepared.pop(transaction, None)

    def _confirm(self, transaction: bytes, time_ms: int) -> None:
        if self.unconfirmed.pop(transaction, None) is not None:
            self.committed[transaction] = time_ms
            self._forget(time_ms)

    def _forget(self, time_ms: int) -> None:
        for kept, young_ms in ((self.committed, 0), (self.aborted, ABORTED_MS)):
            for oldest in list(islice(kept, 2)):  # two for each new one: enough to shrink
                age_ms = time_ms - kept[oldest]
                crowded = len(kept) > self.decided_max and age_ms >= young_ms
                if age_ms <= DECIDED_MS and not crowded:
                    break
                del kept[oldest]

    # --- what a home and its participants ask each other ---

    def may_commit(self, transaction: bytes, *, own: bool) -> bool:
        """Whether a home may decide for a batch of which it knows no decision. If it has a share of
        its `own`, that must wait here: else it was decided against, which was forgotten since."""
        return not own or transaction in self.prepared

    @property
    def full(self) -> bool:
        """Whether so many commits may still be asked for that no more should be added."""
        return len(self.unconfirmed) >= self.unconfirmed_max

    def doubts(self, home: int) -> frozenset[bytes]:
        return frozenset(name for name, t in self.prepared.items() if t.home == home)

    def confirmed(self, answers: Mapping[int, Doubts]) -> list[bytes]:
        """Commits that nobody can ask for any more, by what participants have answered.

        Every share was prepared before it was decided for. So one that is in the log of whom was
        asked, and does not wait there, has its copy. A sequence short of the share's is the answer
        of one that lags, or was deposed and has not heard of it.
        """
        return [
            name
            for name, commit in self.unconfirmed.items()
            if all(_has_copy(name, place, answers.get(place.partition)) for place in commit.places)
        ]

    # --- snapshots ---

    def dump(self) -> dict[str, list[Any]]:
        decided = [[name, True, time_ms] for name, time_ms in self.committed.items()]
        decided += [[name, False, time_ms] for name, time_ms in self.aborted.items()]
        found: dict[str, list[Any]] = {"prepared": [*self.prepared.values()], "decided": decided}
        if self.unconfirmed:  # without any, a snapshot is as older versions wrote it
            found["unconfirmed"] = [[name, *commit] for name, commit in self.unconfirmed.items()]
        return found

    def load(self, data: dict[str, Any]) -> None:
        """Fill an empty one."""
        prepared = msgspec.convert(data["prepared"], list[Transaction])
        self.prepared.update((transaction.id, transaction) for transaction in prepared)
        for name, commit, time_ms in data["decided"]:
            (self.committed if commit else self.aborted)[name] = time_ms
        for name, *commit in data.get("unconfirmed", ()):
            self.unconfirmed[name] = msgspec.convert(commit, UnconfirmedCommit)

    def validate(self) -> None:
        outcomes = [*self.unconfirmed, *self.committed, *self.aborted]
        names = {*self.prepared, *outcomes}
        assert len(names) == len(self.prepared) + len(outcomes), "a batch has two outcomes"


def _has_copy(name: bytes, place: SharePlace, answer: Doubts | None) -> bool:
    return (
        answer is not None and place.sequence <= answer.sequence and name not in answer.transactions
    )


def pack_places(places: Iterable[SharePlace]) -> bytes:
    return b"".join(_PLACE.pack(*place) for place in places)


def unpack_places(data: bytes) -> tuple[SharePlace, ...]:
    if len(data) % _PLACE.size:
        raise Corruption("the participants of a DECIDE are cut short")
    return tuple(SharePlace(*values) for values in _PLACE.iter_unpack(data))
