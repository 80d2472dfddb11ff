"""What only the simulator can see: every replica's every step."""

from __future__ import annotations

from bisect import bisect_left

from penstock.model.batch import Batch, chain_over
from penstock.replication.assignment import PartitionRecord
from penstock.testing.checkers import Checker
from penstock.testing.events import Atomic, Entered, Refused
from penstock.testing.simulation.disk import ORIGIN, Point, end_of


class Observer(Checker):
    def __init__(self) -> None:
        super().__init__()
        self._written: dict[tuple[int, int, int], int] = {}  # (partition, epoch, last) -> chain

    def on_entered(self, partition: int, epoch: int, node: str) -> None:
        if (partition, epoch) in self._coordinators:
            self.broken("split_epochs", f"{node} enters epoch {epoch} of {partition} again")
        self.add(Entered(partition, epoch, node))

    def on_refused(self, producer: bytes, epoch: int, sequence: int) -> None:
        self.add(Refused(producer.decode(), epoch, sequence))

    def on_atomic(self, parts: list[tuple[str, int, int, int, int]]) -> None:
        self.add(Atomic(parts))

    def on_append(self, partition: int, node: str, end: Point, batch: Batch) -> None:
        """Log matching: an entry stands after the entry it was written after, everywhere."""
        where = f"{node}/{partition} at {batch.first} of epoch {batch.epoch}"
        if batch.first != end.sequence + 1 or batch.epoch_previous != end.epoch:
            self.broken("unmatched", f"{where} after {end}")
        elif chain_over(batch.header(), batch.body, end.chain) != batch.chain:
            self.broken("unmatched", f"{where}: another history")
        chain = self._written.setdefault((partition, batch.epoch, batch.last), batch.chain)
        if chain != batch.chain:
            self.broken("unmatched", f"{where}: two entries with one place")

    def on_ledger(self, who: str, last: Batch | None, fresh: list[Batch]) -> None:
        end = ORIGIN if last is None else end_of(last)
        for batch in fresh:
            if (
                batch.first != end.sequence + 1
                or chain_over(batch.header(), batch.body, end.chain) != batch.chain
            ):
                self.broken("changed", f"{who} commits {batch.first} after another {end}")
                return
            end = end_of(batch)

    def on_committed_again(self, who: str, ledger: list[Batch], batch: Batch) -> None:
        at = bisect_left(ledger, batch.last, key=lambda other: other.last)
        if at >= len(ledger) or ledger[at].chain != batch.chain:
            self.broken("changed", f"{who} commits another {batch.first}..{batch.last}")

    def on_record_changed(
        self, partition: int, before: PartitionRecord, after: PartitionRecord
    ) -> None:
        """Voters change by way of a joint record only; epochs never go back."""
        if after.epoch < before.epoch:
            self.broken("records", f"{partition}: epoch {before.epoch} to {after.epoch}")
        if after.voters != before.voters and after.voters != before.joint:
            self.broken("records", f"{partition}: {before} to {after}")
        if after.joint and before.joint and after.joint != before.joint:
            self.broken("records", f"{partition}: {before} to {after}")
