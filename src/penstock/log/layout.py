"""The fixed-size records around batches: every byte on disk is under some CRC.

A segment file is

    header (64) | flush mark (32) batch batch … | flush mark (32) batch … | footer (64) once sealed

with each batch padded by zeros to 8 bytes. All numbers are little-endian and every record ends in a
CRC32C of the bytes before it. `docs/data-format.md` has the byte tables.

A *flush mark* opens each group of batches that became durable by one sync. It says what was
durable when the group was written, and that is what tells rot from a torn tail: a disk may keep a
later block of an unsynced group and lose an earlier one, so a valid batch behind a bad one proves
nothing by itself, but a mark that calls the bad batch durable does.
"""

from __future__ import annotations

import struct
from enum import IntFlag
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from penstock.errors import Corruption
from penstock.model.columns import Buffer

_CRC: Final = struct.Struct("<I")


class Form:
    """How one kind of record lies on disk: magic, version, flags, its fields, and a CRC of that."""

    def __init__(self, what: str, magic: bytes, fields: str, *, version_max: int = 1) -> None:
        self._what, self._magic, self._version_max = what, magic, version_max
        self._struct = struct.Struct("<4sHH" + fields)
        self.size = self._struct.size + _CRC.size

    def pack(self, *fields: object, flags: int = 0, version: int = 1) -> bytes:
        record = self._struct.pack(self._magic, version, flags, *fields)
        return record + _CRC.pack(crc32c(record))

    def unpack(self, data: Buffer) -> tuple[Any, ...]:
        """The fields, behind the flags; raises `Corruption` unless size, magic, CRC and version
        are what they must be."""
        if len(data) != self.size:
            raise Corruption(f"a {self._what} is cut short")
        record = data[: -_CRC.size]
        magic, version, *fields = self._struct.unpack(record)
        if magic != self._magic or data[-_CRC.size :] != _CRC.pack(crc32c(record)):
            raise Corruption(f"CRC mismatch in a {self._what}")
        if not 1 <= version <= self._version_max:
            raise Corruption(f"version {version} of a {self._what} is over {self._version_max}")
        return tuple(fields)


SEGMENT: Final = Form("segment header", b"PSS1", "IIQQI24x")
FOOTER: Final = Form("segment footer", b"PSF1", "QQQqQII4x")
FLOOR: Final = Form("floor", b"PSL1", "QQQQQQI", version_max=2)
INDEX: Final = Form("index header", b"PSI1", "QQQII20x")
SNAPSHOT: Final = Form("snapshot header", b"PSN1", "IIQQIIQq20x")
REPLICA: Final = Form("replica record", b"PSR1", "QQ64s36x")
GENERATION: Final = Form("generation record", b"PSG1", "QQ16sQ16s60x")
MARK_MAGIC: Final = 0x314D5350  # "PSM1"
_MARK: Final = struct.Struct("<IIQQI")
_PLACE: Final = struct.Struct("<IIQ")
HEADER_SIZE: Final = SEGMENT.size
FOOTER_SIZE: Final = FOOTER.size
MARK_SIZE: Final = _MARK.size + _CRC.size

COMPACTED: Final = 1  # flags of a segment
SEEDED: Final = 2


def padded(size: int) -> int:
    return (size + 7) & ~7


class SegmentHeader(NamedTuple):
    topic: int
    partition: int
    first: int
    chain_before: int
    epoch_before: int
    compacted: bool = False  # rewritten: no flush marks in it
    seeded: bool = False  # received whole, so it may hold compacted batches

    def encode(self) -> bytes:
        return SEGMENT.pack(*self[:5], flags=self.compacted * COMPACTED | self.seeded * SEEDED)

    @staticmethod
    def decode(data: Buffer) -> SegmentHeader:
        flags, *fields = SEGMENT.unpack(data)
        header = SegmentHeader(*fields)
        return header._replace(compacted=bool(flags & COMPACTED), seeded=bool(flags & SEEDED))


class Footer(NamedTuple):
    first: int
    last: int
    chain: int
    time_ms: int
    end: int  # where the footer begins: the file has `end + FOOTER_SIZE` bytes
    batches: int
    epoch: int


class Mark(NamedTuple):
    """Its CRC starts from the place it stands at, so a copy of it inside a payload is no mark."""

    length: int  # bytes of the group, this mark included
    durable: int  # last durable sequence when the group was written
    first: int  # the group's first sequence
    batches: int

    def encode(self, header: SegmentHeader, offset: int) -> bytes:
        record = _MARK.pack(MARK_MAGIC, *self)
        place = crc32c(_PLACE.pack(header.topic, header.partition, offset))
        return record + _CRC.pack(crc32c(record, place))

    @staticmethod
    def decode(data: Buffer, at: int, *, header: SegmentHeader, offset: int) -> Mark:
        magic, *fields = _MARK.unpack_from(data, at)
        (crc,) = _CRC.unpack_from(data, at + _MARK.size)
        place = crc32c(_PLACE.pack(header.topic, header.partition, offset))
        if magic != MARK_MAGIC or crc != crc32c(data[at : at + _MARK.size], place):
            raise Corruption("CRC mismatch in a flush mark")
        return Mark(*fields)


class FloorFlag(IntFlag):
    """What was under way when the floor was written; opening the log ends it."""

    NONE = 0
    CUT = 1  # everything after `cut` goes
    RESET = 2  # every segment and snapshot goes
    SEEDING = 4  # the log is being received from another replica and is not whole yet


class FloorSlot(NamedTuple):
    """Version 1 has neither flags nor the fields behind `tail`, and is written where it will do."""

    generation: int  # the slot with the greater one counts
    sequence: int  # everything up to here was committed: a log that ends below it has lost data
    first: int  # the oldest sequence held; files before it may be left over from a drop
    tail: int  # first sequence of the newest segment: every segment before it is sealed
    flags: FloorFlag = FloorFlag.NONE
    cut: int = 0  # where the log is to end
    chain: int = 0  # of the log before `first`, while there is no segment to say so
    epoch: int = 0  # of the log before `first`, as `chain`

    def encode(self) -> bytes:
        generation, sequence, first, tail, flags, *rest = self
        version = 2 if flags or any(rest) else 1
        numbers = (generation, sequence, first, tail, *rest)
        return FLOOR.pack(*numbers, flags=flags, version=version)

    @staticmethod
    def decode(data: Buffer) -> FloorSlot:
        flags, generation, sequence, first, tail, *rest = FLOOR.unpack(data)
        return FloorSlot(generation, sequence, first, tail, FloorFlag(flags), *rest)

    @property
    def empty_at(self) -> int:
        """Where a log without any segment begins."""
        return max(self.first, 1)


class IndexHeader(NamedTuple):
    first: int
    last: int
    end: int  # with `first` and `last` it binds the sidecar to one version of its segment
    batches: int
    crc: int  # of the two arrays that follow


class SnapshotHeader(NamedTuple):
    topic: int
    partition: int
    sequence: int
    chain: int
    epoch: int
    crc: int  # of the data
    length: int
    time_ms: int  # wall clock when it was taken


class ReplicaRecord(NamedTuple):
    generation: int  # the record with the greater one counts
    promised: int  # the highest epoch promised
    uuid: str  # at most 64 bytes

    def encode(self) -> bytes:
        text = self.uuid.encode()
        if not 0 < len(text) <= 64:
            raise ValueError(f"not a replica's uuid: {self.uuid!r}")
        return REPLICA.pack(self.generation, self.promised, text)

    @staticmethod
    def decode(data: Buffer) -> ReplicaRecord:
        _, generation, promised, text = REPLICA.unpack(data)
        return ReplicaRecord(generation, promised, text.rstrip(b"\0").decode())


class Generation(NamedTuple):
    """One of a data folder's. Two with the same number differ in their tokens."""

    number: int
    token: str  # 32 hexadecimal digits


class GenerationRecord(NamedTuple):
    written: int  # how often the file was written; the record with the greater one counts
    current: Generation  # the last that the metadata are known to have
    intended: Generation  # what the metadata may have, if the node ended while telling them

    def encode(self) -> bytes:
        current, intended = self.current, self.intended
        return GENERATION.pack(
            self.written, current.number, bytes.fromhex(current.token), intended.number,
            bytes.fromhex(intended.token),
        )  # fmt: skip

    @staticmethod
    def decode(data: Buffer) -> GenerationRecord:
        _, written, number, token, intended, wanted = GENERATION.unpack(data)
        return GenerationRecord(
            written, Generation(number, token.hex()), Generation(intended, wanted.hex())
        )
