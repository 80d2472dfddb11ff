"""Atomic batches over partitions: what is prepared here, and what was decided.

A PREPARE puts this partition's share of the batch into the log, invisible. A DECIDE in the home
partition is the outcome; the first one holds, and the driver repeats it in every other partition.
The outcome is kept for a while, so that a participant that was away can ask for it, and so that a
PREPARE that arrives after the decision follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

DECIDED_MAX: Final = 1 << 16  # outcomes kept, the oldest go first
DECIDED_MS: Final = 24 * 3600 * 1000  # and for how long, in log time


class ProducerRun(NamedTuple):
    """A stretch of a body's entries with one producer; `start` is where it begins in the body."""

    producer: bytes
    epoch: int
    first: int  # producer sequence
    size: int
    start: int


class Share(NamedTuple):
    """One PREPARE batch: its messages and whose they are."""

    first: int
    size: int
    runs: tuple[ProducerRun, ...]


@dataclass(slots=True)
class Transaction:
    """An atomic batch that is prepared here and not decided yet."""

    id: bytes
    home: int  # the partition whose log holds the decision
    time_ms: int
    shares: list[Share] = field(default_factory=list)

    @property
    def first(self) -> int:
        return self.shares[0].first

    @property
    def count(self) -> int:
        return sum(share.size for share in self.shares)


class Transactions:
    def __init__(self) -> None:
        self.prepared: dict[bytes, Transaction] = {}
        self.decided: dict[bytes, tuple[bool, int]] = {}  # outcome and time, oldest first

    def outcome(self, transaction: bytes) -> bool | None:
        """True: committed, False: aborted, None: not decided, as far as this log knows."""
        found = self.decided.get(transaction)
        return None if found is None else found[0]

    def prepare(self, transaction: bytes, *, home: int, time_ms: int, share: Share) -> None:
        found = self.prepared.get(transaction)
        if found is None:
            found = self.prepared[transaction] = Transaction(transaction, home, time_ms)
        found.shares.append(share)

    def decide(self, transaction: bytes, commit: bool, time_ms: int) -> Transaction | None:
        """Note the first outcome; returns what was waiting for it here."""
        if transaction in self.decided:
            return None
        self.decided[transaction] = (commit, time_ms)
        self._forget(time_ms - DECIDED_MS)
        return self.prepared.pop(transaction, None)

    def _forget(self, before_ms: int) -> None:
        for oldest in list(islice(self.decided, 2)):  # two for each new one: enough to shrink
            if self.decided[oldest][1] >= before_ms and len(self.decided) <= DECIDED_MAX:
                return
            del self.decided[oldest]

    def dump(self) -> dict[str, Any]:
        prepared = [
            [t.id, t.home, t.time_ms, [[s.first, s.size, list(s.runs)] for s in t.shares]]
            for t in self.prepared.values()
        ]
        return {"prepared": prepared, "decided": [[k, *v] for k, v in self.decided.items()]}

    @staticmethod
    def load(data: dict[str, Any]) -> Transactions:
        found = Transactions()
        for name, home, time_ms, shares in data["prepared"]:
            transaction = found.prepared[name] = Transaction(name, home, time_ms)
            transaction.shares = [
                Share(first, size, tuple(ProducerRun(*run) for run in runs))
                for first, size, runs in shares
            ]
        found.decided = {name: (commit, time_ms) for name, commit, time_ms in data["decided"]}
        return found
