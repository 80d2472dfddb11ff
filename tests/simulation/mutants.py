"""Plausible mistakes, each made in one rule or one order of the real code."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.heap import spine, transactions
from penstock.heap.leases import LeaseBook
from penstock.heap.state import HeapState
from penstock.heap.transactions import Transactions
from penstock.replication import assignment, rules, sender
from penstock.replication.coordinator import Coordinator
from penstock.replication.facts import LogFacts
from penstock.replication.replica import Replica
from penstock.replication.rules import Fit
from verification.simulation.host import Host
from verification.simulation.metadata import MetadataStore
from verification.simulation.tenure import Decide, Tenure

Mutant = Callable[[pytest.MonkeyPatch], None]


def acknowledged_before_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "acknowledged", lambda durable, *, matched: matched)


def old_entries_commit_by_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        rules, "commit", lambda reached, *, committed, barrier: max(reached, committed)
    )  # fmt: skip


def longest_log_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        rules, "best_log", lambda ends, prefer: max(ends, key=lambda n: (ends[n].sequence, n))
    )


def own_log_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "best_log", lambda ends, prefer: prefer)


def half_is_a_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assignment, "majority_of", lambda count: max(1, count // 2))


def everything_fits(patch: pytest.MonkeyPatch) -> None:
    """What stands after the place where two logs part is kept."""
    patch.setattr(rules, "fit", lambda *args, **more: Fit.NEXT)
    patch.setattr(sender, "meet", lambda tail, *, last_of: tail[-1][1] if tail else None)


def watermark_passes_what_matched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        rules, "follower_commit", lambda heard, *, matched, committed: max(heard, committed)
    )


def staged_end_is_vouched_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_durable", _counting_staged(Coordinator._durable))


def _counting_staged(original: Any) -> Any:
    def durable(self: Coordinator) -> dict[str, int]:
        return {**original(self), self.node: self._log.last}

    return durable


def any_disk_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_counts", lambda self, sender: True)


def wiped_disks_promise(patch: pytest.MonkeyPatch) -> None:
    original = Replica.on_fenced

    def on_fenced(self: Replica, reply: Any, now: int) -> Any:
        named = self.record.uuids.get(reply.node, "") if self.record else ""
        return original(self, msgspec.structs.replace(reply, uuid=named), now)

    patch.setattr(Replica, "on_fenced", on_fenced)


def sets_change_at_once(patch: pytest.MonkeyPatch) -> None:
    def reassigned(self: Coordinator) -> Any:
        record = self.record
        if not record.target or record.target == record.voters:
            return None
        return msgspec.structs.replace(record, voters=record.target, target=(), learners=())

    patch.setattr(Coordinator, "_reassigned", reassigned)


def epochs_are_taken_blindly(patch: pytest.MonkeyPatch) -> None:
    original = MetadataStore.swap

    def swap(self: MetadataStore, partition: int, record: Any, expected: int) -> int:
        return original(self, partition, record, self.records[partition][1])

    patch.setattr(MetadataStore, "swap", swap)


def answered_before_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenure, "_when_committed", lambda self, sequence, reply, answer: reply(answer()))


def leases_are_not_rearmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseBook, "rearm", lambda self, now_ms: None)


def uncommitted_state_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A deposed coordinator goes on with what it had applied."""
    original = Host._step_down

    def step_down(self: Host, epoch: int) -> None:
        committed, self.committed = self.committed, self.heap.sequence_applied
        try:
            original(self, epoch)
        finally:
            self.committed = committed

    patch.setattr(Host, "_step_down", step_down)


def served_before_the_barrier(patch: pytest.MonkeyPatch) -> None:
    original = Host._enter

    def enter(self: Host, epoch: int) -> None:
        original(self, epoch)
        assert self.tenure is not None
        self.tenure.serving = True
        self.tenure._when_committed = lambda _, reply, answer: reply(answer())  # type: ignore[method-assign]

    patch.setattr(Host, "_enter", enter)
    patch.setattr(Replica, "writable", lambda self, now: None)


def truncation_forgets_too_much(patch: pytest.MonkeyPatch) -> None:
    """Only what is known to be committed is kept when a stream begins."""
    patch.setattr(sender, "meet", lambda tail, *, last_of: None)
    patch.setattr(LogFacts, "tail", lambda self, committed: [])


def retries_are_written_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenure, "_known", lambda self, columns: None)


def participants_decide_alone(patch: pytest.MonkeyPatch) -> None:
    def resolve(self: Tenure, transaction: bytes) -> None:
        self.serve(Decide(self.host.partition, transaction, False), lambda _: None)

    patch.setattr(Tenure, "_resolve", resolve)


def commits_are_forgotten_by_count(patch: pytest.MonkeyPatch) -> None:
    """A home does not care who may still ask for what it has decided for."""
    original = Transactions.decide

    def decide(self: Transactions, name: bytes, decision: int, time_ms: int, _: Any = ()) -> Any:
        return original(self, name, decision, time_ms)

    patch.setattr(Transactions, "decide", decide)


def late_drivers_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A home forgets that it decided against, and decides again."""
    patch.setattr(transactions, "ABORTED_MS", 0)
    patch.setattr(Transactions, "may_commit", lambda self, transaction, *, own: True)


def used_up_lists_are_passed(patch: pytest.MonkeyPatch) -> None:
    """A partition whose candidates are all taken is left out, though it has more."""

    def take(self: Any) -> int | None:
        self.taken += 1
        return self.keys[self.taken] if self.taken < len(self.keys) else None

    patch.setattr(spine._Candidates, "take", take)


def returned_ones_are_not_indexed(patch: pytest.MonkeyPatch) -> None:
    """What is given back with a delay is in the table, and never found due."""
    patch.setattr(HeapState, "promote", lambda self, now_ms: None)


def neighbours_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """A message is delivered with the payload of the first one of its batch."""
    original = Tenure._payload

    def payload(self: Tenure, message: int) -> bytes | None:
        batch = self._disk.batch_holding(message)
        return original(self, message if batch is None else batch.first)

    patch.setattr(Tenure, "_payload", payload)


def takers_go_by_their_own_clock(patch: pytest.MonkeyPatch) -> None:
    """As it was before: a fast clock ended delays early."""
    patch.setattr(Replica, "quorum_ms", lambda self, own_ms, now: own_ms)


MUTANTS: dict[str, tuple[Mutant, str]] = {
    mutant.__name__: (mutant, profile)
    for mutant, profile in (
        (acknowledged_before_synced, "power"),
        (old_entries_commit_by_count, "crashes"),
        (longest_log_wins, "crashes"),
        (own_log_wins, "crashes"),
        (half_is_a_majority, "network"),
        (everything_fits, "crashes"),
        (watermark_passes_what_matched, "crashes"),
        (staged_end_is_vouched_for, "power"),
        (any_disk_counts, "disks"),
        (wiped_disks_promise, "disks"),
        (sets_change_at_once, "moves"),
        (epochs_are_taken_blindly, "crashes"),
        (answered_before_commit, "crashes"),
        (leases_are_not_rearmed, "crashes"),
        (uncommitted_state_is_kept, "network"),
        (served_before_the_barrier, "crashes"),
        (truncation_forgets_too_much, "crashes"),
        (retries_are_written_again, "network"),
        (participants_decide_alone, "crashes"),
        (commits_are_forgotten_by_count, "calm"),
        (late_drivers_are_believed, "calm"),
        (used_up_lists_are_passed, "calm"),
        (returned_ones_are_not_indexed, "calm"),
        (neighbours_are_mixed_up, "calm"),
        (takers_go_by_their_own_clock, "clocks"),
    )
}
