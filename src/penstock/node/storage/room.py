"""How many more partitions fit on this node: what its disk and its open files leave.

A partition takes space before anything is written to it, and keeps some files open. Both are
counted before a topic is recorded: one that does not fit would stay in the metadata and be served
by nobody. The counts are of a moment, so whoever opens a partition may still find that it was
taken meanwhile; then the same errors are raised.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.errors import DiskFull, LimitExceeded, PenstockError
from penstock.model.topic import TopicConfig
from penstock.node.observe.logs import get_logger

FILES_PER_PARTITION: Final = 4  # the promise, the floor, the newest segment, and the next one
FILES_APART: Final = 64  # listeners, threads, the audit trail, the metadata store
CONNECTIONS_SHARE: Final = 4  # one in so many is left to connections, and to sealed segments
FOLDER_BYTES: Final = 16 << 10  # folder, floor and promise of a partition, rounded up to blocks
RETRY_S: Final = 60.0  # limits are raised by people
log = get_logger(__name__)


class Fitting(NamedTuple):
    """Partitions that still fit, by what runs out first."""

    by_files: int
    by_disk: int
    files_max: int  # that the process may open

    def refusal(self, partitions: int, *, of: str) -> PenstockError | None:
        """Why so many more do not fit on the node `of`; None if they do."""
        if partitions > self.by_files:
            return LimitExceeded(
                f"{partitions} more partitions do not fit on {of}: it may open {self.files_max} "
                f"files, which leaves room for {max(self.by_files, 0)}; raise its limit of open "
                "files (ulimit -n, LimitNOFILE) or take fewer partitions",
                field="partitions", limit=max(self.by_files, 0), retry_after_s=RETRY_S,
            )  # fmt: skip
        if partitions > self.by_disk:
            return DiskFull(
                f"no space for {partitions} more partitions on {of}; settle or delete messages",
                limit=self.by_disk,
            )
        return None


class Room:
    """`held` counts the partitions that are open, `waiting` those that should be."""

    def __init__(
        self, folder: Path, *, reserve_bytes: int, held: Callable[[], int],
        waiting: Callable[[], int],
    ) -> None:  # fmt: skip
        self._folder, self._held, self._waiting = folder, held, waiting
        self._bytes_each = reserve_bytes + FOLDER_BYTES

    def fitting(self) -> Fitting:
        """Asks the system; it blocks no longer than any other look at a folder."""
        disk = os.statvfs(self._folder)
        files_max = open_files_max()
        left = self._files_for_partitions(files_max) - self._held() - self._waiting()
        return Fitting(left, disk.f_bavail * disk.f_frsize // self._bytes_each, files_max)

    def check(self, partitions: int) -> None:
        """Raise unless so many new ones fit."""
        refusal = self.fitting().refusal(partitions, of="this node")
        if refusal is not None:
            raise refusal

    def check_files(self, partitions: int) -> None:
        """Raise unless so many can be opened whose folders are there, or will be."""
        files_max = open_files_max()
        left = self._files_for_partitions(files_max) - self._held()
        refusal = Fitting(left, partitions, files_max).refusal(partitions, of="this node")
        if refusal is not None:
            raise refusal

    @staticmethod
    def _files_for_partitions(files_max: int) -> int:
        return (files_max - files_max // CONNECTIONS_SHARE - FILES_APART) // FILES_PER_PARTITION


def open_files_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_open_files_max() -> int:
    """Let this process open as many files as it is allowed to; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files_max()


@dataclass(frozen=True, slots=True)
class Trouble:
    config: TopicConfig
    partition: int | None  # None: all of the topic's, on a node that is alone
    error: PenstockError

    @property
    def name(self) -> str:
        return f"{self.config.name} {self.partition or 0:04}"

    @property
    def partitions(self) -> int:
        return self.config.partitions if self.partition is None else 1


class Unopened:
    """Partitions that should be open here and cannot for now, for want of disk or of open files.
    They are tried again, and status and metrics tell of them until it works."""

    def __init__(self) -> None:
        self._troubles: dict[tuple[int, int | None], Trouble] = {}

    def __iter__(self) -> Iterator[Trouble]:
        return iter(list(self._troubles.values()))

    @property
    def partitions(self) -> int:
        return sum(trouble.partitions for trouble in self._troubles.values())

    def note(
        self, config: TopicConfig, error: PenstockError, *, partition: int | None = None
    ) -> None:
        """It was not opened. The log is told once, and again when there is another reason."""
        before = self._troubles.get((config.id, partition))
        self._troubles[config.id, partition] = Trouble(config, partition, error)
        if before is None or before.error.code != error.code:
            log.error(
                "not opened; it is tried again",
                topic=config.name, topic_id=config.id, partition=partition, error=error.message,
            )  # fmt: skip

    def forget(self, topic: int, partition: int | None = None) -> None:
        if self._troubles.pop((topic, partition), None) is not None:
            log.info("no longer unopened", topic_id=topic, partition=partition)

    def forget_topic(self, topic: int) -> None:
        for key in [key for key in self._troubles if key[0] == topic]:
            self.forget(*key)

    def topic(self, name: str) -> Trouble | None:
        whole = (t for t in self._troubles.values() if t.partition is None)
        return next((t for t in whole if t.config.name == name), None)

    def rows(self, after: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """For `node_status`, with their names: those behind `after`, by topic and partition."""
        for t in sorted(self, key=lambda trouble: trouble.name):
            if t.name > after:
                row = {"topic": t.config.name, "partition": t.partition, "error": t.error.message}
                yield t.name, row
