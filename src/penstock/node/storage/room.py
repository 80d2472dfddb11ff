"""How many more partitions fit on this node: what its disk and its open files leave.

A partition takes space before anything is written to it, and keeps some files open. Both are
counted before a topic is recorded: one that does not fit would stay in the metadata and be served
by nobody. The counts are of a moment, so whoever opens a partition may still find that it was
taken meanwhile; then the same errors are raised.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import DiskFull, LimitExceeded, PenstockError

FILES_PER_PARTITION: Final = 4  # the promise, the floor, the newest segment, and the next one
FILES_APART: Final = 64  # listeners, threads, the audit trail, the metadata store
CONNECTIONS_SHARE: Final = 4  # one in so many is left to connections, and to sealed segments
FOLDER_BYTES: Final = 16 << 10  # folder, floor and promise of a partition, rounded up to blocks
RETRY_S: Final = 60.0  # limits are raised by people


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
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_open_files_max() -> int:
    """Let this process open as many files as it is allowed to; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files_max()
