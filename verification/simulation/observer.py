"""What only the simulator can see: every replica's every step."""

from __future__ import annotations

from penstock.model.batch import Batch, chain_over
from penstock.replication.assignment import PartitionRecord
from verification.checkers import Checker
from verification.events import Atomic, Entered, Refused
from verification.simulation.disk import ORIGIN, Point, end_of


class Observer(Checker):
    def __init__(self) -> None:
        super().__init__()
        self._written: dict[tuple[int, int, int], int] = {}  # (partition, epoch, last) -> chain
        self._ledger: dict[tuple[int, int], int] = {}  # committed: (partition, last) -> chain
        self._continued: dict[int, tuple[Batch, int]] = {}  # identity -> batch, chain before it

    def on_entered(self, partition: int, epoch: int, node: str) -> None:
        if (partition, epoch) in self._coordinators:
            self.broken("split_epochs", f"{node} enters epoch {epoch} of {partition} again")
        self.add(Entered(partition, epoch, node))

    def on_refused(self, producer: bytes, epoch: int, sequence: int) -> None:
        self.add(Refused(producer.decode(), epoch, sequence))

    def on_atomic(self, parts: list[tuple[str, int, int, int, int]]) -> None:
        self.add(Atomic(parts))

    def on_appends(self, partition: int, node: str, end: Point, batches: list[Batch]) -> None:
        for batch in batches:
            self.on_append(partition, node, end, batch)
            if batch is not batches[-1]:
                end = end_of(batch)

    def on_append(self, partition: int, node: str, end: Point, batch: Batch) -> None:
        """Log matching: an entry stands after the entry it was written after, everywhere."""
        if batch.first != end.sequence + 1 or batch.epoch_previous != end.epoch:
            self._unmatched(partition, node, batch, f" after {end}")
        elif not self._continues(batch, end.chain):
            self._unmatched(partition, node, batch, ": another history")
        chain = self._written.setdefault((partition, batch.epoch, batch.last), batch.chain)
        if chain != batch.chain:
            self._unmatched(partition, node, batch, ": two entries with one place")

    def _unmatched(self, partition: int, node: str, batch: Batch, what: str) -> None:
        where = f"{node}/{partition} at {batch.first} of epoch {batch.epoch}"
        self.broken("unmatched", where + what)

    def _continues(self, batch: Batch, chain: int) -> bool:
        """Whether the batch's chain is the one before it and its own content.

        A batch never changes and replicas share it: what was found out once is remembered.
        """
        known = self._continued.get(id(batch))
        if known is not None and known[1] == chain:
            return True
        if chain_over(batch.header, batch.body, chain) != batch.chain:
            return False
        self._continued[id(batch)] = (batch, chain)
        return True

    def on_ledger(self, who: str, last: Batch | None, fresh: list[Batch]) -> None:
        end = ORIGIN if last is None else end_of(last)
        for batch in fresh:
            if batch.first != end.sequence + 1 or not self._continues(batch, end.chain):
                self.broken("changed", f"{who} commits {batch.first} after another {end}")
                return
            end = end_of(batch)
            self._ledger[batch.partition, batch.last] = batch.chain

    def on_committed_again(self, who: str, batch: Batch) -> None:
        if self._ledger.get((batch.partition, batch.last)) != batch.chain:
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
