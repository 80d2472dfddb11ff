"""A pipeline's folder: whose it is, who uses it now, and which slot each partition has.

    pipeline.json   version, id, how it folds, and each topic's id, dimensions and slots
    LOCK            held by the process that runs the pipeline; its pid is in it
    checkpoint/     Spark's: offsets, commits, and the heads of the partitions
    snapshots/      states of partitions, to begin a fold from
    changes/        manifests and change files
    sinks/          cursors
    status.json, rate.json

The id names one numbering of triggers. A folder that is deleted and made anew gets another id, so
that no sink takes its first triggers for old ones.

A *slot* is the integer under which Spark keeps a partition's head. Spark sends a key to the task
`pmod(hash(key), tasks)`; slots are chosen so that the partitions are spread evenly over the tasks,
which counting them 0, 1, 2 … would not do. Both are fixed once chosen: the checkpoint knows the
partitions by them.

A *snapshot* is the state of a partition's fold in a file, to begin from instead of sequence 1:

    snapshots/<topic>-<partition>-<sequence>.snapshot

32 bytes of header (magic, version, hash and length of the content), then the content as the kernel
wrote it. The name says up to which sequence the log was folded. A snapshot is written before the
head that refers to it is handed to Spark, and heads are committed with their trigger. Spark may
fall back by one trigger, never by more: so of each partition the newest snapshot and the one before
it are kept, and all older ones can go.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable
from penstock.log.files import Handle, storage_errors, write_whole
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold.changes import write_apart

VERSION: Final = 1
CANDIDATES_PER_TASK: Final = 64  # integers looked at for each slot that is wanted


class TopicSlots(msgspec.Struct, frozen=True, kw_only=True):
    id: int  # the topic's: one that was deleted and made anew is another
    dimensions: int
    slots: tuple[int, ...]  # by partition


class PipelineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    id: str
    name: str
    tasks: int  # of the stateful stage, as Spark's checkpoint has it
    propagation: PropagationOptions = PropagationOptions()  # another fold would be another state
    topics: dict[str, TopicSlots] = {}

    def with_topics(
        self, configs: Sequence[TopicConfig], *, candidates: Sequence[tuple[int, int]]
    ) -> PipelineIdentity:
        """The identity with slots for every partition of `configs`.

        `candidates` pairs integers with the task that Spark gives them to. Raises
        `FailedPrecondition` if a topic is not what it was when its slots were chosen.
        """
        topics = dict(self.topics)
        load = [0] * self.tasks
        taken: set[int] = set()
        task_of = dict(candidates)
        for known in topics.values():
            for slot in known.slots:
                taken.add(slot)
                load[task_of[slot]] += 1
        free = [[slot for slot, task in candidates if task == t] for t in range(self.tasks)]
        for config in configs:
            if config.name in topics:
                _check_same(config, topics[config.name])
                continue
            slots = []
            for _ in range(config.partitions):
                task = load.index(min(load))
                load[task] += 1
                slot = next(slot for slot in free[task] if slot not in taken)
                taken.add(slot)
                slots.append(slot)
            topics[config.name] = TopicSlots(
                id=config.id, dimensions=config.dimensions, slots=tuple(slots)
            )
        return msgspec.structs.replace(self, topics=topics)


class StateFolder:
    """The folder while one process uses it; `close` lets go of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint, self.changes = path / "checkpoint", path / "changes"
        self.rate_file = path / "rate.json"
        with storage_errors(path):
            for name in ("snapshots", "changes/data", "sinks"):
                (path / name).mkdir(parents=True, exist_ok=True)
            self._lock: Handle | None = _lock(path)
        self.snapshots = FoldSnapshots(path / "snapshots")

    def identity(
        self, *, name: str, tasks: int, propagation: PropagationOptions
    ) -> PipelineIdentity:
        """Whose folder this is; a new one becomes `name`'s, with `tasks` and `propagation`."""
        known = read_identity(self.path)
        if known is None:
            if any(self.changes.glob("*.json")) or any(self.checkpoint.glob("commits/*")):
                raise Corruption(f"{self.path} holds triggers but no pipeline.json")
            id = f"{name}-{uuid.uuid4().hex[:12]}"
            return PipelineIdentity(id=id, name=name, tasks=tasks, propagation=propagation)
        if known.name != name:
            raise FailedPrecondition(
                f"{self.path} holds the state of the pipeline {known.name}, not of {name}",
                field="state",
            )
        if known.propagation != propagation:
            raise FailedPrecondition(
                f"{self.path} was folded with {known.propagation}, which cannot be changed:"
                " start over with another state folder",
                field="propagation",
            )
        return known

    def save(self, identity: PipelineIdentity) -> None:
        if read_identity(self.path) == identity:
            return
        with storage_errors(self.path):
            write_whole(self.path / "pipeline.json", [msgspec.json.encode(identity)])

    def close(self) -> None:
        self._lock = None


def read_identity(path: Path) -> PipelineIdentity | None:
    """The folder's identity, also while a pipeline runs on it; None if it has none yet."""
    file = path / "pipeline.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=PipelineIdentity)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise Corruption(f"{file} cannot be read: {error}") from error
    if found.version != VERSION:
        raise FailedPrecondition(
            f"{file} has version {found.version}; this Penstock reads version {VERSION}"
        )
    return found


def running_pid(path: Path) -> int | None:
    try:
        handle = Handle(path / "LOCK")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(handle.read(32, 0).strip() or 0)
    return None


def _check_same(config: TopicConfig, known: TopicSlots) -> None:
    found = (config.id, config.dimensions, config.partitions)
    expected = (known.id, known.dimensions, len(known.slots))
    if found != expected:
        raise FailedPrecondition(
            f"{config.name} is not the topic this pipeline has read so far (id, dimensions,"
            f" partitions were {expected}, are {found}): start over with another state folder",
            field="topics",
        )


def _lock(path: Path) -> Handle:
    handle = Handle(path / "LOCK", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = handle.read(32, 0).decode(errors="replace").strip() or "unknown"
        raise Unavailable(f"{path} is in use by the pipeline of process {pid}", pid=pid) from error
    os.ftruncate(handle.fd, 0)
    os.pwrite(handle.fd, b"%d\n" % os.getpid(), 0)
    return handle


MAGIC: Final = b"PNSTSNAP"
SNAPSHOT_VERSION: Final = 1
HEADER: Final = struct.Struct("<8sQQQ")
KEPT: Final = 2
_NAME: Final = re.compile(r"([A-Za-z0-9_-]+)-(\d+)-(\d+)\.snapshot")


class FoldSnapshots:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(
        self, buffers: Sequence[Buffer], *, topic: str, partition: int, sequence: int
    ) -> tuple[str, int]:
        """Make a snapshot durable; its name and size. Written again it may differ in bytes, never
        in what it says."""
        name = f"{topic}-{partition}-{sequence}.snapshot"
        content = xxhash.xxh3_64()
        size = 0
        for buffer in buffers:
            content.update(buffer)
            size += memoryview(buffer).nbytes
        header = HEADER.pack(MAGIC, SNAPSHOT_VERSION, content.intdigest(), size)
        write_apart(self._folder / name, [header, *buffers])
        return name, size

    def read(self, name: str) -> Buffer:
        """A snapshot's content, verified; mapped, so that it is paged in as it is read."""
        path = self._folder / name
        try:
            with path.open("rb") as file, storage_errors(path):
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise NotFound(f"{path} is referred to by Spark's state and is not there") from None
        except ValueError as error:  # an empty file cannot be mapped
            raise Corruption(f"{path} is empty") from error
        if len(data) < HEADER.size:
            raise Corruption(f"{path} is cut short")
        magic, version, digest, size = HEADER.unpack_from(data)
        if magic != MAGIC or version != SNAPSHOT_VERSION:
            raise Corruption(f"{path} is not a snapshot of version {SNAPSHOT_VERSION}")
        content = data[HEADER.size :]
        if len(content) != size or xxhash.xxh3_64_intdigest(content) != digest:
            raise Corruption(f"{path} is not what was written")
        return content

    def prune(self) -> int:
        """Delete what no state can refer to any more; how many went."""
        found: dict[tuple[str, int], list[tuple[int, Path]]] = defaultdict(list)
        for path in self._folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found[match[1], int(match[2])].append((int(match[3]), path))
        gone = [path for files in found.values() for _, path in sorted(files)[:-KEPT]]
        with storage_errors(self._folder):
            for path in gone:
                path.unlink(missing_ok=True)
        return len(gone)

    def sweep(self) -> int:
        """Delete what tasks left half written; only while none runs."""
        with storage_errors(self._folder):
            strays = [path for path in self._folder.iterdir() if path.name.startswith(".")]
            for path in strays:
                path.unlink()
        return len(strays)
