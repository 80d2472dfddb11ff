"""A partition's log proved batch by batch: what came is what was written, and nothing is missing.

- CRC: header and body of a batch are the bytes that were sealed.
- Gapless: a batch begins right behind the one before it.
- Chain: the batch's hash follows from that of the one before it, so that two logs with the same
  last hash are the same. A compacted batch keeps its hash but not all it was made of: it is taken
  at its word, and the next one proves it.

A log that retention has shortened is proved from its first batch on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.errors import Corruption
from penstock.model.batch import Batch, Kind, decode, verify_chain

MESSAGES: Final = frozenset({Kind.ENQ, Kind.PREPARE})


class LogCheck:
    """Feed it the batches of one partition, of all kinds and in order; it raises `Corruption`."""

    def __init__(self, *, first: int) -> None:
        self.next = first
        # The hash before `first`: 0 where a log begins, unknown where retention has cut it.
        self.chain: int | None = 0 if first == 1 else None
        self.epoch = 0
        self.batches = self.messages = self.bytes = self.compacted = 0

    def feed(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            try:
                self._check(batch)
            except Corruption as damage:
                raise Corruption(damage.message, sequence=self.next) from damage
            self._pass(batch)

    def _check(self, batch: Batch) -> None:
        if batch.first != self.next:
            raise Corruption(f"sequence {self.next} is missing: a batch begins at {batch.first}")
        decode(batch.encode())
        if self.chain is not None:
            verify_chain(batch, self.chain)
        if batch.epoch < self.epoch:
            raise Corruption(f"epoch {batch.epoch} follows epoch {self.epoch}")

    def _pass(self, batch: Batch) -> None:
        self.next, self.chain, self.epoch = batch.last + 1, batch.chain, batch.epoch
        self.batches += 1
        self.bytes += batch.size
        self.compacted += batch.compacted
        if batch.kind in MESSAGES:
            self.messages += batch.entries
