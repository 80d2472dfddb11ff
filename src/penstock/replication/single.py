"""The coordinator of one partition: epoch, quorum and commit, as a state machine without I/O.

Rules that hold at every step:

- An epoch has one coordinator. It enters with a BARRIER of its own epoch and serves nothing before
  that barrier is committed.
- An entry is committed when a majority of the replicas holds it durably *and* it belongs to the
  coordinator's own epoch; entries of earlier epochs commit beneath it.
- The commit watermark never goes back.

A single node is a cluster of one: its quorum is one, and its own `durable` report commits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    ENTERING = "entering"  # the barrier is not committed yet
    SERVING = "serving"
    DEPOSED = "deposed"  # a higher epoch exists; nothing is appended or answered any more


_TRANSITIONS = {
    State.ENTERING: {State.SERVING, State.DEPOSED},
    State.SERVING: {State.DEPOSED},
    State.DEPOSED: set(),
}


@dataclass(frozen=True, slots=True)
class Committed:
    """Effect: everything up to `sequence` may be answered and delivered."""

    sequence: int
    began_serving: bool  # this commit covers the barrier


class Coordinator:
    def __init__(self, *, epoch: int, replicas: Iterable[str], sequence_last: int) -> None:
        self.epoch = epoch
        self.state = State.ENTERING
        self.sequence_committed = 0
        self.sequence_barrier = sequence_last + 1  # commits only from here upward
        self.sequence_last = sequence_last  # appended by us or inherited
        self._durable = dict.fromkeys(replicas, 0)  # highest matched sequence a replica synced
        if not self._durable:
            raise ValueError("a partition needs at least one replica")

    @property
    def quorum(self) -> int:
        return len(self._durable) // 2 + 1

    @property
    def serving(self) -> bool:
        return self.state is State.SERVING

    def on_append(self, sequence_last: int) -> None:
        """The log was extended in this epoch."""
        if self.state is State.DEPOSED:
            raise RuntimeError("a deposed coordinator appended")
        if sequence_last <= self.sequence_last:
            raise ValueError(f"append to {sequence_last} does not follow {self.sequence_last}")
        self.sequence_last = sequence_last

    def on_durable(self, replica: str, sequence: int) -> Committed | None:
        """A replica synced everything up to `sequence`; tells whether the commit advances."""
        if self.state is State.DEPOSED:
            return None
        if sequence > self.sequence_last:
            raise ValueError(f"{replica} reports {sequence}, past the end {self.sequence_last}")
        self._durable[replica] = max(self._durable[replica], sequence)
        reached = sorted(self._durable.values(), reverse=True)[self.quorum - 1]
        if reached <= self.sequence_committed or reached < self.sequence_barrier:
            return None
        self.sequence_committed = reached
        began = self.state is State.ENTERING
        if began:
            self._become(State.SERVING)
        return Committed(reached, began)

    def on_higher_epoch(self, epoch: int) -> None:
        """Somebody was given a higher epoch: stop."""
        if epoch > self.epoch and self.state is not State.DEPOSED:
            self._become(State.DEPOSED)

    def validate(self) -> None:
        assert self.sequence_committed <= self.sequence_last
        assert self.serving == (self.sequence_committed >= self.sequence_barrier) or (
            self.state is State.DEPOSED
        )

    def _become(self, state: State) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"illegal transition {self.state} -> {state}")
        self.state = state
