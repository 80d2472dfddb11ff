"""Processes that deliver what is in a folder, to be killed on the way: `test_delivery_crash`.

A fresh interpreter takes seconds to load everything, so one is kept that forks for each delivery:
it reads `crash-point folder` lines and answers each with the child's exit status.
"""

import os
import sys
from pathlib import Path

import pandas  # noqa: F401  pyarrow loads it when it first converts: before the forks, then
from tests.unit.spark.delivery.delivering import FileSink, FileTopics, Triggers, delivery_of

from penstock.log.crash import arm
from penstock.sinks.protocol import Feed

BAD = ("bad",)


def sinks_in(folder: Path) -> list[FileSink]:
    both = Feed.STATES | Feed.DELTAS
    return [
        FileSink(folder, name="unordered", rejects=BAD),
        FileSink(folder, name="ordered", feed=both, ordered=True, rejects=BAD),
        FileSink(folder, name="own", feed=Feed.DELTAS, ordered=True, own_cursor=True, rejects=BAD),
    ]


def deliver_all(folder: Path, crash: str) -> None:
    arm(crash)
    topics = FileTopics(folder / "topics.lines")
    topics.created |= {"vectors-quarantine", *(f"vectors-dlq-{s.name}" for s in sinks_in(folder))}
    delivery = delivery_of(Triggers(folder), *sinks_in(folder), folder=folder, topics=topics)
    delivery.start()
    assert delivery.drain(60)
    assert delivery.stop() == []


def fork(folder: Path, crash: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            deliver_all(folder, crash)
        except BaseException:  # noqa: BLE001  the fork must not run the rest of this module
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        point, _, path = line.rstrip("\n").partition(" ")
        print(fork(Path(path), point), flush=True)
