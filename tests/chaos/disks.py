"""A small file system of its own for each node: to be filled, to lose its power, to be wiped.

Each is an ext4 in a sparse file, mounted through a loop device. Needs root, mount and mkfs.ext4.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.unit.log.mounts import cut_power, fill, make_ext4

BYTES: Final = 256 << 20
FILLER: Final = "filler"
LEFT_BYTES: Final = 1 << 20  # that a full disk's file is made with before the rest is written


class Disk:
    """One node's; its data is in `data`."""

    def __init__(self, image: Path, mounted: Path) -> None:
        self._image, self._mounted = image, mounted

    @property
    def data(self) -> Path:
        return self._mounted / "data"

    def make(self) -> None:
        make_ext4(self._image, size=BYTES)
        self._mounted.mkdir()
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self._mounted))

    def fill(self) -> None:
        """Take all the space that is left."""
        usage = os.statvfs(self._mounted)
        free = usage.f_bavail * usage.f_frsize - LEFT_BYTES
        if free > 0:
            with (self._mounted / "reserved").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free)
        fill(self._mounted)

    def free(self) -> None:
        for name in ("reserved", FILLER):
            (self._mounted / name).unlink(missing_ok=True)

    def fail(self) -> None:
        """As when the power is cut: what was not synced is gone, and nothing works any more."""
        cut_power(self._mounted)

    def repair(self) -> None:
        """After `fail`, once nobody has it open: what is left is there again."""
        _run("umount", str(self._mounted))
        self._mount()

    def wipe(self) -> None:
        shutil.rmtree(self.data, ignore_errors=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._mounted)], capture_output=True, check=False)


@contextmanager
def disks(folder: Path, names: Iterable[str]) -> Iterator[dict[str, Disk]]:
    """Mounted disks that do not outlive the block; their images stay in the folder."""
    made: dict[str, Disk] = {}
    try:
        for name in names:
            made[name] = Disk(folder / f"{name}.ext4", folder / name)
            made[name].make()
        yield made
    finally:
        for disk in made.values():
            disk.close()


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(command)}: {error.stderr.strip()}") from error
