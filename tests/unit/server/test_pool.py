import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import LimitExceeded, Unauthenticated
from penstock.server.pool import GatewayLink, Pool


def pool(node: Any, keys_max: int = 2) -> Pool:
    return Pool(node.connect, keys_max=keys_max)


async def test_requests_of_one_key_share_a_connection(node: Any) -> None:
    links = pool(node)
    found = await asyncio.gather(*(links.link(None) for _ in range(5)))
    assert len(node.sessions) == 1 and len(set(found)) == 1
    assert await links.link("pk_good_secret") is not found[0]
    await links.close()


async def test_a_wrong_key_is_refused_each_time(node: Any) -> None:
    links = pool(node)
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await links.link("pk_wrong_secret")
    assert len(node.sessions) == 2
    await links.close()


async def test_a_lost_connection_is_opened_anew(node: Any, eventually: Callable[..., Any]) -> None:
    links = pool(node)
    first = await links.link(None)
    node.sessions[0].transport.close()
    await eventually(lambda: not first.connection.alive)
    assert (await links.link(None)).connection.alive
    await links.close()


async def test_the_least_recently_used_idle_link_makes_room(node: Any) -> None:
    node.key_required = False
    links = pool(node, keys_max=1)
    first = await links.link(None)
    second = await links.link("pk_good_secret")
    assert not first.connection.alive and second.connection.alive
    with second, pytest.raises(LimitExceeded):
        await links.link(None)
    assert second.connection.alive
    await links.close()


async def test_a_topic_is_asked_for_once_until_it_is_forgotten(
    link: GatewayLink, node: Any
) -> None:
    for _ in range(3):
        assert (await link.config("jobs")).id == 7
    assert len(node.calls) == 1
    link.forget("jobs")
    await link.config("jobs")
    assert len(node.calls) == 2
