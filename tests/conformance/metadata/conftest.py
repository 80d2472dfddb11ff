"""The metadata stores that must all behave alike. A new store joins by one more line here."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.store import MetadataStore
from penstock.testing.etcd import EtcdProcess, etcd_process

# Opens the same stored data each time it is called.
OpenStore = Callable[[], Awaitable[MetadataStore]]


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with etcd_process(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def _embedded(request: pytest.FixtureRequest, folder: Path) -> MetadataStore:
    return EmbeddedStore(folder / "meta")


def _etcd(request: pytest.FixtureRequest, folder: Path) -> MetadataStore:
    server = request.getfixturevalue("etcd")
    return EtcdStore([server.endpoint], prefix=cluster_prefix(folder.name))


STORES = {"embedded": _embedded, "etcd": _etcd}


@pytest.fixture(params=sorted(STORES))
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    async def open() -> MetadataStore:
        return STORES[request.param](request, tmp_path)

    return open


@pytest.fixture
async def store(open_store: OpenStore) -> AsyncIterator[MetadataStore]:
    store = await open_store()
    yield store
    await store.close()
