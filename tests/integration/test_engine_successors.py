"""A topic that was deleted and made again under its name: what belonged to the first one is worth
nothing at the second."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.integration.harness import Node, delivered_tokens, tokens_of

import penstock
from penstock.errors import InvalidArgument, LeaseLost, NotFound
from penstock.model.ids import LeaseToken
from penstock.node.session.session import listen, port_of
from penstock.server.embedded import open_embedded


async def replaced(node: Node, **config: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A message that was leased from `jobs`, and one of its successor that stands in its place."""
    await node.topic("jobs", **config)
    await node.put("jobs", b"old")
    old = await node.pop("jobs")
    await node.forced("topic_delete", "jobs")
    await node.topic("jobs")
    await node.put("jobs", b"new")
    return old, await node.pop("jobs")


@pytest.mark.parametrize("how", ["ack", "nack", "reject", "unused", "extend"])
async def test_a_token_of_a_deleted_topic_ends_no_lease_of_its_successor(
    node: Node, how: str
) -> None:
    """Both tokens were `0.1.3`: before, the old one settled the new message, and the one who held
    that was told that its lease was lost."""
    old, new = await replaced(node)
    if how == "ack":
        lost = await node.ack("jobs", old)
    elif how == "extend":
        lost = await node.extend("jobs", old, 10_000)
    else:
        terms = {"reject": {"reject": True}, "unused": {"counted": False, "delay_ms": 0}}
        lost = await node.nack("jobs", old, **terms.get(how, {}))
    assert lost == [0]
    assert await node.counts() == (0, 0, 1, 0)
    assert await node.ack("jobs", new) == []


async def test_tokens_of_both_topics_may_share_a_request(node: Node) -> None:
    """Before, the first token of the pair settled the message and the second one was lost."""
    old, new = await replaced(node)
    assert await node.ack("jobs", [*old, *new]) == [0]
    assert await node.counts() == (0, 0, 0, 0)


async def test_a_token_of_a_partition_that_the_successor_has_not_got_is_lost(node: Node) -> None:
    """Before, that was an invalid argument, although nothing was wrong with the request."""
    await node.topic("jobs", partitions=2)
    await node.enqueue("jobs", [{"payload": b"old"}], partition=1)
    old = await node.pop("jobs")
    await node.forced("topic_delete", "jobs")
    await node.topic("jobs")
    assert await node.ack("jobs", old) == [0]


async def test_a_delivery_names_the_topic_that_its_tokens_are_of(node: Node) -> None:
    await node.topic("jobs")
    await node.put("jobs", b"old")
    old = delivered_tokens(await node.delivered(await node.stream("jobs", credits=1)))
    await node.forced("topic_delete", "jobs")
    await node.topic("jobs")
    await node.put("jobs", b"new")
    new = tokens_of(await node.pop("jobs"))
    assert [token.topic for token in old + new] == [1, 2]
    assert await node.connection.settle("jobs", old) == [0]
    assert await node.connection.settle("jobs", new) == []


async def test_a_token_that_names_no_topic_is_refused(node: Node) -> None:
    """Tokens of the form that was given out before are refused with a word on what they lack."""
    await node.topic("jobs")
    with pytest.raises(InvalidArgument, match="names no topic") as parsed:
        LeaseToken.parse("0.1.3")
    assert parsed.value.field == "lease_token"
    with pytest.raises(InvalidArgument, match="names no topic") as sent:
        await node.connection.settle("jobs", [LeaseToken(0, 0, 1, 3)])
    assert sent.value.field == "parts"


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[list[penstock.Client]]:
    """Two clients of one node: one that keeps what it knows, one that replaces topics."""
    async with AsyncExitStack() as stack:
        embedded = await open_embedded(tmp_path)
        stack.push_async_callback(embedded.close)
        server = await listen(embedded.engine, host="127.0.0.1", port=0, tls=None)
        stack.callback(server.close)
        url = f"penstock://localhost:{port_of(server)}"
        yield [await stack.enter_async_context(penstock.connect(url)) for _ in range(2)]


async def test_the_sdk_loses_its_leases_with_the_topic(clients: list[penstock.Client]) -> None:
    """Before, each of these settled the successor's message in the same place."""
    mine, theirs = (client.topic("jobs") for client in clients)
    await mine.put_many([b"old"] * 4)
    one, *others = await mine.pop(4)
    await theirs.delete(force=True)
    await theirs.put_many([b"new"] * 4)
    held = await theirs.pop(4)
    for settled in (one.extend(10), one.ack(), others[0].nack(), others[1].reject()):
        with pytest.raises(LeaseLost):
            await settled
    with pytest.raises(LeaseLost):
        async with others[2]:
            pass
    for message in held:
        await message.ack()
    found = await theirs.stats()
    assert (found.ready, found.leased, found.dead, found.acked_total) == (0, 0, 0, 4)


async def test_messages_of_a_successor_have_its_ids(clients: list[penstock.Client]) -> None:
    """Before, a consumer that had known the first topic gave its id to the second one's messages,
    and nothing could be done with such an id."""
    mine, theirs = (client.topic("jobs") for client in clients)
    await mine.put(b"old")
    await theirs.delete(force=True)
    written = await theirs.put(b"new")
    (popped,) = await mine.pop()
    assert popped.id == written
    await popped.give_back()
    assert [message.id for message in await mine.peek()] == [written]
    async for message in mine.consume():
        assert message.id == written
        await message.reject()
        break
    assert [letter.id async for letter in mine.dlq] == [written]


async def test_a_producer_follows_its_topic_to_a_successor_of_more_partitions(
    clients: list[penstock.Client],
) -> None:
    """Before, a client that had known one partition put every key of the successor into it."""
    mine, theirs = clients
    await mine.topic("jobs").put(b"old", key="user-7")
    await theirs.topic("jobs").delete(force=True)
    made = await theirs.topic("jobs", partitions=4)
    await mine.topic("jobs").put(b"one", key="user-7")
    await mine.topic("jobs").put_many([penstock.Item(b"two", key="user-7")])
    popped = await made.pop(2)
    assert {message.partition for message in popped} == {3}


async def test_a_reader_does_not_go_on_in_another_log(clients: list[penstock.Client]) -> None:
    """Before, a reader whose connection was lost read on in the successor's log, as if it were the
    first one's."""
    mine, theirs = (client.topic("jobs") for client in clients)
    await mine.put_many([b"old"] * 3)
    reader = aiter(mine.log())
    assert [(await anext(reader)).payload for _ in range(3)] == [b"old"] * 3
    live = clients[0].link.live
    assert live is not None
    live.abort()
    await theirs.delete(force=True)
    await theirs.put_many([b"new"] * 5)
    with pytest.raises(NotFound, match="made again"):
        await anext(reader)
