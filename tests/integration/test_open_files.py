"""Topics of more partitions than the process may open files."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from tests.integration.crashing import OPTIONS
from tests.integration.harness import Caller, Node

from penstock.client.network.endpoints import open_connection
from penstock.errors import LimitExceeded
from penstock.node.storage.room import FILES_APART, FILES_PER_PARTITION, open_files_max
from penstock.testing.process import ServerProcess


@contextmanager
def files_at_most(count: int) -> Iterator[None]:
    """For this process, whatever it may open otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """So many may be opened besides what is open now. The limit is on numbers, which have gaps."""
    gc.collect()  # topics of earlier tests
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    with files_at_most(highest + 64), ExitStack() as stack:
        taken: list[int] = []
        stack.callback(lambda: [os.close(each) for each in taken])
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield


async def test_a_topic_that_may_not_open_its_files_is_not_made(node: Node) -> None:
    """Before, the call failed with StorageFailed, the topic stayed recorded, and the node could not
    start again."""
    # What else is open in this process is none of the node's, and takes places all the same; what
    # earlier tests left to the collector does so only until it runs.
    gc.collect()
    others = len(list(Path("/proc/self/fd").iterdir()))
    with files_at_most(600 + others):
        with pytest.raises(LimitExceeded, match=f"may open {600 + others} files") as refused:
            await node.topic("wide", partitions=200)
        assert refused.value.details["field"] == "partitions"
        room = refused.value.details["limit"]
        assert 0 < room * FILES_PER_PARTITION < 600 + others - FILES_APART
        assert (await node.call("topic_list"))["topics"] == []
        fits = room - others // FILES_PER_PARTITION - 1
        await node.topic("fits", partitions=fits)
        assert len(await node.put("fits", *[b"x"] * 10)) == 10
        with pytest.raises(LimitExceeded):
            await node.topic("one-more", partitions=room)
        await node.restart()
        assert (await node.counts("fits"))[0] == 10


async def test_a_node_starts_with_what_it_may_open(node: Node) -> None:
    """Before, it ended with a traceback about too many open files."""
    await node.topic("a", partitions=2)
    await node.topic("wide", partitions=200)
    await node.topic("z")
    await node.put("wide", b"kept")
    with files_at_most(600):
        await node.restart()
        assert len(await node.put("a", b"x")) == len(await node.put("z", b"x")) == 1
        with pytest.raises(LimitExceeded, match=r"wide is not open.*ulimit -n"):
            await node.put("wide", b"x")
        (unopened,) = (await node.call("node_status"))["unopened"]
        assert unopened["topic"] == "wide"
    async with asyncio.timeout(60):
        while (await node.call("node_status"))["unopened"]:
            await asyncio.sleep(0.1)
    assert await node.popped("wide") == [b"kept"]


async def test_files_that_run_out_while_a_topic_is_opened_do_not_end_the_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in the process may have taken what was left. Before, the topic stayed recorded."""
    await node.topic("jobs")
    for check in ("check", "check_files"):
        monkeypatch.setattr(node.engine.room, check, lambda _: None)
    with files_left(12), pytest.raises(LimitExceeded, match="open files"):
        await node.topic("wide", partitions=20)
    assert [config.name for config in await node.engine.catalog.list()] == ["jobs"]
    assert len(await node.put("jobs", b"x")) == 1
    assert (await node.call("node_status"))["healthy"]


async def test_a_server_raises_its_own_limit(tmp_path: Path) -> None:
    """Before, it lived with the soft limit that it was started with, which is low on purpose."""
    server = ServerProcess(
        data=tmp_path / "data", options=OPTIONS, prefix=["prlimit", "--nofile=256:4096"]
    )
    try:
        await server.start()
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert line.split()[3:5] == ["4096", "4096"]
        caller = Caller(await open_connection(server.url))
        await caller.topic("jobs", partitions=100)
        assert await server.stop() == 0
    finally:
        await server.kill()


def test_the_limit_is_the_soft_one() -> None:
    with files_at_most(600):
        assert open_files_max() == 600
