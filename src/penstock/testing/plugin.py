"""Fixtures that run the real engine in a test's temporary folder.

    async def test_resize(penstock_client, penstock_clock):
        jobs = penstock_client.topic("jobs", of=str)
        await jobs.put("cat.png", delay=60)
        penstock_clock.advance(60)
        (job,) = await jobs.pop(wait=1)

A test that asks for `penstock_clock` gets a node whose time stands still until it is advanced; one
that does not gets the system's. The async fixtures need pytest-asyncio (or anyio).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.client.network.connection import Connection
    from penstock.client.topic import Topic
    from penstock.server.embedded import EmbeddedNode
    from penstock.sync import Client as SyncClient
    from penstock.testing.clock import AdvancingClock

F = TypeVar("F", bound=Callable[..., Any])


def async_fixture(function: F) -> F:
    """A fixture for whichever plugin runs the tests' coroutines."""
    try:
        from pytest_asyncio import fixture
    except ImportError:  # anyio takes plain async fixtures
        return cast(F, pytest.fixture(function))
    return cast(F, fixture(function))


@pytest.fixture
def penstock_clock() -> AdvancingClock:
    """Time of the test's node: `penstock_clock.advance(seconds)`."""
    from penstock.testing.clock import AdvancingClock

    return AdvancingClock()


def _clock_of(request: pytest.FixtureRequest) -> AdvancingClock | None:
    """The clock that the test asks for, whose timers fire on the running loop from now on."""
    if "penstock_clock" not in request.fixturenames:
        return None
    clock: AdvancingClock = request.getfixturevalue("penstock_clock")
    clock.attach(asyncio.get_running_loop())
    return clock


@async_fixture
async def penstock_node(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[EmbeddedNode]:
    """A node inside the test's loop, on a folder of its own."""
    from penstock.server.embedded import open_embedded

    node = await open_embedded(tmp_path / "penstock-data", clock=_clock_of(request))
    try:
        yield node
    finally:
        await node.close()


class _OfNode:
    """Connections to a node that outlives its clients."""

    def __init__(self, node: EmbeddedNode) -> None:
        self._node = node

    async def connect(self) -> Connection:
        return await self._node.connect()

    async def close(self) -> None:
        """The fixture that opened the node closes it."""


@async_fixture
async def penstock_client(penstock_node: EmbeddedNode) -> AsyncIterator[Client]:
    """An SDK client of `penstock_node`."""
    from penstock.client.client import Client
    from penstock.client.options import Options

    async with Client(_OfNode(penstock_node), Options()) as client:
        yield client


@pytest.fixture
def penstock_sync_client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SyncClient]:
    """A client for tests without async, with a node of its own in a thread."""
    from penstock import sync
    from penstock.client.client import Client
    from penstock.client.options import Options
    from penstock.server.embedded import EmbeddedNode, config_of

    def make() -> Client:
        config = config_of(tmp_path / "penstock-data-sync")
        return Client(EmbeddedNode(config, clock=_clock_of(request)), Options())

    with sync.Client(make) as client:
        yield client


@pytest.fixture
def penstock_topic(penstock_client: Client) -> Callable[..., Topic[Any]]:
    """Makes topics with names of their own: `penstock_topic(of=str, mode="max")`."""
    made = 0

    def topic(name: str | None = None, of: Any = bytes, **config: Any) -> Topic[Any]:
        nonlocal made
        made += 1
        return penstock_client.topic(name or f"topic-{made}", of, **config)

    return topic
