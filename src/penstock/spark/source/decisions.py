"""Which batches of a range hold messages that exist.

An atomic batch's share is in a partition's log from its PREPARE on, but its messages exist only if
the partition's DECIDE says so. A reader that cuts a log into ranges needs one place for them that
never moves: the PREPARE's. So batches are held back from the first undecided PREPARE on, until its
decision is read, which may stand beyond the range's end.

Invariants: what `feed` returns is in log order, each batch once; every batch returned is an ENQ, or
a PREPARE whose first decision was for it; nothing that begins beyond `last` is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from penstock.errors import LimitExceeded
from penstock.model.batch import Batch, Kind

HELD_BYTES_MAX: Final = 256 << 20  # of batches behind an undecided one


class Decisions:
    """Batches in, batches with existing messages out."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._held: deque[tuple[Batch, bytes | None]] = deque()  # with the transaction it awaits
        self._bytes = 0
        self._outcomes: dict[bytes, bool] = {}  # of transactions that are held

    @property
    def open(self) -> bool:
        """A decision is still to be read."""
        return bool(self._held)

    def feed(self, batches: Sequence[Batch]) -> list[Batch]:
        """The next batches of the log; returns those that became certain."""
        ready: list[Batch] = []
        for batch in batches:
            kind = batch.kind
            if kind is Kind.ENQ and batch.first <= self._last:
                if self._held:
                    self._hold(batch, None)
                else:
                    ready.append(batch)
            elif kind is Kind.PREPARE and batch.first <= self._last:
                self._hold(batch, _transaction(batch))
            elif kind is Kind.DECIDE and self._held:
                self._decide(batch)
                self._release(ready)
        return ready

    def _hold(self, batch: Batch, transaction: bytes | None) -> None:
        self._held.append((batch, transaction))
        self._bytes += batch.size
        if self._bytes > HELD_BYTES_MAX:
            raise LimitExceeded(
                f"over {HELD_BYTES_MAX} bytes stand behind an undecided atomic batch",
                limit=HELD_BYTES_MAX,
            )

    def _decide(self, batch: Batch) -> None:
        columns = batch.columns()
        awaited = {transaction for _, transaction in self._held}
        decided = zip(
            columns.binary("transaction") or (), columns.fixed("commit").tolist(), strict=True
        )
        for transaction, commit in decided:
            if transaction in awaited:
                self._outcomes.setdefault(transaction, bool(commit))  # the first decision wins

    def _release(self, ready: list[Batch]) -> None:
        while self._held:
            batch, transaction = self._held[0]
            if transaction is not None:
                commit = self._outcomes.get(transaction)
                if commit is None:
                    return
                if commit:
                    ready.append(batch)
            else:
                ready.append(batch)
            self._held.popleft()
            self._bytes -= batch.size


def _transaction(batch: Batch) -> bytes:
    column = batch.columns().binary("transaction")
    return b"" if column is None else column[0]
