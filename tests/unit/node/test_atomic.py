"""Atomic batches over partitions of several nodes: all or none, whoever fails at whatever point."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from tests.integration.harness import body, ids_of
from tests.unit.node.conftest import Cluster
from ulid import ULID

from penstock.errors import (
    Backpressure,
    BatchAborted,
    PenstockError,
    RetryableError,
    Unavailable,
)
from penstock.heap.transactions import Transactions
from penstock.node.atomic import choose_home
from penstock.wire.frame import FrameType
from penstock.wire.messages import Call, Enqueue, unpack


async def put_all(
    cluster: Cluster, name: str = "a", sequence: int = 1, partitions: Sequence[int] = (0, 1, 2)
) -> Any:
    """One entry for each partition, all or none."""
    parts = [
        (i, 1, body([{"payload": b"%d" % i}], producer=(f"p{i}", 1, sequence))) for i in partitions
    ]
    return await cluster[name].connection.enqueue("jobs", parts, atomic=True)


def ready(cluster: Cluster) -> list[int]:
    """Ready messages of each partition, wherever it is served."""
    found = {p.index: p.heap.ready for n in cluster.nodes.values()
             for p in n.engine.topics["jobs"].local}  # fmt: skip
    return [found[i] for i in sorted(found)]


def undecided(cluster: Cluster) -> int:
    return sum(
        len(p.heap.prepared) for n in cluster.nodes.values() for p in n.engine.topics["jobs"].local
    )


async def doubts_resolved(cluster: Cluster) -> None:
    """Let time pass until nothing is in doubt."""
    async with asyncio.timeout(60):
        while undecided(cluster):
            for node in cluster.nodes.values():
                node.clock.advance(6)
            await asyncio.sleep(0.01)


async def confirmed(cluster: Cluster, but: int = 0) -> None:
    """Let time pass until homes keep so many commits for participants, at most."""
    async with asyncio.timeout(60):
        while but < sum(
            len(p.heap.transactions.unconfirmed)
            for n in cluster.nodes.values() for p in n.engine.topics["jobs"].local
        ):  # fmt: skip
            for node in cluster.nodes.values():
                node.clock.advance(11)
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def first_is_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test knows whom to hit."""
    monkeypatch.setattr("penstock.node.atomic.choose_home", lambda partitions, _: partitions[0])


class Saboteur:
    """Loses what one node says to another, at a named point: `before` it was heard or after."""

    def __init__(self, cluster: Cluster, name: str, other: str, what: str, *, heard: bool) -> None:
        self._cluster, self._name, self._other = cluster, name, other
        self._what, self._heard = what, heard
        self.struck = False
        peer = cluster.views[name].peers[other]
        self._ask = peer.ask
        peer.ask = self.ask  # type: ignore[method-assign]

    def ask(self, type: FrameType, answer: Any, *payload: Any) -> asyncio.Future[Any]:
        if self.struck or self._what != _named(type, payload[0]):
            return self._ask(type, answer, *payload)
        self.struck = True
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._heard:  # it is carried out, and the answer gets lost
            self._ask(type, answer, *payload).add_done_callback(lambda _: self._strike(lost))
        else:
            self._strike(lost)
        return lost

    def _strike(self, lost: asyncio.Future[Any]) -> None:
        self._cluster.cut(self._name, self._other)
        lost.set_exception(Unavailable("the connection was lost"))
        self._again = asyncio.ensure_future(self._cluster.connect(self._name, self._other))


def _named(type: FrameType, control: Any) -> str:
    if type is FrameType.BATCH:
        return "prepare" if unpack(control, Enqueue)[0].transaction else "enqueue"
    if type is FrameType.SUBSCRIBE:
        return unpack(control, Call)[0].method.removeprefix("transaction_")
    return type.name


async def test_a_batch_is_in_everywhere(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    answer = await put_all(cluster)
    assert len(set(ids_of(answer))) == 3
    assert ready(cluster) == [1, 1, 1]


async def test_any_node_may_drive_it_and_repeat_it(cluster: Cluster) -> None:
    await cluster.topic("jobs", "bcb")
    first = await put_all(cluster, "a")
    again = await put_all(cluster, "c")
    assert ids_of(again) == ids_of(first)
    assert ready(cluster) == [1, 1, 1]


async def test_a_partition_that_nobody_serves_fails_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.atomic.WAIT_S", 0.1)
    await cluster.topic("jobs", "ab-")
    with pytest.raises(RetryableError):
        await put_all(cluster)
    await doubts_resolved(cluster)
    assert ready(cluster) == [0, 0]


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize(
    ("what", "other", "placed"),
    [("prepare", "b", "abc"), ("prepare", "b", "bac"), ("decide", "b", "bac"),
     ("apply", "c", "abc")],
)  # fmt: skip
async def test_a_connection_lost_at_any_point_leaves_all_or_none(
    cluster: Cluster, what: str, other: str, placed: str, heard: bool
) -> None:
    await cluster.topic("jobs", placed)
    saboteur = Saboteur(cluster, "a", other, what, heard=heard)
    (result,) = await asyncio.gather(put_all(cluster), return_exceptions=True)
    written = not isinstance(result, RetryableError | BatchAborted)
    assert saboteur.struck
    await doubts_resolved(cluster)
    assert ready(cluster) in ([[1, 1, 1]] if written else [[0, 0, 0], [1, 1, 1]])
    await put_all(cluster)
    assert ready(cluster) == [1, 1, 1]


@pytest.mark.parametrize("home", "abc")
async def test_a_batch_whose_driver_died_is_decided_against(cluster: Cluster, home: str) -> None:
    """The driver prepared everything and was never heard of again."""
    placed = home + "abc".replace(home, "")
    await cluster.topic("jobs", placed)
    driver = next(n for n in "abc" if n != home)
    peers = [n for n in "abc" if n != driver]
    dead = [Silent(cluster, driver, other) for other in peers]
    task = asyncio.create_task(put_all(cluster, driver))
    async with asyncio.timeout(60):
        while undecided(cluster) < 3:
            await asyncio.sleep(0.005)
    await doubts_resolved(cluster)
    assert ready(cluster) == [0, 0, 0]
    for one in dead:
        one.speak()
    with pytest.raises(PenstockError):
        await task
    await put_all(cluster, "a")
    assert ready(cluster) == [1, 1, 1]


async def test_a_home_that_is_away_keeps_nobody_else_in_doubt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches are decided for, each in a home of its own, and c has heard of neither."""
    monkeypatch.setattr("penstock.node.atomic.ASK_S", 60.0)
    await cluster.topic("jobs", "abc")
    for sequence, home in ((1, 0), (2, 1)):
        Saboteur(cluster, "a", "c", "apply", heard=False)
        await put_all(cluster, sequence=sequence, partitions=(home, 2))
        async with asyncio.timeout(60):
            while "c" not in cluster.views["a"].peers:
                await asyncio.sleep(0.005)
    partition = cluster["c"].engine.topics["jobs"].here(2)
    assert [t.home for t in partition.heap.prepared.values()] == [0, 1]
    cluster.give("jobs", 0, "")
    async with asyncio.timeout(20):  # the home that is away is asked for longer than that
        while len(partition.heap.prepared) > 1:
            cluster["c"].clock.advance(6)
            await asyncio.sleep(0.01)
    assert partition.heap.ready == 1
    cluster.give("jobs", 0, "a")
    await doubts_resolved(cluster)
    assert partition.heap.ready == 2


def transactions(cluster: Cluster, name: str, index: int) -> Transactions:
    return cluster[name].engine.topics["jobs"].here(index).heap.transactions


async def test_a_commit_is_not_forgotten_while_a_participant_may_ask(cluster: Cluster) -> None:
    """c prepared, missed its copy, and is away while the home decides more than it remembers."""
    await cluster.topic("jobs", "abc")
    transactions(cluster, "a", 0).decided_max = 3
    Saboteur(cluster, "a", "c", "apply", heard=False)
    await put_all(cluster)
    cluster.give("jobs", 2, "")
    for sequence in range(2, 12):
        await put_all(cluster, sequence=sequence, partitions=(0, 1))
    await confirmed(cluster, but=1)
    assert len(transactions(cluster, "a", 0).committed) == 3
    cluster.give("jobs", 2, "c")
    await doubts_resolved(cluster)
    assert ready(cluster) == [11, 11, 1]
    await confirmed(cluster)


async def test_a_commit_is_confirmed_by_every_participant(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    await put_all(cluster)
    (commit,) = transactions(cluster, "a", 0).unconfirmed.values()
    assert [place.partition for place in commit.places] == [1, 2]
    await confirmed(cluster)
    assert not transactions(cluster, "b", 1).unconfirmed  # copies are nobody's to ask for


async def test_a_home_that_must_remember_too_much_takes_on_no_more(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    transactions(cluster, "a", 0).unconfirmed_max = 1
    await put_all(cluster)
    with pytest.raises(Backpressure):
        await put_all(cluster, sequence=2)
    await put_all(cluster, sequence=2, partitions=(1, 2))
    await confirmed(cluster)
    await put_all(cluster, sequence=3)
    await doubts_resolved(cluster)
    assert ready(cluster) == [2, 3, 3]


async def test_a_driver_that_took_too_long_decides_against(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.topic("jobs", "abc")
    monkeypatch.setattr("penstock.node.atomic.COMMIT_S", -1.0)
    with pytest.raises(BatchAborted):
        await put_all(cluster)
    await doubts_resolved(cluster)
    assert ready(cluster) == [0, 0, 0]


async def test_a_late_commit_does_not_win_over_an_abort_that_was_forgotten(
    cluster: Cluster,
) -> None:
    """The home decided against when it was asked, and remembers nothing of it."""
    await cluster.topic("jobs", "abc")
    silent = [Silent(cluster, "b", "a"), Silent(cluster, "b", "c")]
    task = asyncio.create_task(put_all(cluster, "b"))
    async with asyncio.timeout(60):
        while undecided(cluster) < 3:
            await asyncio.sleep(0.005)
    await doubts_resolved(cluster)
    transactions(cluster, "a", 0).aborted.clear()
    for one in silent:
        one.speak()
    with pytest.raises(BatchAborted):
        await task
    assert ready(cluster) == [0, 0, 0]


def test_every_participant_is_the_home_as_often_as_the_others() -> None:
    homes = Counter(choose_home([3, 5, 8], ULID().bytes) for _ in range(600))
    assert sorted(homes) == [3, 5, 8]
    assert min(homes.values()) > 100


class Silent:
    """Holds back every decision that a node makes, until it may speak again."""

    def __init__(self, cluster: Cluster, name: str, other: str) -> None:
        self._peer = cluster.views[name].peers[other]
        self._ask, self._held = self._peer.ask, []
        self._peer.ask = self.ask  # type: ignore[method-assign]

    def ask(self, type: FrameType, answer: Any, *payload: Any) -> asyncio.Future[Any]:
        if _named(type, payload[0]) not in ("decide", "apply"):
            return self._ask(type, answer, *payload)
        future = asyncio.get_running_loop().create_future()
        self._held.append((future, (type, answer, *payload)))
        return future

    def speak(self) -> None:
        self._peer.ask = self._ask  # type: ignore[method-assign]
        for future, request in self._held:
            self._ask(*request).add_done_callback(lambda done, f=future: _copy(done, f))


def _copy(done: asyncio.Future[Any], to: asyncio.Future[Any]) -> None:
    if done.exception() is not None:
        to.set_exception(done.exception())  # type: ignore[arg-type]
    else:
        to.set_result(done.result())
