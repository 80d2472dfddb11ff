"""The change log: what came out of the fold, trigger by trigger, for the sinks to read.

    changes/000000000017.json     trigger 17: a part per partition, with its file and sections
    changes/data/*.arrow          the change files that manifests name

There is one change file per partition and trigger, and one manifest per trigger, which is what
commits the trigger. A change file is a row of Arrow IPC streams, one behind the other, each a
*section*: the states of one lane, the deltas, the quarantined ones. Where a section begins is not
in the file but in the manifest that names it, so that a sink maps just the bytes it wants.

The file's name is made of the range of the log that went in and a hash of the bytes that came
out. Folding a range again gives the same name and the same bytes; should the bytes ever differ
(another version of Arrow, say), the name does too, and no file that a manifest names is replaced.

Spark's tasks write change files; the driver writes the manifest that names them, in one step that
a crash cannot split. From then on the trigger exists for the sinks, whatever happens to Spark.

- Triggers are numbered 0, 1, 2 … without a gap: Spark's batch ids.
- A manifest never changes. Spark runs a trigger again when it died before it had noted the commit:
  the same ranges give the same fold, the manifest that is there stays, and nothing happens.
- A trigger is deleted when every sink is past it, the oldest first. The newest one always stays,
  data and all: it is what a trigger that is run again is compared with.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import Corruption, NotFound, StorageFailed
from penstock.log.files import storage_errors, sync_folder, write_whole

SectionKind = Literal["states", "deltas", "quarantine"]
LANES: Final = 4
SUFFIX: Final = ".arrow"


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One Arrow stream inside a change file."""

    kind: SectionKind
    lane: int | None = None  # of states: the priority class; deltas and quarantine have none
    rows: int
    offset: int
    length: int
    log_time_ms_min: int = 0  # of the log's batches that the rows came from
    log_time_ms_max: int = 0


class ChangePart(msgspec.Struct, frozen=True, kw_only=True):
    """What one partition contributes to a trigger."""

    topic: str
    partition: int
    first: int  # the range of the log that was folded, both ends included
    last: int
    file: str | None = None  # None: the range left nothing to deliver
    bytes: int = 0
    sections: tuple[Section, ...] = ()
    counts: dict[str, int] = {}


PRESENT: Final = frozenset({"pending", "pending_oldest_ms"})  # counts that say how it is now


def add_counts(counts: dict[str, Any], more: Mapping[str, int]) -> None:
    """Add what a later fold came to."""
    for name, value in more.items():
        counts[name] = value if name in PRESENT else counts.get(name, 0) + value


class ChangeWriter:
    """Collects a partition's sections and writes them in one step."""

    def __init__(self, folder: Path, *, topic: str, partition: int) -> None:
        self._folder = folder
        self._topic, self._partition = topic, partition
        self._buffers: list[pa.Buffer] = []
        self._sections: list[Section] = []
        self._size = 0

    def add(self, kind: SectionKind, table: pa.Table, *, lane: int | None = None) -> None:
        """Append a section; a table without rows leaves none."""
        if not table.num_rows:
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        buffer = sink.getvalue()
        times = pc.min_max(table["log_time_ms"]).as_py()
        self._sections.append(
            Section(
                kind=kind,
                lane=lane,
                rows=table.num_rows,
                offset=self._size,
                length=buffer.size,
                log_time_ms_min=times["min"],
                log_time_ms_max=times["max"],
            )
        )
        self._buffers.append(buffer)
        self._size += buffer.size

    def finish(self, *, first: int, last: int, counts: dict[str, int]) -> ChangePart:
        """Make the file durable under its name; without sections there is no file."""
        name = self._name(first, last) if self._sections else None
        if name is not None:
            write_apart(self._folder / name, self._buffers)
        return ChangePart(
            topic=self._topic, partition=self._partition, first=first, last=last, file=name,
            bytes=self._size, sections=tuple(self._sections), counts=counts,
        )  # fmt: skip

    def _name(self, first: int, last: int) -> str:
        content = xxhash.xxh3_64()
        for buffer in self._buffers:
            content.update(memoryview(buffer))
        place = f"{self._topic}-{self._partition}-{first}-{last}"
        return f"{place}-{content.hexdigest()}{SUFFIX}"


def write_apart(path: Path, buffers: Sequence[Any]) -> None:
    """Write a file whose twin another task may be writing at this moment. Both say the same, so it
    does not matter who is last."""
    with storage_errors(path.parent):
        write_whole(path, buffers, new=path.with_name(f".{path.name}.{uuid.uuid4().hex}"))


VERSION: Final = 1
_NAME: Final = re.compile(r"(\d{12})\.json")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed trigger."""

    version: int = VERSION
    trigger: int
    parts: tuple[ChangePart, ...] = ()  # by topic and partition; an idle partition has none


class ChangeLog:
    """The committed triggers of one pipeline, which is the only one to write (its lock sees to
    that). Any thread may call any method."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        with storage_errors(folder):
            self.data.mkdir(parents=True, exist_ok=True)
        self._changed = threading.Condition()
        found = sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))
        if found and found[-1] - found[0] + 1 != len(found):
            missing = next(n for n in range(found[0], found[-1]) if n not in set(found))
            raise Corruption(f"{folder}: the manifest of trigger {missing} is missing")
        self.first: int | None = found[0] if found else None  # the oldest trigger still there
        self.last: int | None = found[-1] if found else None  # the newest committed one

    def manifest(self, trigger: int) -> Manifest:
        path = self._path(trigger)
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise NotFound(f"trigger {trigger} is not in the change log", trigger=trigger) from None
        except msgspec.DecodeError as error:
            raise Corruption(f"{path} is not a manifest: {error}") from error
        if manifest.version != VERSION or manifest.trigger != trigger:
            raise Corruption(
                f"{path} is version {manifest.version} of trigger {manifest.trigger},"
                f" expected version {VERSION} of trigger {trigger}"
            )
        return manifest

    def after(self, trigger: int, *, limit: int) -> list[Manifest]:
        """Up to `limit` manifests behind `trigger` (-1: from the beginning), the oldest first.

        `NotFound` if the next one was deleted: whoever asks had not been counted in `prune`.
        """
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

    def table(self, part: ChangePart, section: Section) -> pa.Table:
        """The rows of one section, mapped from the file: they stay valid after it is deleted."""
        assert part.file is not None, "a part with sections has a file"
        path = self.data / part.file
        try:
            with pa.memory_map(str(path)) as file:
                data = file.read_at(section.length, section.offset)
            table = pa.ipc.open_stream(data).read_all()
        except FileNotFoundError as error:
            raise Corruption(f"{path} is named by a manifest and is not there") from error
        except OSError as error:
            if error.errno is None:  # Arrow's own complaint about the bytes
                raise Corruption(f"{path} is not what was written: {error}") from error
            raise StorageFailed(f"{path}: {error}") from error
        except pa.ArrowInvalid as error:
            raise Corruption(f"{path} is not what was written: {error}") from error
        if table.num_rows != section.rows:
            raise Corruption(
                f"{path}: {table.num_rows} rows where its manifest says {section.rows}"
            )
        return table

    def commit(self, trigger: int, parts: Iterable[ChangePart]) -> bool:
        """Make `trigger` visible; False if it was already, with the same outcome."""
        ordered = tuple(sorted(parts, key=lambda part: (part.topic, part.partition)))
        last = self.last
        if last is not None and trigger <= last:
            self._reject_other_outcome(trigger, ordered)
            return False
        if trigger != (0 if last is None else last + 1):
            raise Corruption(
                f"{self.folder}: trigger {trigger} follows trigger {last}: the change log and"
                " Spark's checkpoint are not of one state folder"
            )
        manifest = Manifest(trigger=trigger, parts=ordered)
        with storage_errors(self.folder):
            write_whole(self._path(trigger), [msgspec.json.encode(manifest)])
        with self._changed:
            self.last = trigger
            if self.first is None:
                self.first = trigger
            self._changed.notify_all()
        return True

    def _reject_other_outcome(self, trigger: int, parts: tuple[ChangePart, ...]) -> None:
        first = self.first
        if first is not None and trigger < first:
            return  # every sink is past it; there is nothing left to compare with
        committed, again = (
            [(part.topic, part.partition, part.first, part.last, part.counts) for part in found]
            for found in (self.manifest(trigger).parts, parts)
        )
        if committed != again:
            raise Corruption(
                f"trigger {trigger} was run again and came out otherwise than its manifest says"
            )

    def prune(self, through: int) -> int:
        """Delete the triggers up to `through`, which every sink holds; how many went.

        The newest trigger stays. A sink that lags keeps all that is behind its cursor.
        """
        if self.first is None or self.last is None:
            return 0
        gone = range(self.first, min(through + 1, self.last))
        for number in gone:
            files = [part.file for part in self.manifest(number).parts if part.file]
            with storage_errors(self.folder):
                self._path(number).unlink()  # first: a manifest never names a file that is gone
                for name in files:
                    (self.data / name).unlink(missing_ok=True)
            self.first = number + 1
        return len(gone)

    def sweep(self) -> int:
        """Delete files that no manifest names, left by tasks that died; how many went.

        Only while no trigger runs: a file that is about to be named looks just the same.
        """
        present = (
            [] if self.first is None or self.last is None else range(self.first, self.last + 1)
        )
        named = {part.file for number in present for part in self.manifest(number).parts}
        strays = [path for path in self.data.iterdir() if path.name not in named]
        with storage_errors(self.data):
            for path in strays:
                path.unlink()
            if strays:
                sync_folder(self.data)
        return len(strays)

    def _path(self, trigger: int) -> Path:
        return self.folder / f"{trigger:012d}.json"
