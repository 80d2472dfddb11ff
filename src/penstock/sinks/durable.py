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
        self._files, self._folders = self._walk()

    def sync(self) -> None:
        """Sync them, and the folders that have got a new entry."""
        files, folders = self._walk()
        fresh = sorted(files - self._files)
        changed = {path.parent for path in [*fresh, *(folders - self._folders)]}
        sync([*fresh, *sorted(changed)])
        self._files, self._folders = files, folders

    def _walk(self) -> tuple[set[Path], set[Path]]:
        files: set[Path] = set()
        folders: set[Path] = set()
        for folder, _, names in os.walk(self.folder):
            here = Path(folder)
            folders.add(here)
            files.update(here / name for name in names)
        return files, folders
