"""What a node looks at before it uses a data folder."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from penstock.cluster.membership import NodeInfo
from penstock.config import ClusterOptions, Config
from penstock.errors import FailedPrecondition, Unavailable
from penstock.log.folder import read_format
from penstock.node.lifecycle import running_engine


async def unreached(info: NodeInfo) -> NoReturn:
    raise Unavailable(f"nobody is at {info.host}")


async def test_a_node_of_a_cluster_leaves_the_folder_of_a_node_alone_as_it_is(
    tmp_path: Path,
) -> None:
    async with running_engine(Config(data=tmp_path)) as engine:
        before = engine.folder.format
    options = ClusterOptions(etcd=("localhost:1",), name="prod", key="k" * 32)
    with pytest.raises(FailedPrecondition, match="belongs to a node that is alone"):
        async with running_engine(Config(data=tmp_path, cluster=options), connect=unreached):
            pass
    assert read_format(tmp_path).format == before
