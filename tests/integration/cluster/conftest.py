"""One cluster of three real nodes and a real etcd for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking, asking

# Small segments and quick upkeep, so that a little traffic makes a log begin after its start.
OPTIONS = {
    "cluster.lease_s": 2,
    "log.segment_bytes": 32 << 10,
    "log.allocate_bytes": 32 << 10,
    "log.reserve_bytes": 8 << 10,
    "upkeep.snapshot_s": 1,
    "upkeep.retention_s": 1,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("cluster")
    async with asking(folder, OPTIONS) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Asking) -> Asking:
    """The shared cluster, with all that an earlier test has ended."""
    await shared.restore()
    return shared
