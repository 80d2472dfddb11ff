"""The states of partitions in a folder of the executor, which all its Python workers share.

Spark gives a task any of an executor's Python workers. So that each of them goes on from where
another stopped, the columns of a state are files that are mapped into memory: what one worker
changes the next one sees, without a copy, and what is not needed the kernel may page out. Beside
them lies the small rest (`penstock.propagation.fold.handover`) in one file, the *facts*:

    <executor's folder>/penstock/<owner>/<topic>-<partition>/
        lock        held by the worker that works on the state
        facts       msgpack; what files the columns are in, how many rows they have, what waits
        <table>.<column>.<uuid>

The owner is a pipeline, by its id, or a streaming query that reads released deltas or vectors, by
its id and its mode; a query says the topic's id for the topic. Facts name the options that the
state was folded with, and are not taken for a state of any others. An owner may leave a note of its
own with a state, which lasts as long as that.

**The facts are there if and only if the columns are what they say.** They are removed before the
first change and written, in one step, after the last. A worker that is killed in between leaves
columns without facts, which nobody looks at: the next one begins with an empty folder. Nothing is
ever synced, as a state is a cache: any task can make it from the newest snapshot and the log. What
the machine itself may have lost, by a crash, is not taken for whole because facts name the boot
that they were written in.

**Two tasks of a partition on one executor**, one given up and its successor, do not meet: whoever
has the lock works here, and who does not get it in time makes a state of its own in its memory. A
file is never cut short: one that is replaced is removed, and stays whole for whoever has it mapped.
Room for rows is allocated before they are written. A full disk is an error that can be told, not a
signal in the middle of a copy: then, too, a task goes on in its own memory.

A worker keeps its mappings from one task to the next. If nobody else has worked on the state since,
by the facts' generation, the fold itself is at hand. The folder is the block manager's own, which
Spark tells Python workers of, and removes with the executor.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.errors import Corruption
from penstock.log.files import Handle
from penstock.node.observe.logs import get_logger
from penstock.propagation.fold.handover import resumed, settled
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.table import MEMORY, Space
from penstock.propagation.options import PropagationOptions

log = get_logger(__name__)
VERSION: Final = 3
CACHED_MAX: Final = 64  # partitions whose state a worker has at hand
BUSY_S: Final = 2.0  # to wait for a lock that another task holds
POLL_S: Final = 0.02
ROOM_BYTES: Final = 1 << 20  # a column grows by so much at least, and by an eighth
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")

StateKey = tuple[str, str, int]  # owner, topic, partition


class LocalStateLost(Exception):
    """The executor's folder does not take a state: its disk is full, say. A step that has begun
    there is to be done again, in memory."""


@contextmanager
def _losing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalStateLost(f"{folder}: {error}") from error


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MAP: Final = _LIBC.mmap
_MAP.restype = ctypes.c_void_p
_MAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_UNMAP: Final = _LIBC.munmap
_UNMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Mapping:
    """A file in memory, for as long as an array looks at it. Python's own maps keep the file open,
    and there are more columns than a process may have files."""

    def __init__(self, fd: int, size: int) -> None:
        self._size = 0
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _MAP(None, size, access, mmap.MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "a column cannot be mapped into memory")
        self._address, self._size = address, size
        self.__array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        if self._size:
            _UNMAP(self._address, self._size)


class MappedSpace:
    """Columns in files of a folder. `files` says of each, by name: the file, the type, the shape of
    a row, the bytes."""

    def __init__(
        self, folder: Path, files: dict[str, list[Any]], maps: dict[str, NDArray[np.uint8]]
    ) -> None:
        self._folder, self.files = folder, files
        self.maps = maps  # by file: what this process has mapped of it

    def holds(self, name: str) -> bool:
        return name in self.files

    def grown(
        self, name: str, old: NDArray[Any] | None, shape: tuple[int, ...], kind: DTypeLike, *,
        rows: int,
    ) -> NDArray[Any]:  # fmt: skip
        if old is None and name not in self.files:
            return self.fresh(name, shape, kind)
        file, known, tail, size = self.files[name]
        dtype = np.dtype(known)
        if old is not None:
            size = self.files[name][-1] = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        found: NDArray[Any] = self._mapped(file, size, there=old is None)[:size].view(dtype)
        return found.reshape(-1, *tail)

    def fresh(self, name: str, shape: tuple[int, ...], kind: DTypeLike) -> NDArray[Any]:
        if name in self.files:
            file = self.files.pop(name)[0]
            self.maps.pop(file, None)
            (self._folder / file).unlink()
        # A file's name is never used again: others may have a file mapped that is gone.
        file, dtype, tail = f"{name}.{uuid.uuid4().hex}", np.dtype(kind), list(shape[1:])
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self.files[name] = [file, dtype.str, tail, size]
        return self._mapped(file, size)[:size].view(dtype).reshape(shape)

    def more(self, rows: int, need: int, row_bytes: int) -> int:
        # Nothing is copied when a file grows, so there need not be much room in it.
        return max(need, rows + rows // 8, rows + ROOM_BYTES // row_bytes)

    def _mapped(self, file: str, size: int, *, there: bool = False) -> NDArray[np.uint8]:
        """At least that many bytes of a file, which has them from now on, or must be `there`."""
        path, known = self._folder / file, self.maps.get(file)
        if known is not None and len(known) >= size:
            return known
        with _losing(path):
            handle = Handle(path, os.O_RDWR if there else os.O_RDWR | os.O_CREAT)
            if handle.size < size and not there:
                _allocate(handle.fd, handle.size, size)
            if handle.size < size:
                raise LocalStateLost(f"{path} is cut short")
            mapped = self.maps[file] = np.asarray(Mapping(handle.fd, size))
        return mapped


def _allocate(fd: int, there: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, there, size - there)
    else:
        os.ftruncate(fd, size)


@dataclass(slots=True)
class KeptFold:
    """A fold that a worker has at hand. `generation` is that of the facts it was left with; None:
    it lies in the worker's own memory, as does the note."""

    fold: Propagator
    note: Any = None
    generation: str | None = None
    maps: dict[str, NDArray[np.uint8]] = field(default_factory=dict)


# The states of this process, the least recently used first.
StateCache = dict[StateKey, KeptFold]


class LocalState:
    """One partition's state, while its lock is held. `folder` of None: in the worker's memory."""

    def __init__(
        self, key: StateKey, options: PropagationOptions, cache: StateCache, folder: Path | None
    ) -> None:
        self._key, self._options, self._cache, self._folder = key, options, cache, folder
        self._space: Space = MEMORY
        self.note: Any = None  # that was left with the state that was `found`

    def found(self) -> Propagator | None:
        """The fold as it was left; it may be changed from now on, and is nobody else's to find
        until it is `settled`."""
        kept = self._cache.pop(self._key, None)
        if kept is not None and kept.fold.options != self._options:
            kept = None
        facts = None if self._folder is None else self._facts(self._folder)
        if self._folder is None or facts is None:
            if kept is None or kept.generation is not None:
                return None
            self.note = kept.note
            return kept.fold
        (self._folder / "facts").unlink()
        self.note = facts["note"]
        maps = {} if kept is None else kept.maps
        self._space = MappedSpace(self._folder, facts["files"], maps)
        if kept is not None and kept.generation == facts["generation"]:
            self._space = kept.fold.space
            return kept.fold
        try:
            return resumed(facts["fold"], self._options, space=self._space)
        except (LocalStateLost, Corruption) as error:
            log.warning("a state is made anew", folder=str(self._folder), error=str(error))
            return None

    def fresh_space(self) -> Space:
        """Where a state that is made anew is put; nothing is left of the old one."""
        if self._folder is not None:
            with _losing(self._folder):
                _empty(self._folder)
            self._space = MappedSpace(self._folder, {}, {})
        return self._space

    def settle(self, fold: Propagator, *, note: Any = None) -> None:
        """The step is over: the state is the next one's, whoever that is. A note is of what
        msgpack has a form for."""
        kept = KeptFold(fold, note)
        if self._folder is not None and isinstance(self._space, MappedSpace):
            kept.generation, kept.maps = uuid.uuid4().hex, self._space.maps
            facts = {
                "version": VERSION,
                "boot": _boot(),
                "generation": kept.generation,
                "files": self._space.files,
                "options": msgspec.to_builtins(self._options),
                "note": note,
                "fold": settled(fold),
            }
            new = self._folder / "facts.new"
            with _losing(self._folder):
                new.write_bytes(msgspec.msgpack.encode(facts))
                new.rename(self._folder / "facts")
        self._cache[self._key] = kept
        while len(self._cache) > CACHED_MAX:
            del self._cache[next(iter(self._cache))]

    def _facts(self, folder: Path) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = msgspec.msgpack.decode((folder / "facts").read_bytes())
        except (OSError, msgspec.DecodeError):
            return None  # most likely there are none
        known = facts.get("version"), facts.get("boot"), facts.get("options")
        wanted = VERSION, _boot(), msgspec.to_builtins(self._options)
        return facts if known == wanted else None


def _empty(folder: Path) -> None:
    """Facts go first: there are none without columns."""
    (folder / "facts").unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name != "lock":
            path.unlink()


def _boot() -> str:
    """Names the time since the machine started; elsewhere than on Linux, this executor's."""
    return BOOT.read_text().strip() if BOOT.exists() else f"parent {os.getppid()}"


@contextmanager
def local_state(
    key: StateKey, options: PropagationOptions, *, cache: StateCache, root: Path | None
) -> Iterator[LocalState]:
    """A partition's state, for the time of a step. `root` of None: in this worker's memory."""
    if root is None:
        yield LocalState(key, options, cache, None)
        return
    owner, topic, partition = key
    folder = root / owner / f"{topic}-{partition}"
    with _losing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = Handle(folder / "lock", os.O_RDWR | os.O_CREAT)
    if not _locked(lock.fd):
        log.warning("another task works on the state of this partition", folder=str(folder))
        yield LocalState(key, options, {}, None)
        return
    try:
        yield LocalState(key, options, cache, folder)
    except LocalStateLost:
        with suppress(OSError):  # the disk may be full: what lies here is of no use to anybody
            _empty(folder)
        raise
    finally:
        fcntl.flock(lock.fd, fcntl.LOCK_UN)


def _locked(fd: int) -> bool:
    until = time.monotonic() + BUSY_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        else:
            return True


def executor_folder(key: StateKey) -> Path | None:
    """Where the workers of this executor keep a partition's state. Spark tells them the folders of
    their block manager; in other processes it is a folder for temporary files. None: there is none,
    or it is not this user's own."""
    told = [Path(one) for one in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if one]
    roots = [root for root in told if root.is_dir()]
    if roots:
        root = roots[zlib.crc32(f"{key[1]}-{key[2]}".encode()) % len(roots)] / "penstock"
    else:
        root = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        log.warning("states are kept in memory", folder=str(root), error=str(error))
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        log.warning("states are kept in memory: a folder is somebody else's", folder=str(root))
        return None
    return root
