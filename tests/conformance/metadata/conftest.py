"""The metadata stores that must all behave alike. A new store joins by one more line here."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.store import MetadataStore

# Opens the same stored data each time it is called.
OpenStore = Callable[[], Awaitable[MetadataStore]]


async def _embedded(folder: Path) -> MetadataStore:
    return EmbeddedStore(folder / "meta")


STORES = {"embedded": _embedded}


@pytest.fixture(params=sorted(STORES))
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    return lambda: STORES[request.param](tmp_path)


@pytest.fixture
async def store(open_store: OpenStore) -> AsyncIterator[MetadataStore]:
    store = await open_store()
    yield store
    await store.close()
