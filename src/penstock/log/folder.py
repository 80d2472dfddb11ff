"""The data folder of one node: its format, its lock, its inventory, and where things lie in it.

The inventory is one small file that names the parts which must be there. Without it a folder that
lost files looks like one that never had them: a node would begin anew in their place, and a new
topic would take over what an old one has left. So a partition is entered there, durably, before
anybody is served from it, and taken out before its files are removed. What is named and missing is
refused; what is there and not named is nobody's, and is not taken over.

    {"version": 1, "crc": 1234567890}            of the bytes of the second line, CRC32C
    {"meta": true, "topic_id_highest": 42,
     "topics": {"0000002a": "jobs"}, "partitions": {"0000002a/0003": "5d0c…"}}

The names of topics tell a topic from another that was given its id; a partition has the uuid of its
replica.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final, Self, TypeVar

import msgspec
from crc32c import crc32c

from penstock.errors import (
    Backpressure,
    Corruption,
    DiskFull,
    FailedPrecondition,
    NotFound,
    Unavailable,
)
from penstock.log.files import FOLDER_MODE, FULL, Handle, storage_errors, sync_folder, write_whole
from penstock.log.identity import REPLICA_FILE, read_replica, remove_asides

INVENTORY_FILE: Final = "inventory"
VERSION: Final = 1
META_FILE: Final = "meta/store.bin"
WAY_OUT: Final = "restore it from a copy, or start with --accept-missing, which gives it up"
FORMAT: Final = 4  # the newest that this version reads and writes
FORMAT_NEW: Final = 1  # a new folder begins with it; it is raised when something needs more
FORMAT_DELTAS: Final = 2  # it has a delta topic, which a reader of format 1 takes for a queue
FORMAT_CLUSTER: Final = 3  # it has replicas, which a reader of format 2 writes to all alone
FORMAT_PRODUCERS: Final = 4  # a log may have PRODUCER records, which a reader of format 3 refuses
PRODUCT: Final = "penstock"
SHOWN_MAX: Final = 10  # missing parts that an error names
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO  # rights that nobody but the node's user needs
_log = logging.getLogger(__name__)
T = TypeVar("T")


class InventoryHead(msgspec.Struct, frozen=True):
    version: int
    crc: int


class Contents(msgspec.Struct):
    meta: bool = False  # the embedded metadata store has its file
    topic_id_highest: int = 0  # the highest id of any topic that ever was here
    topics: dict[str, str] = {}  # folder below `topics` -> the topic's name, if it is known
    partitions: dict[str, str] = {}  # path below `topics` -> the replica's uuid, empty if unknown

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Keep the partitions that are wanted, and the topics that have some left."""
        self.partitions = {key: uuid for key, uuid in self.partitions.items() if wanted(key)}
        left = {key[:8] for key in self.partitions}
        self.topics = {topic: name for topic, name in self.topics.items() if topic in left}


class Inventory:
    """Methods block and may be called from any thread. Changes that come together share a write."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self._folder, self._contents = folder, contents
        self._lock, self._writing = Lock(), Lock()
        self._changes = self._written = 0

    def has(self, topic: int, partition: int) -> bool:
        return place(topic, partition) in self._contents.partitions

    @property
    def topic_id_highest(self) -> int:
        """The highest id that a topic ever had here, as far as it was entered."""
        return self._contents.topic_id_highest

    def name(self, topic: int) -> str:
        """The name of the topic that has this id here; empty if it is not known."""
        return self._contents.topics.get(f"{topic:08x}", "")

    def add(self, topic: int, partition: int, *, name: str, uuid: str) -> None:
        """Enter a partition, or the new uuid of one. It is durable on return."""
        key = place(topic, partition)
        if self._contents.partitions.get(key) != uuid or self.name(topic) != name:
            with self._changing() as contents:
                contents.partitions[key] = uuid
                contents.topics[f"{topic:08x}"] = name
                contents.topic_id_highest = max(contents.topic_id_highest, topic)

    def add_meta(self) -> None:
        if not self._contents.meta:
            with self._changing() as contents:
                contents.meta = True

    def remove(self, topic: int, partition: int | None = None) -> None:
        """Take out a partition, or all of a topic, whose files are about to go."""
        prefix = f"{topic:08x}/" if partition is None else place(topic, partition)
        if any(key.startswith(prefix) for key in list(self._contents.partitions)):
            with self._changing() as contents:
                contents.keep(lambda key: not key.startswith(prefix))

    def give_up(self, missing: list[str]) -> None:
        with self._changing() as contents:
            contents.keep(lambda key: f"topics/{key}" not in missing)
            contents.meta &= META_FILE not in missing

    @contextmanager
    def _changing(self) -> Iterator[Contents]:
        with self._lock:
            yield self._contents
            self._changes += 1
        self.save()

    def begin(self) -> None:
        with self._changing():
            pass

    def save(self) -> None:
        """Write what is not written, unless another thread has done so meanwhile."""
        wanted = self._changes
        with self._writing:
            if self._written >= wanted:
                return
            with self._lock:
                changes, body = self._changes, msgspec.json.encode(self._contents)
            head = msgspec.json.encode(InventoryHead(VERSION, crc32c(body)))
            with storage_errors(self._folder):
                write_whole(self._folder / INVENTORY_FILE, [head, b"\n", body, b"\n"])
            self._written = changes


def place(topic: int, partition: int) -> str:
    return f"{topic:08x}/{partition:04x}"


def read_contents(folder: Path) -> Contents | None:
    """What the file says; None if there is none. Raises `Corruption`."""
    path = folder / INVENTORY_FILE
    try:
        first, _, rest = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    try:
        head = msgspec.json.decode(first, type=InventoryHead)
        if head.version > VERSION:
            raise FailedPrecondition(f"{path} has version {head.version}, over {VERSION}")
        body = rest.removesuffix(b"\n")
        if crc32c(body) != head.crc:
            raise Corruption("CRC mismatch")
        return msgspec.json.decode(body, type=Contents)
    except (msgspec.DecodeError, UnicodeDecodeError, Corruption) as error:
        raise Corruption(f"{path} cannot be read: {error}; {WAY_OUT}", file=str(path)) from error


def found_contents(folder: Path) -> Contents:
    """What a folder holds that is from before there were inventories."""
    contents = Contents(meta=(folder / META_FILE).exists())
    for topic, partition, path in partitions_in(folder):
        file = path / REPLICA_FILE
        uuid = read_replica(file)[0].uuid if file.exists() else ""
        contents.partitions[place(topic, partition)] = uuid
    return contents


def missing_parts(folder: Path, contents: Contents) -> Iterator[str]:
    """Parts that are named and not there, as paths below the folder."""
    if contents.meta and not (folder / META_FILE).exists():
        yield META_FILE
    for key, uuid in sorted(contents.partitions.items()):
        path = folder / "topics" / key
        # A partition whose uuid is not known was made before there were replica files.
        needed = [path / "floor", path / REPLICA_FILE] if uuid else [path]
        if not all(each.exists() for each in needed):
            yield f"topics/{key}"


class Format(msgspec.Struct):
    """Content of the `FORMAT` file. Fields may be added; a new `format` means: do not touch."""

    format: int
    product: str = PRODUCT
    inventory: bool = False  # the folder has an inventory; if the file is not there, it was lost


class DataFolder:
    """An opened and locked data folder. Topics appear in paths by id, never by name."""

    def __init__(self, path: Path, lock: Handle, inventory: Inventory) -> None:
        self.path, self.inventory = path, inventory
        self.meta, self.topics = path / "meta", path / "topics"
        self.node_file, self.audit_file = path / "node.json", path / "audit.jsonl"
        self._lock: Handle | None = lock
        self.format = read_format(path).format

    @classmethod
    def open(cls, path: Path | str, *, accept_missing: bool = False) -> DataFolder:
        """Lock the folder, made if missing, and check its format. Raises `Unavailable`, which names
        the process that has it, and `Corruption` if something that belongs to it is missing;
        `accept_missing` gives that up instead, and says so in the log at the highest level."""
        path = Path(path)
        lock = _lock(path)
        try:
            if not (path / "FORMAT").exists():
                _initialise(path)
            known = read_format(path)
            _close_to_others(path)
            inventory = _take_inventory(path, known, accept_missing=accept_missing)
            _tidy(path)
            return cls(path, lock, inventory)
        except BaseException:
            del lock  # else the traceback of the error would keep the folder locked
            raise

    def raise_format(self, format: int) -> None:
        """Keep versions away that would misread what is about to be written."""
        if format > self.format:
            with storage_errors(self.path):
                write_format(self.path, format)
            self.format = format

    def topic(self, topic: int) -> Path:
        return self.topics / f"{topic:08x}"

    def partition(self, topic: int, partition: int) -> Path:
        return self.topic(topic) / f"{partition:04x}"

    def partitions(self) -> Iterator[tuple[int, int, Path]]:
        return partitions_in(self.path)

    def topic_id_highest(self) -> int:
        """The highest id that a topic with files here has, or had; 0 if there is none."""
        names = (each.name[:8] for each in self.topics.glob("[0-9a-f]" * 8 + "*"))
        return max([self.inventory.topic_id_highest, *(int(name, 16) for name in names)])

    def has_log(self, topic: int) -> bool:
        """Whether anything was ever written to a topic, and is there."""
        return any(self.topic(topic).glob("*/*.seg"))

    def remove(self, topic: int, partition: int | None = None) -> None:
        """Delete the files of a topic, or of one partition, which other nodes hold.

        They are taken out of the inventory before: a crash in between leaves files that nothing
        names. On a full disk it is the files that must go first.
        """
        try:
            self.inventory.remove(topic, partition)
        except Backpressure as error:
            _log.warning("%s is written after files are removed: %s", INVENTORY_FILE, error.message)
        folder = self.topic(topic) if partition is None else self.partition(topic, partition)
        _remove(folder)
        remove_asides(folder)
        self.inventory.save()

    def clear_place(self, topic: int, partition: int, *, recorded: str) -> None:
        """Make way for a new partition whose folder exists, though the inventory does not name it.

        A folder that the metadata know by its uuid is the partition, and stays. A folder in which
        nothing was ever written, as a crash leaves it, is removed. What another topic has left is
        not taken over: that raises `Corruption`.
        """
        folder = self.partition(topic, partition)
        file = folder / REPLICA_FILE
        if recorded and file.exists() and read_replica(file)[0].uuid == recorded:
            return
        if not any(folder.glob("*.seg")) and not any(folder.glob("*.snap")):
            _remove(folder)
            return
        raise foreign_log(folder, topic=topic, partition=partition, of="unknown name")

    def close(self) -> None:
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _take_inventory(path: Path, known: Format, *, accept_missing: bool) -> Inventory:
    """The folder's inventory, made if it never had one, after a look whether all of it is there."""
    try:
        contents = read_contents(path)
        if contents is None and known.inventory:
            raise _missing(path, [INVENTORY_FILE])
    except Corruption as error:
        if not accept_missing:
            raise
        _log.critical("MISSING FILES ACCEPTED: %s", error.message)
        contents = None
    found = found_contents(path) if contents is None else contents
    inventory, missing = Inventory(path, found), list(missing_parts(path, found))
    if contents is None and any(partitions_in(path)) and not (path / META_FILE).exists():
        # No inventory says so, but no node ever made topics without metadata.
        missing.append(META_FILE)
    if known.format >= FORMAT_CLUSTER:
        missing = []  # other nodes may have what is missing: that is seen when it is opened
    if missing and not accept_missing:
        raise _missing(path, missing)
    if missing:
        _log.critical("MISSING FILES ACCEPTED: %s", _missing(path, missing).message)
        inventory.give_up(missing)
    if contents is None:
        _begin_inventory(path, inventory, format=known.format)
    return inventory


def _tidy(path: Path) -> None:
    """Have the folders that every data folder has, and finish removals that a crash cut short."""
    for name in ("topics", "meta"):
        (path / name).mkdir(FOLDER_MODE, exist_ok=True)
    for pattern in ("*.deleted", "*/*.deleted"):
        for doomed in (path / "topics").glob(pattern):
            shutil.rmtree(doomed)


def _begin_inventory(path: Path, inventory: Inventory, *, format: int) -> None:
    try:
        inventory.begin()
        with storage_errors(path):
            write_format(path, format)
    except DiskFull as error:
        _log.warning("%s has no inventory yet: %s", path, error.message)


def _missing(path: Path, parts: list[str]) -> Corruption:
    shown = ", ".join(parts[:SHOWN_MAX]) + (", …" if len(parts) > SHOWN_MAX else "")
    return Corruption(
        f"{path} lacks {len(parts)} of its parts: {shown}; restore what is missing from a copy, or "
        "start with --accept-missing, which gives it up",
        file=str(path / parts[0]), missing=parts[:SHOWN_MAX], reason="files are missing",
    )  # fmt: skip


def foreign_log(folder: Path, *, topic: int, partition: int, of: str) -> Corruption:
    return Corruption(
        f"{folder} is of another topic ({of}) that had the same id {topic}, so this one is not "
        "served here: were the metadata restored from an older copy? Create the topic again to "
        "give it an id of its own, and keep the folder if its messages are wanted",
        topic=topic, partition=partition, file=str(folder), reason="another topic's files",
    )  # fmt: skip


def missing_partition(folder: Path, *, topic: int, partition: int) -> Corruption:
    return Corruption(
        f"{folder} is missing, and no other node has the partition; {WAY_OUT}",
        topic=topic, partition=partition, file=str(folder), reason="files are missing",
    )  # fmt: skip


def write_format(path: Path, format: int) -> None:
    known = Format(format, inventory=(path / INVENTORY_FILE).exists())
    write_whole(path / "FORMAT", [msgspec.json.encode(known)])


def _remove(folder: Path) -> None:
    """Rename the folder out of sight first, so that a crash leaves no half of it."""
    if not folder.exists():
        return
    doomed = folder.with_name(folder.name + ".deleted")
    folder.rename(doomed)
    sync_folder(folder.parent)
    shutil.rmtree(doomed)


def read_format(path: Path) -> Format:
    """Raises unless the folder is one that this version may read and write."""
    file = path / "FORMAT"
    try:
        found = decode_file(file, Format)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not a data folder: it has no FORMAT file") from error
    if found.product != PRODUCT:
        raise FailedPrecondition(
            f"{path} is a folder of {found.product}, not of {PRODUCT}", file=str(file)
        )
    if found.format < 1:
        raise Corruption(f"{file} names format {found.format}, which never was", file=str(file))
    if found.format > FORMAT:
        raise FailedPrecondition(
            f"{path} has format {found.format}; this version reads up to {FORMAT}",
            format=found.format,
        )
    return found


def decode_file(file: Path, type: type[T]) -> T:
    """The content of a small JSON file of the folder; `Corruption` if it is not what it must be."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corruption(
            f"{file} cannot be read: {error}; restore it from a copy of the folder", file=str(file)
        ) from error


def _close_to_others(path: Path) -> None:
    """Take the rights on the folder and all that a node keeps in it from everybody but its user. It
    is closed last itself: one that is closed needs no look inside, and one that a crash cut short
    does."""
    found = path.stat()
    if not found.st_mode & OTHERS:
        return
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:
        _log.warning("%s is open to others, and is not ours to close: keep them out", path)
        return
    ours = [*path.glob("*.json*"), *path.glob("*.reserve"), path / "FORMAT", path / "LOCK"]
    for inside in (path / "meta", path / "topics"):
        ours += [*inside.rglob("*"), inside]
    for each in (*ours, path):
        if each.exists() and not each.is_symlink():
            each.chmod(each.stat().st_mode & ~OTHERS & 0o7777)
    _log.info("%s was open to others; now only its owner can read it", path)


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
    _flock(handle, path, mode=fcntl.LOCK_SH)
    return handle


def _lock(path: Path) -> Handle:
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(FOLDER_MODE, exist_ok=True)
        sync_folder(path.parent)
    with storage_errors(path):
        handle = Handle(path / "LOCK", os.O_RDWR | os.O_CREAT)
    _flock(handle, path, mode=fcntl.LOCK_EX)
    try:
        # The text is overwritten in place and always as long: on a full disk, space that is given
        # up may not come back.
        os.pwrite(handle.fd, b"%-20d\n" % os.getpid(), 0)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _log.warning("%s does not say which process has it: %s", path / "LOCK", error.strerror)
    return handle


def _flock(handle: Handle, path: Path, *, mode: int) -> None:
    try:
        fcntl.flock(handle.fd, mode | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = handle.read(32, 0).decode(errors="replace").strip() or "unknown"
        raise Unavailable(f"data folder {path} is in use by process {pid}", pid=pid) from error


def _initialise(path: Path) -> None:
    for name in ("topics", "meta", "node.json", INVENTORY_FILE):
        if (path / name).exists():
            raise Corruption(
                f"{path} holds {name} but no FORMAT file; restore it from a copy of the folder",
                file=str(path / "FORMAT"),
            )
    write_format(path, FORMAT_NEW)
