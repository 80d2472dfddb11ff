"""What a replica knows of itself, and of its log: where it begins and ends, and the epochs in it.

Epochs stand in *runs*: (epoch, first sequence), ascending in both. They are known from `base` on;
the driver reads them when it opens the log, and every append or truncation keeps them up to date.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from penstock.replication.rules import End


@dataclass(frozen=True)
class ReplicationOptions:
    """The node's configuration carries them as `[replication]`."""

    heartbeat_ms: int = 300  # an idle stream shows a sign of life this often
    silence_ms: int = 1500  # without one, the other side counts as gone
    stagger_ms: int = 400  # the second candidate waits this much longer than the first, and so on
    fence_ms: int = 700  # between attempts to fence, adopt, or nominate again
    credit_entries: int = 1000  # of a follower's stream
    credit_bytes: int = 8 << 20
    ack_entries: int = 100  # received entries after which credit is returned, if that is less
    buffer_batches: int = 1000  # that arrived too early and wait
    buffer_ms: int = 5000
    lagging_ms: int = 60_000  # without credit for longer: the follower is lagging
    backpressure_ms: int = 1000  # a majority without credit for longer: writers are told
    caught_up_entries: int = 1000  # a learner this close to the end may become a voter
    seed_bytes_per_s: int = 64 << 20  # that a node copies when replicas start over or are new


class LogFacts:
    """Invariants: `first - 1 <= durable <= last` · runs ascend · `base <= last + 1`."""

    __slots__ = ("_epochs", "_firsts", "durable", "first", "last")

    def __init__(
        self,
        *,
        first: int = 1,
        last: int = 0,
        durable: int = 0,
        runs: list[tuple[int, int]] | None = None,
    ) -> None:
        self.first = first  # oldest sequence that can be streamed as it was written
        self.last, self.durable = last, durable
        self._epochs = [epoch for epoch, _ in runs or []]
        self._firsts = [start for _, start in runs or []]

    @property
    def end(self) -> End:
        return End(self._epochs[-1] if self._epochs else 0, self.last)

    @property
    def end_durable(self) -> End:
        """Where the synced part ends: what a replica may vouch for."""
        if self.durable == 0:
            return End(0, 0)
        epoch = self.epoch_at(self.durable)
        if epoch is None:  # a lower one than the truth would let a worse log win
            raise RuntimeError(f"the epoch of entry {self.durable} is not known")
        return End(epoch, self.durable)

    @property
    def base(self) -> int:
        """The sequence from which on epochs are known."""
        return self._firsts[0] if self._firsts else self.last + 1

    def epoch_at(self, sequence: int) -> int | None:
        if sequence < self.base or sequence > self.last:
            return None
        return self._epochs[bisect_right(self._firsts, sequence) - 1]

    def last_of(self, epoch: int) -> int | None:
        """The last sequence that was written in `epoch`; None if none is known."""
        at = bisect_right(self._epochs, epoch) - 1
        if at < 0 or self._epochs[at] != epoch:
            return None
        return self._firsts[at + 1] - 1 if at + 1 < len(self._firsts) else self.last

    def tail(self, committed: int) -> list[tuple[int, int]]:
        """Runs as (epoch, last sequence) that reach past `committed`, or hold it at their end."""
        runs = []
        for at, epoch in enumerate(self._epochs):
            last = self._firsts[at + 1] - 1 if at + 1 < len(self._firsts) else self.last
            if last >= committed and last >= self._firsts[at]:
                runs.append((epoch, last))
        return runs

    def extend(self, *, epoch: int, last: int) -> None:
        """A batch of `epoch` was staged that ends at `last`."""
        if not self._epochs or self._epochs[-1] != epoch:
            if self._epochs and epoch < self._epochs[-1]:
                raise ValueError(f"epoch {epoch} after {self._epochs[-1]}")
            self._epochs.append(epoch)
            self._firsts.append(self.last + 1)
        self.last = last

    def truncate(self, sequence: int) -> None:
        self.last = min(self.last, sequence)
        self.durable = min(self.durable, sequence)
        while self._firsts and self._firsts[-1] > sequence:
            self._firsts.pop()
            self._epochs.pop()

    def validate(self) -> None:
        assert self.first - 1 <= self.durable <= self.last, (self.first, self.durable, self.last)
        if len(self._epochs) > 1:
            assert self._epochs == sorted(set(self._epochs)), "epochs do not ascend"
            assert self._firsts == sorted(set(self._firsts)), "runs do not ascend"
        assert len(self._epochs) == len(self._firsts), "a run has no epoch or no beginning"


class OwnCopy:
    """The copy of a partition that a replica holds. Whoever is in charge of the replica, the
    follower of another's log or the coordinator, works on this."""

    def __init__(
        self, node: str, *, uuid: str, log: LogFacts, committed: int, options: ReplicationOptions
    ) -> None:
        self.node, self.uuid = node, uuid  # the uuid is that of the disk
        self.log, self.options = log, options
        self.committed = committed  # as far as we know
