import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.node.replica.fakes import Dialling, Spawning, info

from penstock.node.cluster.transport import TOLD_MAX, Peers
from penstock.wire.messages import Told

HELLO = Told(1, 0, "probe", b"")


class Heard:
    def __init__(self) -> None:
        self.connected: list[str] = []
        self.refused = asyncio.Event()

    def on_connected(self, node: str) -> None:
        self.connected.append(node)

    def on_refused(self, node: str) -> None:
        self.refused.set()


@pytest.fixture
async def spawn() -> AsyncIterator[Spawning]:
    spawning = Spawning()
    yield spawning
    await spawning.close()


def made(connect: Any, spawn: Spawning, heard: Heard) -> Peers:
    return Peers(
        "a", connect=connect, spawn=spawn, on_connected=heard.on_connected,
        on_refused=heard.on_refused,
    )  # fmt: skip


async def connected(spawn: Spawning, *up: str) -> tuple[Peers, Dialling]:
    dial = Dialling(*up)
    peers = made(dial, spawn, Heard())
    peers.on_members({node: info(node) for node in ("a", *up)})
    await dial.until(len(up))
    return peers, dial


async def test_a_node_connects_to_all_others_and_not_to_itself(spawn: Spawning) -> None:
    peers, dial = await connected(spawn, "b", "c")
    assert sorted(c.node for c in dial.connections) == ["b", "c"]
    assert peers.live("a") is None and peers.live("b") is not None


async def test_all_that_is_said_in_a_turn_goes_in_one_frame(spawn: Spawning) -> None:
    peers, dial = await connected(spawn, "b")
    for _ in range(3):
        peers.tell("b", HELLO)
    assert dial.connections[0].frames == []
    await asyncio.sleep(0)
    peers.tell("b", HELLO)
    await asyncio.sleep(0)
    assert [len(frame) for frame in dial.connections[0].frames] == [3, 1]


async def test_what_gathers_in_a_turn_is_bounded(spawn: Spawning) -> None:
    peers, dial = await connected(spawn, "b")
    for _ in range(TOLD_MAX + 5):
        peers.tell("b", HELLO)
    await asyncio.sleep(0)
    assert len(dial.connections[0].frames[0]) == TOLD_MAX


async def test_what_is_said_to_nobody_is_lost(spawn: Spawning) -> None:
    peers, dial = await connected(spawn, "b")
    peers.tell("z", HELLO)
    dial.connections[0].alive = False
    peers.tell("b", HELLO)
    await asyncio.sleep(0)
    assert dial.connections[0].frames == []


async def test_a_lost_connection_is_opened_again(spawn: Spawning) -> None:
    peers, dial = await connected(spawn, "b")
    dial.connections[0].drop()
    assert peers.live("b") is None
    second = await dial.until(2)
    assert peers.live("b") is second


async def test_a_refused_connection_is_told_and_tried_again(spawn: Spawning) -> None:
    dial, heard = Dialling(), Heard()
    peers = made(dial, spawn, heard)
    peers.on_members({"b": info("b")})
    async with asyncio.timeout(60):
        await heard.refused.wait()
    dial.up.add("b")
    await dial.until(1)
    assert heard.connected == ["b"] and dial.attempts >= 2


async def test_somebody_else_at_the_address_is_not_taken_for_the_node(spawn: Spawning) -> None:
    dial, heard = Dialling("c"), Heard()

    async def misdirected(_: object) -> object:
        return await dial(info("c"))

    peers = made(misdirected, spawn, heard)
    peers.on_members({"b": info("b")})
    async with asyncio.timeout(60):
        await heard.refused.wait()
    assert peers.live("b") is None and not dial.connections[0].alive


async def test_a_member_at_another_address_is_connected_to_anew(spawn: Spawning) -> None:
    peers, dial = await connected(spawn, "b")
    peers.on_members({"b": info("b", port=2)})
    assert not dial.connections[0].alive
    assert (await dial.until(2)).alive


async def test_a_node_that_left_is_kept_while_it_answers_and_then_given_up(
    spawn: Spawning,
) -> None:
    peers, dial = await connected(spawn, "b")
    peers.on_members({})
    assert peers.live("b") is not None
    dial.up.clear()
    dial.connections[0].drop()
    await spawn.done()
    assert not peers.knows("b")
