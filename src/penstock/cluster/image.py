"""The file of the embedded store: one image of the whole map, replaced atomically.

    "PSTKMETA" | u32 format | u32 CRC32C of the body | u64 body length | body (msgpack)

All integers are big-endian. The body is `[revision, [[key, value, revision, revision_created] …]]`.
A reader that meets a newer format refuses it; anything else that does not add up is `Corruption`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from crc32c import crc32c

from penstock.cluster.reserve import NO_SPACE, Reserve
from penstock.cluster.store import Versioned
from penstock.errors import Corruption, DiskFull, FailedPrecondition, StorageFailed

MAGIC: Final = b"PSTKMETA"
FORMAT: Final = 1
FILE: Final = "store.bin"
RESERVE_BYTES: Final = 256 << 10
_HEADER: Final = struct.Struct(">8sIIQ")
_Rows = list[tuple[str, bytes, int, int]]
_decoder: Final = msgspec.msgpack.Decoder(tuple[int, _Rows])


class Image(NamedTuple):
    revision: int
    entries: dict[str, Versioned]


def read_image(folder: Path) -> Image:
    """The stored map; empty if the folder has none yet."""
    path = folder / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Image(0, {})
    if len(data) < _HEADER.size:
        raise Corruption(f"{path} is shorter than its header", file=str(path))
    magic, format, crc, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corruption(f"{path} is not a metadata image", file=str(path))
    if format > FORMAT:
        raise FailedPrecondition(
            f"{path} has format {format}, this version reads up to {FORMAT}", file=str(path)
        )
    body = data[_HEADER.size :]
    if format != FORMAT or len(body) != length or crc32c(body) != crc:
        raise Corruption(f"{path} does not match its checksum", file=str(path))
    revision, rows = _decoder.decode(body)
    return Image(revision, {row[0]: Versioned(*row) for row in rows})


def write_image(folder: Path, revision: int, entries: Iterable[Versioned]) -> None:
    """Replace the stored map. On return it survives a power loss. `DiskFull` leaves the old one."""
    body = msgspec.msgpack.encode((revision, [tuple(entry) for entry in entries]))
    data = _HEADER.pack(MAGIC, FORMAT, crc32c(body), len(body)) + body
    fresh = folder / (FILE + ".new")
    reserve = Reserve(folder / "reserve", RESERVE_BYTES)
    try:
        try:
            reserve.write(lambda: _write_file(fresh, data))
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            fresh.unlink(missing_ok=True)
            raise DiskFull("no space for metadata") from error
        fresh.replace(folder / FILE)
        _sync_folder(folder)
        reserve.hold()
    except OSError as error:
        raise StorageFailed(f"cannot write metadata in {folder}: {error}") from error


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
