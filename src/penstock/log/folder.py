"""The data folder of one node: its format, its lock, and where things lie in it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable
from penstock.log.aside import remove_asides
from penstock.log.files import Handle, sync_folder, write_whole

FORMAT: Final = 3  # the newest that this version reads and writes
FORMAT_NEW: Final = 1  # of a new folder; it is raised when something needs it
FORMAT_DELTAS: Final = 2  # holds a delta topic, which a reader of format 1 would take for a queue
FORMAT_CLUSTER: Final = 3  # holds replicas, which a reader of format 2 would write to all alone


class Format(msgspec.Struct):
    """Content of the `FORMAT` file. Fields may be added; a new `format` means: do not touch."""

    format: int
    product: str = "penstock"


class DataFolder:
    """An opened and locked data folder. Topics appear in paths by id, never by name."""

    def __init__(self, path: Path, lock: Handle) -> None:
        self.path = path
        self._lock: Handle | None = lock
        self.format = read_format(path)

    @classmethod
    def open(cls, path: Path | str, *, create: bool = True) -> DataFolder:
        """Lock the folder and check its format; `Unavailable` names the process that has it."""
        path = Path(path)
        if not path.is_dir():
            if not create:
                raise NotFound(f"no data folder at {path}")
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
        if not create:
            check_format(path)
        lock = _lock(path)
        if create and not (path / "FORMAT").exists():
            _initialise(path)
        check_format(path)
        (path / "topics").mkdir(exist_ok=True)
        (path / "meta").mkdir(exist_ok=True)
        for pattern in ("*.deleted", "*/*.deleted"):
            for doomed in (path / "topics").glob(pattern):
                shutil.rmtree(doomed)
        return cls(path, lock)

    def raise_format(self, format: int) -> None:
        """Keep versions away that would misread what is about to be written."""
        if format > self.format:
            write_whole(self.path / "FORMAT", [msgspec.json.encode(Format(format))])
            self.format = format

    @property
    def meta(self) -> Path:
        return self.path / "meta"

    @property
    def topics(self) -> Path:
        return self.path / "topics"

    @property
    def node_file(self) -> Path:
        return self.path / "node.json"

    @property
    def audit_file(self) -> Path:
        return self.path / "audit.jsonl"

    def topic(self, topic: int) -> Path:
        return self.topics / f"{topic:08x}"

    def partition(self, topic: int, partition: int) -> Path:
        return self.topic(topic) / f"{partition:04x}"

    def partitions(self) -> Iterator[tuple[int, int, Path]]:
        """Every (topic id, partition, folder) there is."""
        return partitions_in(self.path)

    def remove_topic(self, topic: int) -> None:
        """Delete a topic's files."""
        _remove(self.topic(topic))

    def remove_partition(self, topic: int, partition: int) -> None:
        """Delete the files of one partition, which other nodes hold."""
        folder = self.partition(topic, partition)
        _remove(folder)
        remove_asides(folder)

    def close(self) -> None:
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(folder: Path) -> None:
    """First out of sight by one rename, so that a crash leaves no half."""
    if not folder.exists():
        return
    doomed = folder.with_name(folder.name + ".deleted")
    folder.rename(doomed)
    sync_folder(folder.parent)
    shutil.rmtree(doomed)


def check_format(path: Path) -> None:
    """Raise unless the folder is one that this version may read and write."""
    found = read_format(path)
    if found > FORMAT:
        raise FailedPrecondition(
            f"{path} has format {found}; this version reads up to {FORMAT}", format=found
        )


def read_format(path: Path) -> int:
    try:
        return msgspec.json.decode((path / "FORMAT").read_bytes(), type=Format).format
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not a data folder: it has no FORMAT file") from error
    except msgspec.DecodeError as error:
        raise Corruption(f"{path / 'FORMAT'} cannot be read: {error}") from error


def partitions_in(path: Path) -> Iterator[tuple[int, int, Path]]:
    for topic in sorted((path / "topics").glob("[0-9a-f]" * 8)):
        for partition in sorted(topic.glob("[0-9a-f]" * 4)):
            yield int(topic.name, 16), int(partition.name, 16), partition


def refuse_if_locked(path: Path) -> Handle | None:
    """Hold the lock shared while reading offline; None when there is no lock file to hold."""
    try:
        handle = Handle(path / "LOCK")
    except FileNotFoundError:
        return None
    _flock(handle, path, fcntl.LOCK_SH)
    return handle


def _lock(path: Path) -> Handle:
    handle = Handle(path / "LOCK", os.O_RDWR | os.O_CREAT)
    _flock(handle, path, fcntl.LOCK_EX)
    os.ftruncate(handle.fd, 0)
    os.pwrite(handle.fd, b"%d\n" % os.getpid(), 0)
    return handle


def _flock(handle: Handle, path: Path, mode: int) -> None:
    try:
        fcntl.flock(handle.fd, mode | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = handle.read(32, 0).decode(errors="replace").strip() or "unknown"
        raise Unavailable(f"data folder {path} is in use by process {pid}", pid=pid) from error


def _initialise(path: Path) -> None:
    if (path / "topics").exists():
        raise Corruption(f"{path} holds topics but no FORMAT file")
    write_whole(path / "FORMAT", [msgspec.json.encode(Format(FORMAT_NEW))])
