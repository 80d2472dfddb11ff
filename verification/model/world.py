"""The states of the model of replication: members, records, history, and what must always hold.

A member carries all that concerns it, so that members can be sorted: states that differ only in
the names of the replicas are one state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations, groupby
from typing import NamedTuple

from penstock.replication.assignment import PartitionRecord
from penstock.replication.facts import LogFacts

NONE, FENCING, LEADING = 0, 1, 2  # what a member does with the epoch that it holds
VOTER, JOINT = 1, 2  # bits of a seat


class Seat(NamedTuple):
    """What a record says of a member: in which sets it counts, and with which disk."""

    sets: int
    disk: int


class Member(NamedTuple):
    promised: int = 0
    log: tuple[int, ...] = ()  # the epoch of each entry
    durable: int = 0
    committed: int = 0
    phase: int = NONE
    epoch: int = 0  # held, while it fences or leads
    barrier: int = 0
    stream: tuple[int, int] = (0, 0)  # epoch that it follows, and up to where it matched
    replies: tuple[tuple[int, int, int, int], ...] = ()  # epoch, disk, end
    acks: tuple[tuple[int, int, int], ...] = ()  # epoch, disk, durable
    disk: int = 0  # the number of its disk
    seat: Seat = Seat(VOTER, 0)  # in the stored record
    wanted: bool = True  # a member of the set to come
    views: tuple[tuple[int, int, int], ...] = ()  # epoch, sets, disk: its seat as holders know it


class World(NamedTuple):
    epoch: int  # the last one given out
    members: tuple[Member, ...]
    history: tuple[int, ...]  # everything that was ever committed
    decided: int  # the epoch of the coordinator that committed last


@dataclass(frozen=True)
class Bounds:
    epochs: int = 3
    entries: int = 1  # of clients in one log, beside the barriers of its epochs
    length: int = 0  # of a log, barriers included; 0: what epochs and entries make it
    seats: tuple[int, ...] = (VOTER, VOTER, VOTER)
    target: tuple[bool, ...] = ()  # by member: is it in the set to come; (): nothing changes
    wipes: int = 0  # of each member
    logs: tuple[tuple[int, ...], ...] = ()  # by member: what earlier epochs have left behind
    partial: bool = True  # a taker may be cut off while it copies a log
    lag: bool = True  # acknowledgements and watermarks may be heard late, or never

    @property
    def records_change(self) -> bool:
        return bool(self.target or self.wipes)


class Broken(Exception):
    """A step did what must never be done."""


@cache
def facts(log: tuple[int, ...]) -> LogFacts:
    runs, at = [], 1
    for epoch, entries in groupby(log):
        runs.append((epoch, at))
        at += len(list(entries))
    return LogFacts(last=len(log), durable=len(log), runs=runs)


@cache
def record(seats: tuple[int, ...]) -> PartitionRecord:
    voters = tuple(str(n) for n, sets in enumerate(seats) if sets & VOTER)
    joint = tuple(str(n) for n, sets in enumerate(seats) if sets & JOINT)
    return PartitionRecord(voters=voters, joint=joint)


@cache
def written(log: tuple[int, ...]) -> int:
    """Entries of clients: the first of an epoch is its barrier."""
    return len(log) - len(set(log))


def put(world: World, n: int, member: Member) -> World:
    epoch, members, history, decided = world
    return World(epoch, (*members[:n], member, *members[n + 1 :]), history, decided)


def seated(world: World, seats: list[Seat]) -> World:
    members = zip(world.members, seats, strict=True)
    return world._replace(members=tuple(m._replace(seat=seat) for m, seat in members))


def check(world: World) -> None:
    """Raise `Broken` unless what must always hold does."""
    leaders = [m for m in world.members if m.phase == LEADING]
    if len({m.epoch for m in leaders}) != len(leaders):
        raise Broken("two coordinators in one epoch")
    for leader in leaders:
        known = leader.log[: len(world.history)]
        if leader.epoch > world.decided and known != world.history:
            raise Broken(f"coordinator {leader.epoch} has {leader.log}, not {world.history}")
    for member in world.members:
        if member.log[: member.committed] != world.history[: member.committed]:
            raise Broken(f"{member.committed} of {member.log} as committed, not {world.history}")
    for one, other in combinations({m.log for m in world.members}, 2):
        if not matching(one, other):
            raise Broken(f"{one} and {other} do not match")


@cache
def known(log: tuple[int, ...], history: tuple[int, ...]) -> int:
    """How much of a log is committed."""
    equal = [n for n, pair in enumerate(zip(log, history, strict=False)) if pair[0] == pair[1]]
    return equal[-1] + 1 if equal else 0


@cache
def matching(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Logs with an entry of the same epoch at the same place are equal up to there."""
    equal = [n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] == pair[1]]
    return not equal or one[: equal[-1] + 1] == other[: equal[-1] + 1]
