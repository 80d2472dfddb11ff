"""The rules of replication, one function each.

The machines of this package decide by these functions and by nothing else, and the model checker
explores every reachable state of a small cluster with the very same ones. Whoever changes a rule
changes it here; a test replaces each of them by a plausible mistake and expects to be caught.

Why it is safe, in one paragraph. An epoch is given to one node (compare and swap). Before that node
writes in it, a majority has promised to refuse all earlier epochs, and the node has taken over the
best log of that majority, *best* being the one whose last entry has the greatest epoch and, among
those, the longest. An entry counts as committed only if a majority holds it durably **and** it was
written in the coordinator's own epoch; whatever lies beneath it is then committed too. Any later
majority shares a replica with the one that committed, so the best log it finds has every committed
entry, and the later coordinator never writes over one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class End(NamedTuple):
    """Where a log ends. Compares as takeover does: epoch of the last entry, then length."""

    epoch: int
    sequence: int


class Fit(Enum):
    """How a batch that arrives relates to the log it arrives at."""

    NEXT = "next"  # follows the last entry, same history
    KNOWN = "known"  # is there already
    GAP = "gap"  # something before it is missing
    CONFLICT = "conflict"  # another history stands in its place


EpochAt = Callable[[int], int | None]  # epoch of a sequence; None where that is not known
EpochLast = Callable[[int], int | None]  # last sequence of an epoch; None if it has none here


def accepts(promised: int, epoch: int) -> bool:
    """A replica listens to an epoch unless it has promised a later one."""
    return epoch >= promised


def best_log(ends: Mapping[str, End], prefer: str) -> str:
    """Whose log a new coordinator takes over; on a tie its own, which needs no copying."""
    return max(ends, key=lambda node: (ends[node], node == prefer, node))


def commit(reached: int, *, committed: int, barrier: int) -> int:
    """The commit watermark when a majority holds everything up to `reached` durably.

    An entry of an earlier epoch is never committed by counting its copies: a later coordinator
    might still find a log with a greater epoch that lacks it. It commits beneath the barrier.
    """
    return reached if reached >= barrier else committed


def follower_commit(coordinator_commit: int, *, matched: int, committed: int) -> int:
    """What a follower knows to be committed: never past what it has compared and found equal."""
    return max(committed, min(coordinator_commit, matched))


def acknowledged(durable: int, *, matched: int) -> int:
    """What a follower may vouch for: synced, and part of the coordinator's history."""
    return min(durable, matched)


def fit(
    first: int, last: int, *, epoch: int, epoch_previous: int, end: End, epoch_at: EpochAt
) -> Fit:
    """How the batch `[first, last]` of `epoch`, written after `epoch_previous`, relates to a log
    that ends at `end`."""
    if first == end.sequence + 1:
        return Fit.NEXT if epoch_previous == end.epoch else Fit.CONFLICT
    if first > end.sequence:
        return Fit.GAP
    if last > end.sequence:  # a batch is written whole, so its like cannot end within it
        return Fit.CONFLICT
    held = epoch_at(last)
    return Fit.KNOWN if held is None or held == epoch else Fit.CONFLICT


def meet(tail: Sequence[tuple[int, int]], *, last_of: EpochLast) -> int | None:
    """The last sequence up to which another log equals this one; None if that is not known here.

    `tail` describes the other log from its commit on: runs of one epoch each, as (epoch, last
    sequence), oldest first. An epoch has one writer, so two entries with the same epoch and
    sequence are the same entry, and so is all before them. The answer is exact: to forget an
    entry that *is* equal, only to fetch it again, would take away a durable copy that counted.
    """
    for epoch, last in reversed(tail):
        mine = last_of(epoch)
        if mine is not None:
            return min(last, mine)
    return None


def may_truncate(sequence: int, *, committed: int) -> bool:
    """A committed entry never changes, on no replica, for no coordinator."""
    return sequence >= committed
