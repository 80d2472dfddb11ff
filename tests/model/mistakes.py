"""Plausible mistakes: each replaces one rule, or one step of the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from penstock.replication import rules
from penstock.replication.assignment import PartitionRecord
from verification.model.check import CHANGES, Outcome, explore
from verification.model.replication import Model, Step
from verification.model.world import Bounds, Member, Seat, World, facts, put, seated

# What earlier takeovers may have left behind, none of which got further than its own disk.
UNDECIDED = Bounds(epochs=4, entries=1, length=2, lag=False, logs=((1,), (2,), ()))
DIVERGED = Bounds(epochs=4, entries=2, length=3, lag=False, logs=((1,), (2,), ()))
BEHIND = Bounds(epochs=3, entries=2, length=3, lag=False, logs=((1, 1), (1,), ()))
LONG = Bounds(epochs=3, entries=2, length=3, lag=False, logs=((1, 1), (), ()))
SMALL = Bounds(epochs=2, entries=1, length=2, lag=False)
LATE = Bounds(epochs=2, entries=1, length=2)
LOST_DISKS = Bounds(epochs=2, entries=1, length=2, wipes=1, partial=False, lag=False)
REASSIGNED = replace(CHANGES["grow"], epochs=2, entries=1, length=2, lag=False)


# --- mistakes in a rule ---


def commit_by_count(reached: int, *, committed: int, barrier: int) -> int:
    return max(reached, committed)


def longest_log(ends: dict[str, rules.End], prefer: str) -> str:
    return max(ends, key=lambda node: (ends[node].sequence, node == prefer, node))


def own_log(ends: dict[str, rules.End], prefer: str) -> str:
    return prefer


def accept_any(promised: int, epoch: int) -> bool:
    return True


def acknowledge_before_sync(durable: int, *, matched: int) -> int:
    return matched


def acknowledge_length(durable: int, *, matched: int) -> int:
    return durable


def commit_past_matched(coordinator_commit: int, *, matched: int, committed: int) -> int:
    return max(committed, coordinator_commit)


def forget_equal(tail: Sequence[tuple[int, int]], *, last_of: rules.EpochLast) -> int | None:
    """Go back to where the newest epoch in common began, as if only that were known."""
    common = [last for epoch, last in tail if last_of(epoch) is not None]
    return common[-2] if len(common) > 1 else None


def meet_by_length(tail: Sequence[tuple[int, int]], *, last_of: rules.EpochLast) -> int | None:
    """Everything that is not longer is taken for equal."""
    return tail[-1][1] if tail and any(last_of(epoch) for epoch, _ in tail) else None


# --- mistakes in a step ---


class NoBarrier(Model):
    """Serves at once, and commits what it finds."""

    def entered(self, taker: Member) -> Member:
        return super().entered(taker)._replace(barrier=0, log=taker.log)


class QueryWithoutFence(Model):
    """Asks the others where their logs end, and has them promise nothing."""

    def promises(self, world: World, n: int, epoch: int) -> Iterator[dict[str, rules.End]]:
        for r, member in enumerate(world.members):
            if r != n:
                yield {str(r): facts(member.log[: member.durable]).end}


class PromiseForgotten(Model):
    """Answers a fence before the promise is on disk."""

    def crashed(self, member: Member) -> Member:
        return super().crashed(member)._replace(promised=0)

    def heeded(self, world: World, holder: Member) -> bool:
        return True  # who turned away may come back


class AnyDiskCounts(Model):
    """A wiped disk is asked, and believed, as the one that it replaced."""

    def named(self, member: Member) -> bool:
        return True

    def counts(self, world: World, r: int, epoch: int, disk: int) -> bool:
        return True


class NamedTooEarly(Model):
    """A new disk counts before it has what is committed."""

    def caught_up(self, member: Member, leader: Member) -> bool:
        return member.stream[0] == leader.epoch


class SingleStep(Model):
    """The new set replaces the old one at once."""

    def reassign(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        members = world.members
        if any(m.wanted and not m.seat.sets and not self.caught_up(m, leader) for m in members):
            return
        yield "new set", seated(world, [Seat(int(m.wanted), m.disk) for m in members])


class LeaveJointEarly(Model):
    """The new set alone, before it holds what was committed without it."""

    def caught_up(self, member: Member, leader: Member) -> bool:
        return member.stream[0] == leader.epoch

    def leave_joint(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        alone = [Seat(int(m.wanted), m.seat.disk) for m in world.members]
        yield "new set", seated(world, alone)


class EnterWithoutMajority(Model):
    def record(self, world: World, epoch: int) -> PartitionRecord:
        leader = next((m for m in world.members if m.epoch == epoch), None)
        if leader is not None and leader.phase == 1:
            return PartitionRecord(voters=(str(world.members.index(leader)),))
        return super().record(world, epoch)


class EpochTakenTwice(Model):
    """Two nodes read the record, both write epoch + 1, nobody compares."""

    def take(self, world: World, n: int, member: Member) -> Iterator[Step]:
        for epoch in {max(1, world.epoch), world.epoch + 1}:
            if epoch <= self.bounds.epochs and member.promised <= epoch:
                taker = self.promise(member, epoch)._replace(phase=1, epoch=epoch)
                yield f"take {epoch}", put(world._replace(epoch=epoch), n, taker)


class ConflictsStay(Model):
    """Writes behind what conflicts."""

    def cut(self, member: Member, matched: int) -> Member:
        return member


class TruncatesLater(Model):
    """Follows with a tail that is still to be forgotten. That is safe, as long as what is
    acknowledged is what matched."""

    def follow(self, world: World, r: int, leader: Member) -> World:
        before = world.members[r]
        after = super().follow(world, r, leader)
        kept = after.members[r]._replace(log=before.log, durable=before.durable)
        return put(after, r, self.vouch(kept))


@dataclass(frozen=True)
class Mistake:
    bounds: Bounds
    model: type[Model] = Model
    rule: str = ""
    by: Callable[..., object] | None = None

    def explored(self, bounds: Bounds, *, states_max: int = 60_000) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            if self.rule:
                patch.setattr(rules, self.rule, self.by)
            return explore(self.model(bounds), states_max=states_max)


MISTAKES = {
    "an old epoch's entry is committed by count": Mistake(
        UNDECIDED, Model, "commit", commit_by_count
    ),
    "no barrier": Mistake(UNDECIDED, NoBarrier),
    "the longest log wins": Mistake(LONG, Model, "best_log", longest_log),
    "the taker keeps its own log": Mistake(SMALL, Model, "best_log", own_log),
    "query without fence": Mistake(SMALL, QueryWithoutFence),
    "a promise is not on disk": Mistake(SMALL, PromiseForgotten),
    "a lower epoch is listened to": Mistake(SMALL, Model, "accepts", accept_any),
    "acknowledged before synced": Mistake(SMALL, Model, "acknowledged", acknowledge_before_sync),
    "the log's length is acknowledged": Mistake(
        SMALL, TruncatesLater, "acknowledged", acknowledge_length
    ),
    "conflicts are not truncated": Mistake(DIVERGED, ConflictsStay),
    "a follower commits past what matched": Mistake(
        LATE, Model, "follower_commit", commit_past_matched
    ),
    "equal entries are forgotten": Mistake(SMALL, Model, "meet", forget_equal),
    "what is as long is taken for equal": Mistake(BEHIND, Model, "meet", meet_by_length),
    "a wiped disk counts": Mistake(LOST_DISKS, AnyDiskCounts),
    "a new disk counts before it caught up": Mistake(LOST_DISKS, NamedTooEarly),
    "the set changes in a single step": Mistake(REASSIGNED, SingleStep),
    "the joint record is left too early": Mistake(REASSIGNED, LeaveJointEarly),
    "a takeover needs no majority": Mistake(SMALL, EnterWithoutMajority),
    "an epoch is given out twice": Mistake(SMALL, EpochTakenTwice),
}
