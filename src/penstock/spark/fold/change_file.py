"""One file per partition and trigger: what came out of the fold, for the sinks to read.

A change file is a row of Arrow IPC streams, one behind the other, each a *section*: the states of
one lane, the deltas, the quarantined ones. Where a section begins is not in the file but in the
manifest that names it, so that a sink maps just the bytes it wants.

The file's name is made of the range of the log that went in and a hash of the bytes that came
out. Folding a range again gives the same name and the same bytes; should the bytes ever differ
(another version of Arrow, say), the name does too, and no file that a manifest names is replaced.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import Corruption, StorageFailed
from penstock.log.files import Handle, storage_errors, sync_folder

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


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one partition contributes to a trigger."""

    topic: str
    partition: int
    first: int  # the range of the log that was folded, both ends included
    last: int
    file: str | None = None  # None: the range left nothing to deliver
    bytes: int = 0
    sections: tuple[Section, ...] = ()
    counts: dict[str, int] = {}

    def same_fold(self, other: Part) -> bool:
        """Whether both are the outcome of the same work, in whatever bytes."""
        return (self.topic, self.partition, self.first, self.last, self.counts) == (
            other.topic, other.partition, other.first, other.last, other.counts,
        )  # fmt: skip


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
        low, high = _log_times(table)
        self._sections.append(
            Section(
                kind=kind,
                lane=lane,
                rows=table.num_rows,
                offset=self._size,
                length=buffer.size,
                log_time_ms_min=low,
                log_time_ms_max=high,
            )
        )
        self._buffers.append(buffer)
        self._size += buffer.size

    def finish(self, *, first: int, last: int, counts: dict[str, int]) -> Part:
        """Make the file durable under its name; without sections there is no file."""
        name = self._name(first, last) if self._sections else None
        if name is not None:
            write_apart(self._folder / name, self._buffers)
        return Part(
            topic=self._topic, partition=self._partition, first=first, last=last, file=name,
            bytes=self._size, sections=tuple(self._sections), counts=counts,
        )  # fmt: skip

    def _name(self, first: int, last: int) -> str:
        content = xxhash.xxh3_64()
        for buffer in self._buffers:
            content.update(memoryview(buffer))
        place = f"{self._topic}-{self._partition}-{first}-{last}"
        return f"{place}-{content.hexdigest()}{SUFFIX}"


def write_apart(path: Path, buffers: list[Any]) -> None:
    """Write a file whose twin another task may be writing at this moment: under a name of its
    own, synced, then renamed. Both say the same, so it does not matter who is last."""
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with storage_errors(path.parent):
        try:
            handle = Handle(own, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            handle.write(buffers, 0)
            os.fsync(handle.fd)
            own.rename(path)
            sync_folder(path.parent)
        except OSError:
            own.unlink(missing_ok=True)
            raise


def read_section(folder: Path, part: Part, section: Section) -> pa.Table:
    """The rows of one section, mapped from the file: they stay valid after it is deleted."""
    assert part.file is not None, "a part with sections has a file"
    path = folder / part.file
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
        raise Corruption(f"{path}: {table.num_rows} rows where its manifest says {section.rows}")
    return table


def _log_times(table: pa.Table) -> tuple[int, int]:
    if "log_time_ms" not in table.column_names:
        return 0, 0
    found = pc.min_max(table["log_time_ms"]).as_py()
    return found["min"] or 0, found["max"] or 0
