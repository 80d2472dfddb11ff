"""What a connection may make a node hold: answers that it does not read, frames it does not end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.integration.harness import Node, body
from tests.integration.raw_peer import WANTED, RawPeer, raw_peer

from penstock.config import Config, Limits
from penstock.node.door.budget import Account, Budget, Held
from penstock.node.door.flow import INFLIGHT_BYTES_MAX, UNREAD_BYTES_MAX, Flow
from penstock.node.session.session import READS_MAX, Session
from penstock.wire.frame import FrameType, encode
from penstock.wire.messages import Call, Enqueue, Enqueued, Hello, Part, pack

MIB = 1 << 20


@asynccontextmanager
async def connected(
    node: Node, hello: Hello | None = None
) -> AsyncIterator[tuple[RawPeer, Session]]:
    """Both ends of a greeted connection."""
    known = set(node.engine.connections)
    async with raw_peer(node.engine) as peer:
        await peer.greet(hello)
        (session,) = node.engine.connections - known
        yield peer, session


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def unsent(session: Session) -> int:
    return 0 if session._transport is None else session._transport.get_write_buffer_size()


# --- answers that are not read ---


def peek(peer: RawPeer, *numbers: int) -> None:
    call = pack(Call("peek", {"topic": "jobs", "limit": 1}))
    for number in numbers:
        peer.send(FrameType.SUBSCRIBE, number, call, flags=WANTED)


async def unread_answers(path: Path) -> None:
    node = await Node(path).start()
    await node.topic()
    await node.put("jobs", bytes(MIB))
    bound = UNREAD_BYTES_MAX + (READS_MAX + 1) * (MIB + 1000)
    async with connected(node) as (peer, session):
        peek(peer, *range(1, 151))  # in one piece, and more behind it
        most = 0
        for number in range(151, 251):
            peek(peer, number)
            await node.stats()  # as long as it takes: others are served meanwhile
            most = max(most, unsent(session))
        assert UNREAD_BYTES_MAX < most < bound
        answered = set()
        while len(answered) < 250:
            answer = await peer.frame()
            assert answer is not None and answer.type is FrameType.ACK
            assert len(answer.payload) > MIB and unsent(session) < bound
            answered.add(answer.sequence)
    await node.stop()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_unread_answers_stay_bounded_and_all_arrive(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    run(unread_answers(tmp_path / "data"))


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[Node]:
    """A node that closes connections after half a second of silence."""
    config = Config(data=tmp_path / "data", limits=Limits(idle_s=0.5), drain_s=5.0)
    node = await Node(tmp_path / "data", config).start()
    await node.topic()
    await node.put("jobs", bytes(MIB))
    yield node
    await node.stop()


async def test_who_never_reads_is_cut_off(impatient: Node) -> None:
    async with connected(impatient) as (peer, session):
        peek(peer, *range(1, 101))
        await until(lambda: unsent(session) > UNREAD_BYTES_MAX)
        await until(lambda: session not in impatient.engine.connections)
        await until(lambda: impatient.engine.budget.held == 0)


async def test_who_is_thrown_out_and_does_not_read_is_cut_off(impatient: Node) -> None:
    made = await impatient.call("key_create", name="one")
    async with connected(impatient, Hello([1], made["key"])) as (peer, session):
        peek(peer, *range(1, 101))
        await until(lambda: unsent(session) > UNREAD_BYTES_MAX)
        await impatient.forced("key_revoke", made["id"])
        await until(lambda: session not in impatient.engine.connections)


class Sluggish:
    """A transport whose buffer is as full as a test says."""

    def __init__(self) -> None:
        self.size, self.reading = 0, True

    def get_write_buffer_size(self) -> int:
        return self.size

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def writelines(self, list_of_data: Any, /) -> None: ...

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None: ...


@pytest.fixture
async def flow() -> Flow:
    return Flow(Budget(1 << 30), Limits(), lambda reason: None)


@pytest.fixture
async def transport(flow: Flow) -> Sluggish:
    made = Sluggish()
    flow.start(made)
    return made


def silent(flow: Flow) -> bool:
    """Whether it shows no life, a minute after it was last heard."""
    flow.heard -= 60
    return flow.silent_s() >= 60


async def test_reading_goes_on_when_nothing_is_in_the_way(flow: Flow, transport: Sluggish) -> None:
    flow.take(INFLIGHT_BYTES_MAX + 1)
    transport.size = UNREAD_BYTES_MAX + 1
    flow.on_unsent(0)
    assert not transport.reading
    flow.give_back(INFLIGHT_BYTES_MAX + 1)
    assert not transport.reading
    flow.on_drained()
    assert transport.reading


async def test_who_reads_slowly_is_alive(flow: Flow, transport: Sluggish) -> None:
    transport.size = 2 * UNREAD_BYTES_MAX
    flow.on_unsent(0)
    assert silent(flow)
    transport.size -= 1
    assert not silent(flow) and silent(flow)


async def test_who_waits_for_the_node_is_alive(flow: Flow, transport: Sluggish) -> None:
    assert silent(flow)
    flow.take(INFLIGHT_BYTES_MAX + 1)
    assert not silent(flow) and not silent(flow)
    flow.give_back(INFLIGHT_BYTES_MAX + 1)
    assert flow.silent_s() < 60 and silent(flow)


# --- frames that are not whole ---


def enqueue(number: int, size: int) -> bytes:
    columns = body([{"payload": bytes(size)}])
    control = pack(Enqueue("jobs", [Part(0, 1, len(columns))]))
    return b"".join(encode(FrameType.BATCH, number, control, columns, flags=WANTED))


def fill(budget: Budget) -> Account:
    """As if other callers held all that is not kept for those who hold little."""
    others = budget.account()
    others.take(budget.bytes_large_max - budget.held, Held.REQUESTS)
    return others


async def test_the_part_of_a_frame_that_is_here_counts(node: Node) -> None:
    await node.topic()
    whole, engine = enqueue(1, 900_000), node.engine
    async with connected(node) as (peer, _):
        peer.write(whole[:500_000])
        await until(lambda: engine.budget.held == 500_000)
        peer.write(whole[500_000:] + whole[:300_000])
        assert (await peer.answer(1, Enqueued)).placed[0].count == 1
        await until(lambda: engine.budget.held == 300_000)
    await until(lambda: engine.budget.held == 0)  # it went with the connection


@pytest.mark.parametrize("sent", [20, 500_000])
async def test_a_frame_that_the_node_has_no_room_for_is_passed_over(node: Node, sent: int) -> None:
    await node.topic()
    whole, engine = enqueue(7, 900_000), node.engine
    others = fill(engine.budget)
    async with connected(node) as (peer, _):
        peer.write(whole[:sent])
        assert (await peer.answer(7))["code"] == "backpressure"
        peer.write(whole[sent:-1])
        peer.write(whole[-1:] + enqueue(8, 100_000))  # the next one fits
        assert (await peer.answer(8, Enqueued)).placed[0].count == 1
        assert engine.budget.held == others.held


async def test_a_frame_is_given_up_when_others_have_filled_the_node(node: Node) -> None:
    await node.topic()
    whole, engine = enqueue(7, 900_000), node.engine
    async with connected(node) as (peer, _):
        peer.write(whole[:500_000])
        await until(lambda: engine.budget.held == 500_000)
        others = fill(engine.budget)
        peer.write(whole[500_000:600_000])
        assert (await peer.answer(7))["code"] == "backpressure"
        assert engine.budget.held == others.held
        others.give_back(others.held, Held.REQUESTS)
        peer.write(whole[600_000:] + whole)
        assert (await peer.answer(7, Enqueued)).placed[0].count == 1
