"""Small file systems to break: they need root, mount and mkfs.ext4, as every Debian has them."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2  # as a power cut: what is not on the disk is gone


@contextmanager
def tmpfs(path: Path, *, size: int) -> Iterator[Path]:
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
    try:
        yield path
    finally:
        _run("umount", "--lazy", path)


def make_ext4(image: Path, *, size: int) -> None:
    with image.open("wb") as file:
        file.truncate(size)
    _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)


@contextmanager
def ext4(image: Path, path: Path) -> Iterator[Path]:
    path.mkdir(exist_ok=True)
    _run("mount", "-o", "loop", image, path)
    try:
        yield path
    finally:
        gc.collect()  # an exception's traceback may still hold an open file
        try:
            _run("umount", path)
        except subprocess.CalledProcessError:
            _run("umount", "--lazy", path)
            raise


def cut_power(mounted: Path) -> None:
    """Drop everything that was not synced; the mount only gives errors from now on."""
    fd = os.open(mounted, os.O_RDONLY)
    fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    os.close(fd)


def fill(folder: Path) -> Path:
    """Take all the space that is left in a file system."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 4096, 512):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue  # no space for a piece of this size
    return path


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)
