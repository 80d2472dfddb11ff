"""Disk space set aside for the writes that lead out of a full disk.

Deleting a topic frees gigabytes, but first it has to write a few bytes that say so. A reserve is a
file that holds the place for them: on a full disk it is given up, the write repeated, and the place
taken again as soon as there is some.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def write(self, write: Callable[[], None]) -> None:
        """Run `write`, a second time without the reserve if the disk is full. `write` must start
        from the same state both times."""
        try:
            write()
        except OSError as error:
            if error.errno not in NO_SPACE or not self.release():
                raise
            write()

    def hold(self) -> None:
        """Take the space if it is not held. That there is none just now is no failure."""
        try:
            if self._path.stat().st_size >= self._size:
                return
        except FileNotFoundError:
            pass
        try:
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            if error.errno not in NO_SPACE:
                raise

    def release(self) -> bool:
        """Give the space up; False if it was not held."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True
