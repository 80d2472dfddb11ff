"""A real etcd, a part of its keys for each test, and the store in a folder beside it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.cluster.lines import QUICK, Line, OpenEtcd

from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.store import MetadataStore
from penstock.testing.etcd import EtcdProcess, etcd_process


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with etcd_process(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
async def open_etcd(etcd: EtcdProcess, tmp_path: Path) -> AsyncIterator[OpenEtcd]:
    """Opens one more store on this test's keys, as another node would."""
    opened: list[EtcdStore] = []

    def open() -> EtcdStore:
        prefix = cluster_prefix(tmp_path.name)
        opened.append(EtcdStore([etcd.endpoint], prefix=prefix, options=QUICK))
        return opened[-1]

    yield open
    await asyncio.gather(*(store.close() for store in opened))


@pytest.fixture
async def line(etcd: EtcdProcess) -> AsyncIterator[Line]:
    line = Line(etcd.port)
    await line.mend()
    yield line
    await line.cut()


@pytest.fixture
async def far_store(line: Line, tmp_path: Path) -> AsyncIterator[EtcdStore]:
    """This test's keys over the line."""
    store = EtcdStore([line.endpoint], prefix=cluster_prefix(tmp_path.name), options=QUICK)
    yield store
    await store.close()


@pytest.fixture(params=["embedded", "etcd"])
def either_store(request: pytest.FixtureRequest, tmp_path: Path) -> MetadataStore:
    if request.param == "etcd":
        return request.getfixturevalue("open_etcd")()
    return EmbeddedStore(tmp_path / "meta")


@pytest.fixture
async def spawn() -> AsyncIterator[Callable[[Awaitable[None]], asyncio.Future[None]]]:
    """Run something beside the test, until it ends."""
    running: list[asyncio.Future[None]] = []

    def start(work: Awaitable[None]) -> asyncio.Future[None]:
        running.append(asyncio.ensure_future(work))
        return running[-1]

    yield start
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
