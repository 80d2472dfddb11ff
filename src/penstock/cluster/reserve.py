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
TOO_MANY: Final = (errno.EMFILE, errno.ENFILE)  # too many files are open
SIZE_MIN: Final = 4096  # a smaller reserve is not worth a file


def private(path: str, flags: int) -> int:
    """For `open`: a new file is the node's user's alone, whatever the umask."""
    return os.open(path, flags, 0o600)


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
        """Take the space that is not held, or as much of it as there is: on a full disk, what is
        left free now is somebody else's by the next write. That there is none is no failure."""
        held, wanted = self._held(), self._size
        while wanted > held:
            try:
                with open(self._path, "ab", opener=private) as file:
                    self._take(file.fileno(), held, wanted)
                return
            except OSError as error:
                if error.errno in TOO_MANY:
                    return
                if error.errno not in NO_SPACE:
                    raise
            wanted = wanted // 2 if wanted > SIZE_MIN else 0
        if not held:
            self._path.unlink(missing_ok=True)

    @staticmethod
    def _take(descriptor: int, held: int, wanted: int) -> None:
        try:
            os.posix_fallocate(descriptor, held, wanted - held)
        except OSError:
            os.ftruncate(descriptor, held)  # give back what a half-done allocation took
            raise

    def _held(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def release(self) -> bool:
        """Give the space up; False if it was not held."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True
