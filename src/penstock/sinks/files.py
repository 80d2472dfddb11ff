"""Syncing what a library wrote to a local disk.

The stores behind sinks write files and rename them, but leave it to the kernel when they reach
the disk. A cursor that moves on must not be ahead of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlparse


def local_path(uri: str) -> Path | None:
    """The folder that a table's address names, or None when it is not on this machine."""
    parsed = urlparse(uri)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return None if "://" in uri else Path(uri)


def sync(paths: Iterable[Path]) -> None:
    """Make files and folders durable; a file that is gone again needs none."""
    for path in paths:
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class NewFiles:
    """The files below a folder that appeared since the last look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = self._walk()

    def sync(self) -> None:
        seen = self._walk()
        fresh: list[Path] = []
        changed: set[Path] = set()
        for folder, names in seen.items():
            before = self._seen.get(folder)
            if before is None:
                changed.add(Path(folder).parent)
            new = names - (before or set())
            if new:
                changed.add(Path(folder))
                fresh += [Path(folder, name) for name in sorted(new)]
        sync([*fresh, *sorted(changed)])
        self._seen = seen

    def _walk(self) -> dict[str, set[str]]:
        """The names of files by folder; texts, because there may be thousands."""
        return {folder: set(names) for folder, _, names in os.walk(self.folder)}
