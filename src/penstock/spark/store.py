"""Where a pipeline keeps what outlives its processes: a folder, or a place in an object store.

Driver and executors reach it by one URL and share nothing else. A name is a path below it. Five
things are asked of a store, and both kinds do them alike:

- `write` makes an object whole and durable, or leaves it as it was. It replaces.
- `create` does the same only if there is no such object, and says whether it did: a
  compare-and-set, which holds between processes and between machines.
- `read` and `read_range` give what was written; a missing object is `NotFound`.
- `names` lists a folder, `delete` removes objects and does not mind those that are gone.

A folder is written by the file system's own means, synced. An object store is reached by obstore,
because a compare-and-set there is a conditional put, which `pyarrow.fs` does not offer.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import NotFound, Unavailable
from penstock.log.files import Handle, storage_errors, sync_folder, write_whole
from penstock.model.columns import Buffer
from penstock.sinks.files import object_store


class Store(Protocol):
    url: str

    def read(self, name: str) -> Buffer: ...

    def read_range(self, name: str, offset: int, length: int) -> Buffer: ...

    def write(self, name: str, buffers: Sequence[Buffer]) -> None: ...

    def create(self, name: str, buffers: Sequence[Buffer]) -> bool: ...

    def names(self, folder: str) -> list[str]:
        """Of the objects right in a folder, without the folder, in no order."""

    def delete(self, names: Iterable[str]) -> None: ...


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A store as tasks are told of it: each process opens its own."""

    url: str  # s3://bucket/prefix, gs://…, az://…, or the absolute path of a folder
    options: dict[str, str] = {}  # of an object store, as the lake takes them

    @property
    def folder(self) -> Path | None:
        """The folder on this machine, None for an object store."""
        return None if "://" in self.url else Path(self.url)

    def open(self) -> Store:
        return _opened(self.url, tuple(sorted(self.options.items())))


@lru_cache(maxsize=16)
def _opened(url: str, options: tuple[tuple[str, str], ...]) -> Store:
    if "://" not in url:
        return FolderStore(Path(url))
    return ObjectStore(url, dict(options))


class FolderStore:
    def __init__(self, path: Path) -> None:
        self.path, self.url = path, str(path)

    def read(self, name: str) -> Buffer:
        """Mapped, so that it is paged in as it is read, and stays valid when it is deleted."""
        path = self.path / name
        with self._errors(name), path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                return b""
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read_range(self, name: str, offset: int, length: int) -> Buffer:
        return memoryview(self.read(name))[offset : offset + length]

    def write(self, name: str, buffers: Sequence[Buffer]) -> None:
        path = self._place(name)
        with self._errors(name):
            write_whole(path, buffers, new=_apart(path))

    def create(self, name: str, buffers: Sequence[Buffer]) -> bool:
        path = self._place(name)
        new = _apart(path)
        with self._errors(name):
            try:
                handle = Handle(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                handle.write(buffers, 0)
                os.fsync(handle.fd)
                os.link(new, path)
            except FileExistsError:
                return False
            finally:
                new.unlink(missing_ok=True)
            sync_folder(path.parent)
        return True

    def names(self, folder: str) -> list[str]:
        try:
            with self._errors(folder):
                found = [entry.name for entry in os.scandir(self.path / folder) if entry.is_file()]
        except NotFound:
            return []
        return [name for name in found if not name.startswith(".")]

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._errors(name):
                (self.path / name).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        path = self.path / name
        with self._errors(name):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        with storage_errors(self.path / name):
            try:
                yield
            except FileNotFoundError:
                raise NotFound(f"{self.path / name} is not there") from None


def _apart(path: Path) -> Path:
    """What a file is called while it is written: its twin may be written at the same moment."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


class ObjectStore:
    def __init__(self, url: str, options: dict[str, str]) -> None:
        self.url = url.rstrip("/")
        self._store = object_store(self.url, options, field="state")

    def read(self, name: str) -> Buffer:
        with self._errors(name):
            return memoryview(self._store.get(name).bytes())

    def read_range(self, name: str, offset: int, length: int) -> Buffer:
        with self._errors(name):
            return memoryview(self._store.get_range(name, start=offset, length=length))

    def write(self, name: str, buffers: Sequence[Buffer]) -> None:
        with self._errors(name):
            self._store.put(name, b"".join(buffers))

    def create(self, name: str, buffers: Sequence[Buffer]) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._errors(name):
            try:
                self._store.put(name, b"".join(buffers), mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def names(self, folder: str) -> list[str]:
        with self._errors(folder):
            found = self._store.list_with_delimiter(folder)["objects"]
        return [str(one["path"]).rsplit("/", 1)[-1] for one in found]

    def delete(self, names: Iterable[str]) -> None:
        gone = list(names)
        with self._errors(gone[0] if gone else ""):
            if gone:
                self._store.delete(gone)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"{self.url}/{name} is not there") from None
        except (BaseError, OSError) as error:
            raise Unavailable(f"{self.url}/{name} cannot be used: {error}") from error
