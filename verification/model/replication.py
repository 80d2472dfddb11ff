"""A small cluster as a set of states and steps, decided by the rules that the machines use.

The model has no code of its own for what must be right: promises, the best log, commit, what a
follower vouches for, where two logs meet are asked of `replication.rules`, quorums of
`PartitionRecord`, epochs of a log of `LogFacts`. What it adds is *when*: everything that may happen
next is a step, and the explorer takes every step from every state.

- Messages are facts that were said and may be heard at any time, once, often or never: `replies`
  to a fence and `acks` stay until nobody is left who would read them. An append is taken from the
  log of a coordinator that believes to be one, deposed or not.
- A crash forgets what is not synced, and every role. A wipe forgets the disk, promise included.
- `history` is what was committed so far by anybody, kept by the observer only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from penstock.replication import rules
from penstock.replication.assignment import PartitionRecord
from penstock.replication.rules import End, Fit
from verification.model.world import (
    FENCING,
    JOINT,
    LEADING,
    NONE,
    VOTER,
    Bounds,
    Broken,
    Member,
    Seat,
    World,
    facts,
    known,
    put,
    record,
    seated,
    written,
)  # fmt: skip

Step = tuple[str, World]


class Model:
    """The steps. A test replaces one of them, or one rule, by a mistake."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def initial(self) -> World:
        bounds, count = self.bounds, len(self.bounds.seats)
        wanted = bounds.target or (True,) * count
        logs = bounds.logs or ((),) * count
        members = tuple(
            Member(seat=Seat(sets, 0), wanted=w, log=log, durable=len(log))
            for sets, w, log in zip(bounds.seats, wanted, logs, strict=True)
        )
        return World(max((e for log in logs for e in log), default=0), members, (), 0)

    def steps(self, world: World) -> Iterator[Step]:
        """All that may happen next.

        Without `lag` an acknowledgement is heard when it is said, a commit is known at once
        wherever the entry is, and a fence is answered by the log as it is when the answer is read.
        What must be kept is then kept from the earliest moment on, so a history that breaks has
        less room to hide; but followers whose own watermark is behind are not seen, nor what they
        do by it. `tests/model/test_lag.py` compares both forms.
        """
        if not self.bounds.lag:
            for step in self.heard(world):
                yield step
                return
        for n, member in enumerate(world.members):
            yield from self.take(world, n, member)
            if member.phase == FENCING:
                yield from self.fence(world, n, member)
                yield from self.enter(world, n, member)
            elif member.phase == LEADING:
                yield from self.write(world, n, member)
                yield from self.lead(world, n, member)
                yield from self.commit(world, n, member)
                yield from self.change(world, n, member)
            if member.durable < len(member.log):
                yield "sync", put(world, n, self.vouch(member._replace(durable=len(member.log))))
            if member.phase or member.stream[0] or member.durable < len(member.log):
                yield "crash", put(world, n, self.crashed(member))
            if member.disk < self.bounds.wipes:
                yield "wipe", put(world, n, self.wiped(member))

    def heard(self, world: World) -> Iterator[Step]:
        for n, leader in enumerate(world.members):
            if leader.phase == LEADING:
                yield from self.commit(world, n, leader)

    # --- epochs and promises ---

    def take(self, world: World, n: int, member: Member) -> Iterator[Step]:
        epoch = world.epoch + 1
        if epoch > self.bounds.epochs or not member.seat.sets or not self.named(member):
            return
        members = [
            m._replace(views=(*m.views, (epoch, *m.seat))) if self.bounds.records_change else m
            for m in world.members
        ]
        taker = self.promise(members[n], epoch)._replace(phase=FENCING, epoch=epoch)
        members[n] = taker
        yield f"take {epoch}", world._replace(epoch=epoch, members=tuple(members))

    def named(self, member: Member) -> bool:
        return member.seat.disk == member.disk

    def promise(self, member: Member, epoch: int) -> Member:
        if member.phase != NONE and member.epoch < epoch:
            member = member._replace(phase=NONE, epoch=0, barrier=0)
        return member._replace(promised=max(member.promised, epoch))

    def fence(self, world: World, n: int, taker: Member) -> Iterator[Step]:
        for r, member in enumerate(world.members):
            if r == n or not rules.accepts(member.promised, taker.epoch):
                continue
            promised = self.promise(member, taker.epoch)
            if not self.bounds.lag:
                if promised != member:
                    yield f"fence {taker.epoch}", put(world, r, promised)
                continue
            end = facts(member.log[: member.durable]).end
            reply = (taker.epoch, member.disk, *end)
            if reply not in member.replies:
                promised = promised._replace(replies=(*promised.replies, reply))
            yield f"fence {taker.epoch}", put(world, r, promised)

    def crashed(self, member: Member) -> Member:
        return member._replace(
            log=member.log[: member.durable], committed=min(member.committed, member.durable),
            phase=NONE, epoch=0, barrier=0, stream=(0, 0),
        )  # fmt: skip

    def wiped(self, member: Member) -> Member:
        return self.crashed(member)._replace(
            log=(), durable=0, committed=0, promised=0, disk=member.disk + 1
        )

    # --- taking over ---

    def enter(self, world: World, n: int, taker: Member) -> Iterator[Step]:
        if taker.promised != taker.epoch or not self.room(taker.log):
            return
        for told in self.promises(world, n, taker.epoch):
            ends = told | {str(n): facts(taker.log).end}
            if not self.record(world, taker.epoch).majority(ends):
                continue
            best = int(rules.best_log(ends, str(n)))
            if best == n:
                yield f"enter {taker.epoch}", put(world, n, self.entered(taker))
            else:
                yield from self.adopt(world, n, best, ends[str(best)])

    def promises(self, world: World, n: int, epoch: int) -> Iterator[dict[str, End]]:
        """What a taker may have heard so far: of each other member nothing, or one reply."""
        heard: list[list[tuple[str, End] | None]] = []
        for r, member in enumerate(world.members):
            if not self.bounds.lag and r != n and member.promised == epoch:
                if self.counts(world, r, epoch, member.disk):
                    heard.append([None, (str(r), facts(member.log[: member.durable]).end)])
                continue
            replies = [
                (str(r), End(*end))
                for of, disk, *end in member.replies
                if r != n and of == epoch and self.counts(world, r, epoch, disk)
            ]
            if replies:
                heard.append([None, *replies])
        for choice in product(*heard):
            yield dict(reply for reply in choice if reply is not None)

    def entered(self, taker: Member) -> Member:
        barrier = len(taker.log) + 1
        return taker._replace(phase=LEADING, barrier=barrier, log=(*taker.log, taker.epoch))

    def room(self, log: tuple[int, ...]) -> bool:
        return not self.bounds.length or len(log) < self.bounds.length

    def adopt(self, world: World, n: int, lender: int, sought: End) -> Iterator[Step]:
        taker, other = world.members[n], world.members[lender]
        if other.promised != taker.epoch:
            return
        lent = other.log[: other.durable]
        cut = self.cut(taker, self.met(taker, lent))
        if self.bounds.partial and cut != taker:
            yield f"begin to adopt for {taker.epoch}", put(world, n, cut)
        copied = cut._replace(log=cut.log + lent[len(cut.log) :])
        if facts(copied.log).epoch_at(sought.sequence) == sought.epoch:
            if self.room(copied.log):
                yield f"adopt and enter {taker.epoch}", put(world, n, self.entered(copied))
            yield f"adopt for {taker.epoch}", put(world, n, copied)

    def met(self, member: Member, log: tuple[int, ...]) -> int:
        tail = facts(member.log).tail(member.committed)
        return rules.meet(tail, last_of=facts(log).last_of) or 0

    def cut(self, member: Member, matched: int) -> Member:
        if not rules.may_truncate(matched, committed=member.committed):
            raise Broken(f"a log is cut to {matched}, {member.committed} is committed there")
        return member._replace(log=member.log[:matched], durable=min(member.durable, matched))

    # --- leading and following ---

    def write(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        if self.room(leader.log) and written(leader.log) < self.bounds.entries:
            yield (
                f"write {leader.epoch}",
                put(world, n, leader._replace(log=(*leader.log, leader.epoch))),
            )

    def lead(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        for r, member in enumerate(world.members):
            if r == n or not rules.accepts(member.promised, leader.epoch):
                continue
            if member.stream[0] == leader.epoch:
                yield from self.append(world, r, leader)
            else:
                yield f"follow {leader.epoch}", self.follow(world, r, leader)

    def follow(self, world: World, r: int, leader: Member) -> World:
        member = self.promise(world.members[r], leader.epoch)
        matched = self.met(member, leader.log)
        member = self.cut(member, matched)._replace(stream=(leader.epoch, matched))
        acks = tuple(a for a in member.acks if a[0] != leader.epoch or a[1] == member.disk)
        return put(world, r, self.vouch(self.hear(member._replace(acks=acks), leader)))

    def append(self, world: World, r: int, leader: Member) -> Iterator[Step]:
        member = world.members[r]
        epoch, matched = member.stream
        if len(leader.log) > matched and len(member.log) == matched:
            entry, previous = leader.log[matched], leader.log[matched - 1] if matched else 0
            how = rules.fit(
                matched + 1, matched + 1, epoch=entry, epoch_previous=previous,
                end=facts(member.log).end, epoch_at=facts(member.log).epoch_at,
            )  # fmt: skip
            if how is Fit.NEXT:
                grown = member._replace(log=(*member.log, entry), stream=(epoch, matched + 1))
                yield f"append {epoch}", put(world, r, self.vouch(grown))
        yield from self.watermark(world, r, leader)

    def watermark(self, world: World, r: int, leader: Member) -> Iterator[Step]:
        member = world.members[r]
        heard = self.hear(member, leader)
        if heard.committed != member.committed and rules.accepts(member.promised, leader.epoch):
            yield f"watermark {leader.epoch}", put(world, r, heard)

    def hear(self, member: Member, leader: Member) -> Member:
        return member._replace(
            committed=rules.follower_commit(
                leader.committed, matched=member.stream[1], committed=member.committed
            )
        )

    def vouch(self, member: Member) -> Member:
        """Say how far we are, to whom we follow; it may be heard from now on."""
        epoch, matched = member.stream
        if not epoch or not rules.accepts(member.promised, epoch):
            return member
        ack = (epoch, member.disk, rules.acknowledged(member.durable, matched=matched))
        others = tuple(a for a in member.acks if a[:2] != ack[:2])
        before = max((a[2] for a in member.acks if a[:2] == ack[:2]), default=0)
        return member._replace(acks=tuple(sorted((*others, (*ack[:2], max(before, ack[2]))))))

    # --- commit ---

    def counts(self, world: World, r: int, epoch: int, disk: int) -> bool:
        """Whether the record, as the holder of `epoch` knows it, counts on that disk."""
        return not self.bounds.records_change or self.seat(world.members[r], epoch).disk == disk

    def seat(self, member: Member, epoch: int) -> Seat:
        return next((Seat(*v[1:]) for v in member.views if v[0] == epoch), member.seat)

    def record(self, world: World, epoch: int) -> PartitionRecord:
        if not self.bounds.records_change:
            return record(self.bounds.seats)
        return record(tuple(self.seat(m, epoch).sets for m in world.members))

    def durable(self, world: World, n: int, leader: Member) -> dict[str, int]:
        """What the leader may have heard of the disks that count."""
        durable = {
            str(r): ack[2]
            for r, member in enumerate(world.members)
            for ack in member.acks
            if ack[0] == leader.epoch and self.counts(world, r, leader.epoch, ack[1])
        }
        return durable | {str(n): leader.durable}

    def commit(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        reached = rules.commit(
            self.record(world, leader.epoch).committed(self.durable(world, n, leader)),
            committed=leader.committed,
            barrier=leader.barrier,
        )
        if reached <= leader.committed:
            return
        log = leader.log[:reached]
        shorter = min(reached, len(world.history))
        if log[:shorter] != world.history[:shorter]:
            raise Broken(f"{log} is committed, {world.history} was")
        history = log if reached > len(world.history) else world.history
        decided = max(world.decided, leader.epoch)
        after = put(world, n, leader._replace(committed=reached))
        yield f"commit {reached}", after._replace(history=history, decided=decided)

    # --- who the replicas are ---

    def change(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        """By compare and swap: nobody has taken a later epoch, and the leader knows the record."""
        if world.epoch != leader.epoch or not self.bounds.records_change:
            return
        known = all(self.seat(m, leader.epoch) == m.seat for m in world.members)
        if not known:
            yield "learn the record", self.learned(world, n)
        elif leader.committed >= leader.barrier:
            yield from self.name(world, leader)
            if self.bounds.target:
                yield from self.reassign(world, n, leader)

    def name(self, world: World, leader: Member) -> Iterator[Step]:
        for r, member in enumerate(world.members):
            if member.seat.sets and self.caught_up(member, leader) and not self.named(member):
                named = member._replace(seat=Seat(member.seat.sets, member.disk))
                yield "name a disk", put(world, r, named)

    def caught_up(self, member: Member, leader: Member) -> bool:
        """A follower's disk, by what it says of itself."""
        said = [a[2] for a in member.acks if a[:2] == (leader.epoch, member.disk)]
        return bool(said) and said[0] >= leader.committed

    def reassign(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        members = world.members
        if any(m.seat.sets & JOINT for m in members):
            yield from self.leave_joint(world, n, leader)
        elif all(m.wanted == bool(m.seat.sets) for m in members):
            return
        elif all(self.caught_up(m, leader) for m in members if m.wanted and not m.seat.sets):
            yield (
                "joint record",
                seated(
                    world,
                    [
                        Seat(m.seat.sets | JOINT * m.wanted, m.seat.disk if m.seat.sets else m.disk)
                        for m in members
                    ],
                ),
            )

    def leave_joint(self, world: World, n: int, leader: Member) -> Iterator[Step]:
        alone = [VOTER if m.seat.sets & JOINT else 0 for m in world.members]
        if record(tuple(alone)).committed(self.durable(world, n, leader)) >= leader.committed:
            disks = [m.seat.disk for m in world.members]
            yield "new set", seated(world, [Seat(*s) for s in zip(alone, disks, strict=True)])

    def learned(self, world: World, n: int) -> World:
        epoch = world.members[n].epoch
        members = [
            m._replace(
                views=tuple((e, *m.seat) if e == epoch else (e, s, d) for e, s, d in m.views)
            )
            for m in world.members
        ]
        if not members[n].seat.sets:  # it has moved itself away
            members[n] = members[n]._replace(phase=NONE, epoch=0, barrier=0)
        return world._replace(members=tuple(members))

    # --- what makes two states one ---

    def canonical(self, world: World) -> World:
        """One state for all that differ in names only, or in what nobody will ask for."""
        members = list(world.members)
        holders: dict[int, int] = {}  # epoch -> phase
        for n, member in enumerate(members):
            if member.phase != NONE and not self.heeded(world, member):
                members[n] = member._replace(phase=NONE, epoch=0, barrier=0)
            elif member.phase != NONE:
                holders[member.epoch] = member.phase
        members = sorted([self.tidied(m, world.history, holders) for m in members])
        decided = max((e for e in holders if e <= world.decided), default=0)
        return World(world.epoch, tuple(members), world.history, decided)

    def heeded(self, world: World, holder: Member) -> bool:
        """Whether a quorum might still listen to a coordinator. If not it can have nothing more
        promised or committed; all else that it might do touches nobody who has turned away, and
        could have been done before they did: those states are explored without it."""
        listening = [
            str(n) for n, m in enumerate(world.members) if rules.accepts(m.promised, holder.epoch)
        ]
        if len(listening) == len(world.members):
            return True
        return self.record(world, holder.epoch).majority(listening)

    def tidied(self, member: Member, history: tuple[int, ...], holders: dict[int, int]) -> Member:
        promised, committed, (of, matched) = member.promised, member.committed, member.stream
        replies, acks, views = member.replies, member.acks, member.views
        if promised not in holders:  # it matters only whom we refuse
            promised = max((e + 1 for e in holders if e < promised), default=0)
        if of and not (of in holders and rules.accepts(member.promised, of)):
            of = matched = 0
        if not self.bounds.lag and member.phase != LEADING:
            committed = known(member.log, history)
        if not (replies or acks or views):
            kept = (promised, committed, of) == (
                member.promised,
                member.committed,
                member.stream[0],
            )
            if kept:
                return member
        if replies:
            replies = tuple(sorted(r for r in replies if holders.get(r[0]) == FENCING))
        if acks:
            acks = tuple(a for a in acks if holders.get(a[0]) == LEADING)
        if views:
            views = tuple(v for v in views if v[0] in holders)
        return Member(
            promised, member.log, member.durable, committed, member.phase, member.epoch,
            member.barrier, (of, matched), replies, acks, member.disk, member.seat, member.wanted,
            views,
        )  # fmt: skip
