"""A pipeline's state in its store: what came out of the fold, for the sinks to read; where the fold
stands; whose it all is, and who drives it.

    pipeline.json               version, id, name, and how it folds
    drivers/                    the claims of its drivers: the greatest one drives
    changes/000000000017.json   trigger 17: what it took in, what came out, where the fold stands
    changes/data/*.arrow        the change files that manifests name
    snapshots/                  states of partitions, to begin a fold from
    sinks/                      cursors
    status.json
    LOCK                        in a folder: held by the process that runs it, with its pid

There is one change file per partition and trigger, and one manifest per trigger, which is what
commits the trigger. A change file is a row of Arrow IPC streams, one behind the other, each a
*section*: the states of one lane, the deltas, the quarantined ones. Where a section begins is not
in the file but in the manifest that names it, so that a sink reads just the bytes it wants.

**The manifests are the truth.** Each holds the *head* of every partition: up to which sequence it
is folded, and the snapshot to begin from. Whoever drives the pipeline next, on whatever machine,
goes on from the newest manifest. There is nothing else to agree with.

**Manifests are fenced.** A driver has a *claim*, a number that it took when it started by creating
the file of that number, which only one can; the greatest one drives. A manifest is created only if
there is none with its number. So of two drivers one commits the trigger, and the other finds it
there: if its claim is greater than its own it ends, if it is lower (a driver that was overtaken and
did not know) it goes on from that manifest, which is as good as its own, for the fold is a function
of the log. On one machine a folder is locked besides, so that a pipeline that is started twice by
mistake is told so instead of taking over.

- Triggers are numbered 0, 1, 2 … without a gap. The pipeline's id names one numbering: a store that
  is emptied and used anew gets another id, so that no sink takes its first triggers for old ones.
- A manifest never changes. One that was not answered for is tried again and found there.
- A trigger is deleted when every sink is past it, the oldest first; the newest one always stays. A
  driver that was away for long may create a deleted number again. Nobody reads it: of the numbers
  that are there only those without a gap up to the newest one count.
- Every file's name begins with the claim of whoever wrote it. What no manifest names is removed
  only by a driver with a greater claim that has committed a trigger itself: from then on nobody
  can commit what would name it.

A *snapshot* is the state of a partition's fold, to begin from instead of sequence 1:

    snapshots/<claim>-<topic>-<partition>-<sequence>.base        all of it
    snapshots/<claim>-<topic>-<partition>-<sequence>.increment   what changed since the one before

32 bytes of header (magic, version, hash and length of the content), then the content as the kernel
wrote it. The name says up to which sequence the log was folded. A snapshot is written before the
manifest that refers to it. A head names a base and its increments, and begins with a new base when
those have become as large.

Two tasks that fold the same range, of which one was given up, write the same name, and either file
is as good: an increment has what changed since the snapshot before it in the head, or since an
earlier one.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable, WrongEpoch
from penstock.log.files import Handle, storage_errors
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig
from penstock.propagation.options import PropagationOptions
from penstock.spark.store import Store, StoreAddress

SectionKind = Literal["states", "deltas", "quarantine"]
SnapshotKind = Literal["base", "increment"]
LANES: Final = 4
SUFFIX: Final = ".arrow"
CHANGES: Final = "changes"
DATA: Final = "changes/data"
PRESENT: Final = frozenset({"pending", "pending_oldest_ms"})  # counts that say how it is now
VERSION: Final = 3  # of a manifest and what it names, and of the identity
_NAME: Final = re.compile(r"(\d{12})\.json")
IDENTITY: Final = "pipeline.json"
DRIVERS: Final = "drivers"
MAGIC: Final = b"PNSTSNAP"
SNAPSHOT_VERSION: Final = 2
HEADER: Final = struct.Struct("<8sQQQ")
SNAPSHOTS: Final = "snapshots"


class Section(msgspec.Struct, frozen=True, kw_only=True):
    kind: SectionKind
    lane: int | None = None  # of states: the priority class; deltas and quarantine have none
    shard: int | None = None  # of states, if all are of one shard of SHARDS_MAX
    rows: int
    offset: int
    length: int
    log_time_ms_min: int = 0  # of the log's batches that the rows came from
    log_time_ms_max: int = 0


class ChangePart(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    first: int  # the range of the log that was folded, both ends included
    last: int
    file: str | None = None  # None: the range left nothing to deliver
    bytes: int = 0
    sections: tuple[Section, ...] = ()
    counts: dict[str, int] = {}


class FoldHead(msgspec.Struct, frozen=True, kw_only=True):
    start: int  # the first sequence that was ever folded
    sequence: int  # folded up to here
    # A base and its increments, to be taken in this order; none yet: a fold begins at `start`.
    snapshots: tuple[str, ...] = ()
    snapshot_sequence: int = 0  # of the last of them
    base_bytes: int = 0
    increment_bytes: int = 0  # of all increments
    snapshot_ms: int = 0  # log time of the newest change in them
    newest_ms: int = 0  # log time of the newest change
    unsaved: int = 0  # deltas folded since
    quarantined: int = 0  # deltas so far: numbers the next ones
    found: tuple[str, ...] = ()  # parents that the log held when they were asked for, as hex


class TopicHeads(msgspec.Struct, frozen=True, kw_only=True):
    id: int  # the topic's: one that was deleted and made anew is another
    dimensions: int
    partitions: dict[int, FoldHead] = {}


Heads = dict[str, TopicHeads]  # by topic; one that is no longer read keeps its place


def add_counts(counts: dict[str, Any], more: Mapping[str, int]) -> None:
    for name, value in more.items():
        counts[name] = value if name in PRESENT else counts.get(name, 0) + value


class _Gathered:
    """A file for Arrow's writers that keeps what it is given. Columns are given as they lie in
    memory, and are not copied; they must not change until the file is written."""

    closed = False

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def write(self, data: Buffer) -> int:
        self.buffers.append(memoryview(data))
        return len(self.buffers[-1])

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


class ChangeWriter:
    def __init__(
        self, store: Store, *, claim: int, topic: str, partition: int, sink: str | None = None
    ) -> None:
        """`sink` is whom the file is for alone, if it is: whoever deletes it then takes nothing
        from a trigger or from another sink that was given the same rows."""
        self._store, self._claim = store, claim
        self._topic, self._partition, self._sink = topic, partition, sink
        self._buffers: list[memoryview] = []
        self._sections: list[Section] = []
        self._size = 0

    def add(
        self,
        kind: SectionKind,
        table: pa.Table,
        *,
        lane: int | None = None,
        shard: int | None = None,
    ) -> None:
        """Append a section; a table without rows leaves none."""
        if not table.num_rows:
            return
        stream = _Gathered()
        with pa.ipc.new_stream(pa.PythonFile(stream, "w"), table.schema) as writer:
            writer.write_table(table)
        length = sum(map(len, stream.buffers))
        times = pc.min_max(table["log_time_ms"]).as_py()
        self._sections.append(
            Section(
                kind=kind,
                lane=lane,
                shard=shard,
                rows=table.num_rows,
                offset=self._size,
                length=length,
                log_time_ms_min=times["min"],
                log_time_ms_max=times["max"],
            )
        )
        self._buffers += stream.buffers
        self._size += length

    def finish(self, *, first: int, last: int, counts: dict[str, int]) -> ChangePart:
        """Make the file durable under its name; without sections there is no file."""
        name = self._name(first, last) if self._sections else None
        if name is not None:
            self._store.write(f"{DATA}/{name}", self._buffers)
        return ChangePart(
            topic=self._topic, partition=self._partition, first=first, last=last, file=name,
            bytes=self._size, sections=tuple(self._sections), counts=counts,
        )  # fmt: skip

    def _name(self, first: int, last: int) -> str:
        """A range folded again gives the same name and the same bytes; should the bytes ever
        differ (another version of Arrow, say), the name does too."""
        content = xxhash.xxh3_64()
        for buffer in self._buffers:
            content.update(buffer)
        place = f"{self._topic}-{self._partition}-{first}-{last}"
        if self._sink is not None:
            place = f"{self._sink}-{place}"
        return f"{claimed(self._claim)}-{place}-{content.hexdigest()}{SUFFIX}"


def read_section(store: Store, part: ChangePart, section: Section) -> pa.Table:
    """The rows of one section; they stay valid after the file is deleted."""
    assert part.file is not None, "a part with sections has a file"
    name = f"{store.url}/{DATA}/{part.file}"
    try:
        data = store.read_range(f"{DATA}/{part.file}", section.offset, section.length)
        table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    except NotFound as error:
        raise Corruption(f"{name} is named by a manifest and is not there") from error
    except (pa.ArrowInvalid, OSError) as error:  # Arrow's own complaints about the bytes
        raise Corruption(f"{name} is not what was written: {error}") from error
    if (rows := table.num_rows) != section.rows:
        raise Corruption(f"{name}: {rows} rows where its manifest says {section.rows}")
    return table


def claimed(claim: int) -> str:
    return f"{claim:08d}"


def claim_of(name: str) -> int:
    """The claim of whoever gave a name; 0 for a name without one."""
    digits = name.split("-", 1)[0].split(".", 1)[0]
    return int(digits) if digits.isdecimal() else 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    trigger: int
    claim: int  # of the driver that committed it
    feed: tuple[str, ...] = ()  # what was written for sinks: states, deltas, payloads
    rows_per_trigger: int = 0  # the rate that the next trigger may have
    parts: tuple[ChangePart, ...] = ()  # by topic and partition; an idle partition has none
    heads: Heads = {}


class ChangeLog:
    """The committed triggers of one pipeline. Any thread may call any method."""

    def __init__(self, store: Store, *, claim: int = 0) -> None:
        """`claim` is that of the driver; who only reads has none."""
        self.store, self.claim = store, claim
        self._changed = threading.Condition()
        self._committed = False  # a trigger, by this driver
        self._pins: dict[str, Manifest] = {}  # by who reads their snapshots
        self.first: int | None = None  # the oldest trigger still there
        self.last: int | None = None  # the newest committed one
        self.refresh()

    def refresh(self) -> None:
        names = self.store.names(CHANGES)
        found = sorted((int(m[1]) for m in map(_NAME.fullmatch, names) if m), reverse=True)
        if found:
            gap = next((i for i, n in enumerate(found) if n != found[0] - i), len(found))
            self.first, self.last = found[gap - 1], found[0]

    def manifest(self, trigger: int) -> Manifest:
        name = _name(trigger)
        try:
            manifest = msgspec.json.decode(self.store.read(name), type=Manifest)
        except NotFound:
            raise NotFound(f"trigger {trigger} is not in the change log", trigger=trigger) from None
        except msgspec.DecodeError as error:
            raise Corruption(f"{self.store.url}/{name} is not a manifest: {error}") from error
        if manifest.version != VERSION or manifest.trigger != trigger:
            raise Corruption(
                f"{self.store.url}/{name} is version {manifest.version} of trigger"
                f" {manifest.trigger}, expected version {VERSION} of trigger {trigger}"
            )
        return manifest

    def newest(self) -> Manifest | None:
        return None if self.last is None else self.manifest(self.last)

    def pin(self, reader: str) -> Manifest | None:
        """The newest manifest, whose snapshots are kept for `reader` until it pins another."""
        with self._changed:  # no trigger becomes the newest between the look and the pin
            newest = self.newest()
            if newest is not None:
                self._pins[reader] = newest
            return newest

    def unpin(self, reader: str) -> None:
        with self._changed:
            self._pins.pop(reader, None)

    def pinned(self) -> set[str]:
        """The names of the snapshots that somebody reads."""
        with self._changed:
            return {name for one in self._pins.values() for name in snapshots_of(one.heads)}

    def after(self, trigger: int, *, limit: int) -> list[Manifest]:
        """Up to `limit` manifests behind `trigger` (-1: from the beginning), the oldest first;
        `NotFound` if the next one was deleted: whoever asks had not been counted in `prune`."""
        last = -1 if self.last is None else self.last
        wanted = range(trigger + 1, min(last, trigger + limit) + 1)
        return [self.manifest(number) for number in wanted]

    def wait(self, trigger: int, *, timeout_s: float) -> None:
        """Wait for a trigger newer than `trigger`, or for `wake`."""
        with self._changed:
            if self.last is None or self.last <= trigger:
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def commit(self, manifest: Manifest, *, check: Callable[[], None]) -> Manifest:
        """Make a trigger visible. The manifest that is there now: this one, or that of a driver
        which was overtaken and did not know it yet.

        Raises `WrongEpoch` if another driver has the right to drive. `check` does so too: it is
        called before anybody here sees the trigger, for its number may have been free only because
        the other driver has deleted it.
        """
        if manifest.trigger != (0 if self.last is None else self.last + 1):
            raise Corruption(f"trigger {manifest.trigger} follows trigger {self.last}")
        held = manifest
        if not self.store.create(_name(manifest.trigger), [msgspec.json.encode(manifest)]):
            held = self.manifest(manifest.trigger)
            if held.claim > self.claim:
                raise overtaken(held.claim)
        check()
        self._committed = self._committed or held.claim == self.claim
        with self._changed:
            self.last = manifest.trigger
            if self.first is None:
                self.first = manifest.trigger
            self._changed.notify_all()
        return held

    def prune(self, through: int) -> int:
        """Delete the triggers up to `through`, which every sink holds; the newest stays."""
        if self.first is None or self.last is None:
            return 0
        gone = range(self.first, min(through + 1, self.last))
        for number in gone:
            files = [part.file for part in self.manifest(number).parts if part.file]
            self.store.delete([_name(number)])  # first: a manifest never names a file that is gone
            self.store.delete([f"{DATA}/{name}" for name in files])
            self.first = number + 1
        return len(gone)

    def sweep(self) -> int:
        """Delete files of earlier drivers that no manifest names; how many went. It does nothing
        before this driver has committed a trigger: until then they may be named yet."""
        if not self._committed or self.first is None or self.last is None:
            return 0
        present = range(self.first, self.last + 1)
        named = {part.file for number in present for part in self.manifest(number).parts}
        strays = [n for n in self.store.names(DATA) if n not in named and claim_of(n) < self.claim]
        self.store.delete([f"{DATA}/{name}" for name in strays])
        return len(strays)


def overtaken(claim: int) -> WrongEpoch:
    return WrongEpoch(
        f"another driver of this pipeline has taken over (claim {claim}); this one ends",
        claim=claim,
    )


def _name(trigger: int) -> str:
    return f"{CHANGES}/{trigger:012d}.json"


class PipelineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    id: str
    name: str
    propagation: PropagationOptions = PropagationOptions()  # another fold would be another state


def read_identity(store: Store) -> PipelineIdentity | None:
    """Whose state this is, also while its pipeline runs; None if it is nobody's yet."""
    try:
        data = store.read(IDENTITY)
    except NotFound:
        return None
    where = f"{store.url}/{IDENTITY}"
    try:
        version = msgspec.json.decode(data).get("version")
        if version != VERSION:
            raise FailedPrecondition(
                f"{where} has version {version}, this Penstock reads version {VERSION}: start over"
                " with another state",
                field="state",
            )
        return msgspec.json.decode(data, type=PipelineIdentity)
    except (msgspec.DecodeError, AttributeError) as error:
        raise Corruption(f"{where} cannot be read: {error}") from error


def claim_identity(store: Store, *, name: str, propagation: PropagationOptions) -> PipelineIdentity:
    """Whose state this is; a new one becomes `name`'s."""
    known = read_identity(store)
    if known is None:
        id = f"{name}-{uuid.uuid4().hex[:12]}"
        made = PipelineIdentity(id=id, name=name, propagation=propagation)
        if store.create(IDENTITY, [msgspec.json.encode(made)]):
            return made
        known = read_identity(store)
        assert known is not None, "somebody has just made it"
    if known.name != name:
        raise FailedPrecondition(
            f"{store.url} holds the state of the pipeline {known.name}, not of {name}",
            field="state",
        )
    if known.propagation != propagation:
        raise FailedPrecondition(
            f"{store.url} was folded with {known.propagation}, which cannot be changed:"
            " start over with another state",
            field="propagation",
        )
    return known


def heads_for(configs: Sequence[TopicConfig], known: Heads) -> Heads:
    """The heads with an entry for every topic of `configs`; those that are no longer read stay.
    `FailedPrecondition` if a topic is not what it was when it was first folded."""
    heads = dict(known)
    for config in configs:
        fresh = TopicHeads(id=config.id, dimensions=config.dimensions)
        held = heads.setdefault(config.name, fresh)
        if (held.id, held.dimensions) != (fresh.id, fresh.dimensions):
            raise FailedPrecondition(
                f"{config.name} is not the topic this pipeline has read so far (its id and"
                f" dimensions were {held.id} and {held.dimensions}, are {fresh.id} and"
                f" {fresh.dimensions}): start over with another state",
                field="topics",
            )
    return heads


# --- who drives ---


class DriverClaim:
    def __init__(self, address: StoreAddress) -> None:
        self._store = address.open()
        self._lock = None if address.folder is None else _lock(address.folder)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "time_ms": time.time_ns() // 10**6}
        while True:
            self.number = self._greatest() + 1
            name = f"{DRIVERS}/{claimed(self.number)}.json"
            if self._store.create(name, [msgspec.json.encode(me)]):
                break
        older = [n for n in self._store.names(DRIVERS) if claim_of(n) < self.number]
        self._store.delete([f"{DRIVERS}/{name}" for name in older])

    def check(self) -> None:
        """Raise `WrongEpoch` if somebody else has taken over."""
        greatest = self._greatest()
        if greatest > self.number:
            raise overtaken(greatest)

    def close(self) -> None:
        self._lock = None

    def _greatest(self) -> int:
        return max(map(claim_of, self._store.names(DRIVERS)), default=0)


def _lock(path: Path) -> Handle:
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        handle = Handle(path / "LOCK", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = handle.read(32, 0).decode(errors="replace").strip() or "unknown"
        raise Unavailable(f"{path} is in use by the pipeline of process {pid}", pid=pid) from error
    os.ftruncate(handle.fd, 0)
    os.pwrite(handle.fd, b"%d\n" % os.getpid(), 0)
    return handle


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


# --- snapshots ---


def snapshots_of(heads: Heads) -> set[str]:
    """The names of all snapshots that heads refer to."""
    every = (head for topic in heads.values() for head in topic.partitions.values())
    return {name for head in every for name in head.snapshots}


class FoldSnapshots:
    def __init__(self, store: Store, *, claim: int) -> None:
        self._store, self._claim = store, claim

    def write(
        self, buffers: Sequence[Buffer], *, kind: SnapshotKind, topic: str, partition: int,
        sequence: int,
    ) -> tuple[str, int]:  # fmt: skip
        """Make a snapshot durable; its name and size. Written again it may differ in bytes, never
        in what comes of it."""
        name = f"{claimed(self._claim)}-{topic}-{partition}-{sequence}.{kind}"
        content = xxhash.xxh3_64()
        size = 0
        for buffer in buffers:
            content.update(buffer)
            size += memoryview(buffer).nbytes
        header = HEADER.pack(MAGIC, SNAPSHOT_VERSION, content.intdigest(), size)
        self._store.write(f"{SNAPSHOTS}/{name}", [header, *buffers])
        return name, size

    def read(self, name: str) -> Buffer:
        where = f"{self._store.url}/{SNAPSHOTS}/{name}"
        data = memoryview(self._store.read(f"{SNAPSHOTS}/{name}"))
        if len(data) < HEADER.size:
            raise Corruption(f"{where} is cut short")
        magic, version, digest, size = HEADER.unpack_from(data)
        if magic != MAGIC or version != SNAPSHOT_VERSION:
            raise Corruption(f"{where} is not a snapshot of version {SNAPSHOT_VERSION}")
        content = data[HEADER.size :]
        if len(content) != size or xxhash.xxh3_64_intdigest(content) != digest:
            raise Corruption(f"{where} is not what was written")
        return content

    def drop(self, names: Sequence[str]) -> None:
        self._store.delete([f"{SNAPSHOTS}/{name}" for name in names])

    def sweep(self, kept: set[str]) -> int:
        """Delete what earlier drivers wrote, but for these names; how many went."""
        found = self._store.names(SNAPSHOTS)
        strays = [n for n in found if n not in kept and claim_of(n) < self._claim]
        self.drop(strays)
        return len(strays)
