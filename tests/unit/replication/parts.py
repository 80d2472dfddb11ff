"""Small parts that the tests of replication are put together from."""

from itertools import groupby
from typing import Any, TypeVar

from penstock.model.batch import Batch, Kind, seal
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import (
    Ack,
    Append,
    Effects,
    Fenced,
    Follow,
    Followed,
    OpenStream,
    Persist,
    Send,
)
from penstock.replication.facts import LogFacts
from penstock.replication.replica import Replica

T = TypeVar("T")


def batch(first: int, *, epoch: int, previous: int | None = None, count: int = 1) -> Batch:
    return seal(
        Kind.ENQ, b"x" * count, topic=1, partition=0, epoch=epoch,
        epoch_previous=epoch if previous is None else previous, first=first, count=count,
        time_ms=0, chain_previous=0,
    )  # fmt: skip


def facts(*epochs: int, durable: int | None = None, first: int = 1) -> LogFacts:
    """A log whose n-th entry is of the n-th epoch."""
    runs, at = [], 1
    for epoch, entries in groupby(epochs):
        runs.append((epoch, at))
        at += len(list(entries))
    last = len(epochs)
    return LogFacts(first=first, last=last, durable=last if durable is None else durable, runs=runs)


def record(epoch: int = 1, coordinator: str = "a", voters: str = "abc", **more: Any) -> Any:
    more.setdefault("uuids", {node: disk(node) for node in voters + "".join(more.get("joint", ""))})
    more = {name: tuple(v) if isinstance(v, str) else v for name, v in more.items()}
    return PartitionRecord(epoch=epoch, coordinator=coordinator, voters=tuple(voters), **more)


def disk(node: str) -> str:
    return f"{node}-disk"


def replica(
    node: str = "b", *, log: LogFacts | None = None, promised: int = 0, committed: int = 0
) -> Replica:
    return Replica(
        node, uuid=disk(node), promised=promised, committed=committed, log=log or facts()
    )


def only(kind: type[T], effects: Effects) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(kind: type[T], effects: Effects) -> list[T]:
    return [m for m in (e.message for e in only(Send, effects)) if isinstance(m, kind)]


def opened(effects: Effects) -> Follow:
    (stream,) = only(OpenStream, effects)
    return stream.follow


def persist(machine: Replica, effects: Effects, now: int = 0) -> Effects:
    """The driver keeps the promise at once."""
    more = [e for p in only(Persist, effects) for e in machine.on_persisted(p.promised, now)]
    return [e for e in effects if not isinstance(e, Persist)] + more


def following(
    node: str = "b", *, log: LogFacts | None = None, epoch: int = 1, committed: int = 0
) -> tuple[Replica, Follow]:
    """A replica that has asked `a` for its stream."""
    machine = replica(node, log=log, committed=committed)
    follow = opened(persist(machine, machine.on_record(record(epoch), epoch, 0)))
    return machine, follow


def followed(follow: Follow, matched: int, **more: Any) -> Followed:
    return Followed("a", follow.epoch, follow.stream, matched, more.pop("committed", 0), **more)


def append(follow: Follow, committed: int = 0, **more: Any) -> Append:
    return Append("a", follow.epoch, follow.stream, committed, **more)


def fencing(node: str = "a", *, epoch: int = 1, log: LogFacts | None = None) -> Replica:
    """A replica that has won an epoch and promised it."""
    machine = replica(node, log=log)
    persist(machine, machine.on_epoch_taken(record(epoch, node), epoch, 0))
    return machine


def promise(node: str, epoch: int, end: tuple[int, int] = (0, 0)) -> Fenced:
    return Fenced(node, disk(node), epoch, *end, 0)


def serving(
    node: str = "a", *, epoch: int = 1, log: LogFacts | None = None, followers: str = "bc"
) -> Replica:
    """A coordinator whose barrier is committed and whose followers hold everything."""
    machine = fencing(node, epoch=epoch, log=log)
    machine.on_fenced(promise("b" if node != "b" else "c", epoch), 0)
    previous = machine.log.end.epoch
    machine.on_staged(batch(machine.log.last + 1, epoch=epoch, previous=previous))
    machine.on_durable(machine.log.last)
    for follower in followers:
        follow_and_hold(machine, follower)
    assert machine.serving
    return machine


def follow_and_hold(machine: Replica, node: str, *, uuid: str = "", stream: int = 1) -> Effects:
    """A follower opens a stream, is sent everything and has synced it."""
    uuid = uuid or disk(node)
    machine.on_follow(Follow(node, uuid, machine.epoch, stream, 0, [], 1000, 1 << 20), 0)
    last = machine.log.last
    machine.on_sent(node, last, entries=last, bytes=last, now=0)
    return machine.on_ack(ack(node, machine, stream=stream, durable=last, uuid=uuid), 0)


def ack(node: str, machine: Replica, *, stream: int = 1, durable: int, uuid: str = "") -> Ack:
    uuid = uuid or disk(node)
    return Ack(node, uuid, machine.epoch, stream, durable, durable, durable, machine.epoch)
