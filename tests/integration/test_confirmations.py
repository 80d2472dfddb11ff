"""Confirmation tokens over the gateway: who may use them, and for what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import ClusterOptions, Config
from penstock.node.door.confirmations import OPEN_PER_CALLER_MAX
from penstock.node.engine import Engine
from penstock.server.embedded import EmbeddedNode, open_embedded
from penstock.server.gateway import Gateway

CLUSTER_KEY = "0123456789abcdef0123456789abcdef"


class Site:
    def __init__(self, gateway: Gateway, engine: Engine) -> None:
        self.engine = engine
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}")

    async def key(self, name: str) -> dict[str, str]:
        return {"x-api-key": (await self.engine.keys.create(name)).text}

    async def confirm(self, key: dict[str, str], **deed: str) -> httpx.Response:
        return await self.http.post("/v1/confirm", json=deed, headers=key)

    async def token(self, key: dict[str, str], method: str, topic: str) -> str:
        return str((await self.confirm(key, method=method, topic=topic)).json()["confirm"])

    async def purge(self, key: dict[str, str], token: str) -> dict[str, Any]:
        deed = {"topic": "jobs", "force": True, "confirm": token}
        return dict((await self.http.post("/v1/purge", json=deed, headers=key)).json())

    async def make(self, key: dict[str, str]) -> None:
        made = await self.http.post("/v1/heaps", json={"topic": "jobs"}, headers=key)
        assert made.status_code == 200

    async def delete(self, key: dict[str, str], token: str) -> httpx.Response:
        query = {"force": "true", "confirm": token}
        return await self.http.delete("/v1/heaps/jobs", params=query, headers=key)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    config = Config(
        data=tmp_path, native_port=-1, grpc_port=-1, http_port=0, require_key=True, drain_s=1.0,
        cluster=ClusterOptions(key=CLUSTER_KEY),
    ).validate()  # fmt: skip
    async with AsyncExitStack() as stack:
        node = await open_embedded(tmp_path, config=config)
        stack.push_async_callback(node.close)
        gateway = Gateway(node.connect, config)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        site = Site(gateway, node.engine)
        stack.push_async_callback(site.http.aclose)
        yield site


async def test_a_token_holds_for_the_key_that_asked(site: Site) -> None:
    """Before, it held for every other key as well."""
    one, other = await site.key("one"), await site.key("other")
    await site.make(one)
    token = await site.token(one, "purge", "jobs")
    assert (await site.purge(other, token))["field"] == "confirm"
    assert await site.purge(one, token) == {"purged": 0}


async def test_a_topic_that_is_made_again_needs_a_new_token(site: Site) -> None:
    """Before, a token outlived its topic: the new one of the same name was deleted with it."""
    one = await site.key("one")
    await site.make(one)
    tokens = [await site.token(one, "topic_delete", "jobs") for _ in range(2)]
    assert (await site.delete(one, tokens[0])).status_code == 200
    await site.make(one)
    refused = await site.delete(one, tokens[1])
    assert (refused.status_code, refused.json()["field"]) == (412, "confirm")
    assert (
        await site.delete(one, await site.token(one, "topic_delete", "jobs"))
    ).status_code == 200


@pytest.mark.parametrize("method", ["topic_delete", "purge", "dlq_delete"])
async def test_there_are_no_tokens_for_what_does_not_exist(site: Site, method: str) -> None:
    """Before, a token was granted, whatever it was for."""
    one = await site.key("one")
    refused = await site.confirm(one, method=method, topic="nowhere")
    assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
    nobody = await site.confirm(one, method="key_revoke", key_id="nobody")
    assert nobody.status_code == 404


async def test_a_key_that_asks_for_many_keeps_no_other_from_it(site: Site) -> None:
    """Before, what one caller held was not bounded by itself: the first of 101 was good as well."""
    greedy, one = await site.key("greedy"), await site.key("one")
    await site.make(one)
    token = await site.token(one, "purge", "jobs")
    many = [await site.token(greedy, "purge", "jobs") for _ in range(OPEN_PER_CALLER_MAX + 1)]
    assert (await site.purge(greedy, many[0]))["field"] == "confirm"
    assert await site.purge(greedy, many[-1]) == {"purged": 0}
    assert await site.purge(one, token) == {"purged": 0}


async def test_the_clusters_key_is_no_api_key(site: Site) -> None:
    """Before, it opened every route."""
    for header in ({"x-api-key": CLUSTER_KEY}, {"authorization": f"Bearer {CLUSTER_KEY}"}):
        assert (await site.http.get("/v1/heaps", headers=header)).status_code == 401


async def test_without_keys_a_token_holds_for_its_connection(tmp_path: Path) -> None:
    node: EmbeddedNode = await open_embedded(tmp_path)
    mine, theirs = await node.connect(), await node.connect()
    await mine.call("topic_create", config={"name": "jobs"})
    token = (await mine.call("confirm", method="purge", subject="jobs"))["confirm"]
    deed = {"topic": "jobs", "force": True, "confirm": token}
    with pytest.raises(Exception, match="this caller"):
        await theirs.call("purge", **deed)
    assert await mine.call("purge", **deed) == {"purged": 0}
    await mine.close()
    await theirs.close()
    await node.close()
