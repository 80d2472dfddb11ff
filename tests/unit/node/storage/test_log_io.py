"""Writing what is staged: what an answer waits for, and what it does not."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.log.conftest import Pen

from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.log.recovery import load_slot
from penstock.node.clock import ManualClock
from penstock.node.observe.metrics import Metrics
from penstock.node.storage.log_io import Flusher, open_syncer

EAGER = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=0, floor_s=0)


async def test_no_write_waits_for_the_floor(tmp_path: Path) -> None:
    log = PartitionLog.open(tmp_path, topic=7, partition=3, options=EAGER)
    pen = Pen(log)
    pen.put(b"begins the segment")
    later: list[Callable[[], Any]] = []  # what the writer thread is asked to do

    def ask(work: Callable[[], Any], done: Callable[[Any], None], /) -> None:
        later.append(work)

    durable: asyncio.Queue[int] = asyncio.Queue()
    syncer = open_syncer()
    assert syncer is not None
    flusher = Flusher(
        log, clock=ManualClock(), submit=ask, syncer=syncer, metrics=Metrics(),
        on_durable=durable.put_nowait, on_room=lambda: None,
        on_failed=lambda _: None,
    )  # fmt: skip
    pen.stage([b"answered at once"])
    flusher.flush()
    assert await asyncio.wait_for(durable.get(), 60) == 2
    log.advance_commit(2)
    assert [work() for work in later] == [None]
    syncer.close()
    assert load_slot(tmp_path / "floor")[0].sequence == 2
