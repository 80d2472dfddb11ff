"""Lists that would be too large: every list of a node comes by the page, over every protocol."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.integration.cluster import commands
from tests.integration.gateways import behind_gateway
from tests.integration.harness import Caller, Node

import penstock
from penstock.errors import DiskFull, InvalidArgument
from penstock.model.topic import TopicConfig
from penstock.node.calls import pages
from penstock.node.live.cursors import CursorPlace
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.serve import listen, port_of

SMALL = 8 << 10
NAMES = sorted(f"{'x' * 200}-{number}" for number in range(40))


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", SMALL)


async def paged(caller: Caller, method: str, field: str, **arguments: Any) -> list[list[Any]]:
    """The rows of all pages."""
    answer = await caller.call(method, **arguments)
    found = [answer[field]]
    while answer["next"] is not None:
        answer = await caller.call(method, **arguments, after=answer["next"])
        found.append(answer[field])
    return found


def check_full(found: list[list[Any]]) -> list[Any]:
    """There are several pages, none is too large, and each but the last has no room for what
    comes next; all rows."""
    assert len(found) > 1
    sizes = [[len(msgspec.msgpack.encode(row)) for row in page] for page in found]
    for page, following in itertools.pairwise(sizes):
        assert sum(page) <= SMALL < sum(page) + following[0]
    return [row for page in found for row in page]


@pytest.mark.usefixtures("small_pages")
async def test_topics_and_their_numbers_come_by_the_page(node: Node) -> None:
    """Before, all were in one answer, however many there were, and `after` was refused."""
    for name in NAMES:
        await node.topic(name)
    listed = check_full(await paged(node, "topic_list", "topics"))
    assert [topic["name"] for topic in listed] == NAMES
    counted = check_full(await paged(node, "stats", "topics"))
    assert [topic["name"] for topic in counted] == NAMES
    told = check_full(await paged(node, "cluster_status", "partitions"))
    assert [part["topic"] for part in told] == NAMES
    taken = await node.call("snapshot")
    assert 0 < len(taken["snapshots"]) < 40 and len(taken["snapshots"]) + taken["left"] == 40
    one = await node.call("stats", topic=NAMES[7])
    assert [topic["name"] for topic in one["topics"]] == [NAMES[7]] and one["next"] is None


async def test_numbers_are_counted_for_the_topics_of_a_page_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, every topic's were. Here a page tells of four partitions at most, or of one topic."""
    monkeypatch.setattr(pages, "PAGE_PARTITIONS_MAX", 4)
    for name, partitions in {"a": 1, "b": 3, "c": 1, "d": 6, "e": 1, "f": 1}.items():
        await node.topic(name, partitions=partitions)
    found = await paged(node, "stats", "topics")
    assert [[topic["name"] for topic in page] for page in found] == [
        ["a", "b"], ["c"], ["d"], ["e", "f"],
    ]  # fmt: skip


@pytest.mark.usefixtures("small_pages")
async def test_a_page_begins_behind_a_row_that_is_gone(node: Node) -> None:
    for name in NAMES:
        await node.topic(name)
    first = await node.call("topic_list")
    await node.forced("topic_delete", first["next"])
    second = await node.call("topic_list", after=first["next"])
    assert second["topics"][0]["name"] == NAMES[len(first["topics"])]
    with pytest.raises(InvalidArgument) as refused:
        await node.call("topic_list", after="x" * 5000)
    assert refused.value.field == "after"


@pytest.mark.usefixtures("small_pages")
async def test_keys_come_by_the_page_and_the_oldest_first(node: Node) -> None:
    """Before, all were in one answer."""
    made = [(await node.call("key_create", name="k" * 200 + str(n)))["id"] for n in range(60)]
    listed = check_full(await paged(node, "key_list", "keys"))
    assert len(made) == 60 and {key["id"] for key in listed} == set(made)
    assert [(k["created_ms"], k["id"]) for k in listed] == sorted(
        (k["created_ms"], k["id"]) for k in listed
    )


@pytest.mark.usefixtures("small_pages")
async def test_cursors_come_by_the_page(node: Node) -> None:
    """Before, all were in one answer."""
    await node.topic("vectors", kind="delta", dimensions=2, partitions=2)
    topic_id = node.engine.topics["vectors"].config.id
    places = [CursorPlace(topic_id, name, partition) for name in NAMES for partition in (0, 1)]
    for place in places:
        await node.engine.cursors.get(place)
        node.engine.cursors.note(place, 7)
    for _ in range(2):  # noted, then written
        found = check_full(await paged(node, "cursor_list", "cursors", topic="vectors"))
        assert [(row["name"], row["partition"]) for row in found] == [p[1:] for p in places]
        await node.engine.cursors.flush()


@pytest.mark.usefixtures("small_pages")
async def test_what_a_node_cannot_open_comes_by_the_page(node: Node) -> None:
    """Before, all of it was in one answer."""
    for number, name in enumerate(NAMES, start=1):
        node.engine.unopened.note(TopicConfig(name=name, id=number), DiskFull("x" * 100))
    try:
        found = check_full(await paged(node, "node_status", "unopened"))
    finally:
        for number in range(1, len(NAMES) + 1):
            node.engine.unopened.forget_topic(number)
    assert [row["topic"] for row in found] == NAMES


class Site:
    def __init__(self, http: httpx.AsyncClient, stub: Any, native: str) -> None:
        self.http, self.stub, self.native = http, stub, native

    async def over_http(self, path: str, field: str) -> list[list[dict[str, Any]]]:
        found, after = [], ""
        while True:
            answer = await self.http.get(path + after)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()[field])
            if (following := answer.json()["next"]) is None:
                return found
            after = f"?after={following}"

    async def over_grpc(self, method: str, request: Any, field: str) -> list[list[Any]]:
        found, after = [], ""
        while True:
            answer = await getattr(self.stub, method)(request(after=after))
            found.append(list(getattr(answer, field)))
            if not (after := answer.next):
                return found


@pytest.fixture
async def site(tmp_path: Path, small_pages: None) -> AsyncIterator[Site]:
    """A node with forty topics and forty keys, on all three protocols."""
    async with behind_gateway(tmp_path) as found:
        server = await listen(found.node.engine, host="127.0.0.1", port=0, tls=None)
        caller = Caller(await found.node.connect())
        for name in NAMES:
            await caller.topic(name)
            await found.node.engine.keys.create(name)
        yield Site(found.http, found.stub, f"penstock://127.0.0.1:{port_of(server)}")
        server.close()


async def test_lists_come_by_the_page_over_http(site: Site) -> None:
    """Before, each was one answer, and the query argument was refused with 400."""
    for path, field, name in (
        ("/v1/heaps", "heaps", "topic"),
        ("/v1/stats", "topics", "topic"),
        ("/v1/keys", "keys", "name"),
    ):
        found = await site.over_http(path, field)
        assert len(found) > 1
        assert sorted(row[name] for page in found for row in page) == NAMES
    document = (await site.http.get("/openapi.json")).json()
    named = [p["name"] for p in document["paths"]["/v1/heaps"]["get"]["parameters"]]
    assert named == ["after"]


async def test_lists_come_by_the_page_over_grpc(site: Site) -> None:
    """Before, each was one answer, without a `next`."""
    for method, request, field, name in (
        ("ListHeaps", pb.ListHeapsRequest, "heaps", "topic"),
        ("Stats", pb.StatsRequest, "topics", "topic"),
        ("ListKeys", pb.ListKeysRequest, "keys", "name"),
    ):
        found = await site.over_grpc(method, request, field)
        assert len(found) > 1
        assert sorted(getattr(row, name) for page in found for row in page) == NAMES


async def test_the_sdk_follows_the_pages(site: Site) -> None:
    async with penstock.connect(site.native) as client:
        assert len((await client.call("topic_list"))["topics"]) < 40
        assert [topic["name"] for topic in await client.topics()] == NAMES
        stats = await client.stats()
    assert stats.keys() == {"topics"} and [t["name"] for t in stats["topics"]] == NAMES


async def test_the_commands_follow_the_pages(site: Site) -> None:
    """They run in processes of their own, the node in this one. A command that takes the first page
    for all, as each did before, fails here."""
    for command, field, name in (
        (["topic", "list"], "topics", "name"),
        (["stats"], "topics", "name"),
        (["key", "list"], "keys", "name"),
        (["cluster", "status"], "partitions", "topic"),
    ):
        ran = await commands.penstock(*command, "--json", url=site.native)
        assert sorted(row[name] for row in ran.document[field]) == NAMES
