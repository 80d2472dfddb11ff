"""Snapshots: the state of a partition's fold in a file, to begin from instead of sequence 1.

    snapshots/<topic>-<partition>-<sequence>.snapshot

32 bytes of header (magic, version, hash and length of the content), then the content as the kernel
wrote it. The name says up to which sequence the log was folded.

A snapshot is written before the head that refers to it is handed to Spark, and heads are committed
with their trigger. Spark may fall back by one trigger, never by more: so of each partition the
newest snapshot and the one before it are kept, and all older ones can go.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from penstock.errors import Corruption, NotFound
from penstock.log.files import storage_errors
from penstock.model.columns import Buffer
from penstock.spark.fold.changes import write_apart

MAGIC: Final = b"PNSTSNAP"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sQQQ")
KEPT: Final = 2
_NAME: Final = re.compile(r"([A-Za-z0-9_-]+)-(\d+)-(\d+)\.snapshot")


class Stored(NamedTuple):
    name: str
    bytes: int


class FoldSnapshots:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(
        self, buffers: Sequence[Buffer], *, topic: str, partition: int, sequence: int
    ) -> Stored:
        """Make a snapshot durable. Written again it may differ in bytes, never in what it says."""
        name = f"{topic}-{partition}-{sequence}.snapshot"
        content = xxhash.xxh3_64()
        size = 0
        for buffer in buffers:
            content.update(buffer)
            size += memoryview(buffer).nbytes
        header = HEADER.pack(MAGIC, VERSION, content.intdigest(), size)
        write_apart(self._folder / name, [header, *buffers])
        return Stored(name, size)

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
        if magic != MAGIC or version != VERSION:
            raise Corruption(f"{path} is not a snapshot of version {VERSION}")
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
