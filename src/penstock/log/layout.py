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

SEGMENT_MAGIC: Final = 0x31535350  # "PSS1"
FOOTER_MAGIC: Final = 0x31465350  # "PSF1"
MARK_MAGIC: Final = 0x314D5350  # "PSM1"
FLOOR_MAGIC: Final = 0x314C5350  # "PSL1"
INDEX_MAGIC: Final = 0x31495350  # "PSI1"
SNAPSHOT_MAGIC: Final = 0x314E5350  # "PSN1"
REPLICA_MAGIC: Final = 0x31525350  # "PSR1"
GENERATION_MAGIC: Final = 0x31475350  # "PSG1"
VERSION: Final = 1

_CRC: Final = struct.Struct("<I")
_SEGMENT: Final = struct.Struct("<IHHIIQQI24x")
_FOOTER: Final = struct.Struct("<IHHQQQqQII4x")
_MARK: Final = struct.Struct("<IIQQI")
_PLACE: Final = struct.Struct("<IIQ")
_FLOOR: Final = struct.Struct("<IHHQQQQQQI")
_INDEX: Final = struct.Struct("<IHHQQQII20x")
_SNAPSHOT: Final = struct.Struct("<IHHIIQQIIQq20x")
_REPLICA: Final = struct.Struct("<IHHQQ64s36x")
_GENERATION: Final = struct.Struct("<IHHQQ16sQ16s60x")

HEADER_SIZE: Final = _SEGMENT.size + 4
FOOTER_SIZE: Final = _FOOTER.size + 4
MARK_SIZE: Final = _MARK.size + 4
FLOOR_SIZE: Final = _FLOOR.size + 4
INDEX_SIZE: Final = _INDEX.size + 4
SNAPSHOT_SIZE: Final = _SNAPSHOT.size + 4
REPLICA_SIZE: Final = _REPLICA.size + 4
GENERATION_SIZE: Final = _GENERATION.size + 4

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
        flags = self.compacted * COMPACTED | self.seeded * SEEDED
        return _sealed(
            _SEGMENT.pack(
                SEGMENT_MAGIC, VERSION, flags, self.topic, self.partition,
                self.first, self.chain_before, self.epoch_before,
            )
        )  # fmt: skip

    @staticmethod
    def decode(data: Buffer) -> SegmentHeader:
        flags, topic, partition, first, chain, epoch = _opened(
            data, _SEGMENT, magic=SEGMENT_MAGIC, what="segment header"
        )
        return SegmentHeader(
            topic, partition, first, chain, epoch, bool(flags & COMPACTED), bool(flags & SEEDED)
        )


class Footer(NamedTuple):
    first: int
    last: int
    chain: int
    time_ms: int
    end: int  # where the footer begins: the file has `end + FOOTER_SIZE` bytes
    batches: int
    epoch: int

    def encode(self) -> bytes:
        return _sealed(_FOOTER.pack(FOOTER_MAGIC, VERSION, 0, *self))

    @staticmethod
    def decode(data: Buffer) -> Footer:
        _, *fields = _opened(data, _FOOTER, magic=FOOTER_MAGIC, what="segment footer")
        return Footer(*fields)


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
        return _sealed(_FLOOR.pack(FLOOR_MAGIC, version, flags, *numbers))

    @staticmethod
    def decode(data: Buffer) -> FloorSlot:
        flags, generation, sequence, first, tail, *rest = _opened(
            data, _FLOOR, magic=FLOOR_MAGIC, what="floor", version_max=2
        )
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

    def encode(self) -> bytes:
        return _sealed(_INDEX.pack(INDEX_MAGIC, VERSION, 0, *self))

    @staticmethod
    def decode(data: Buffer) -> IndexHeader:
        _, *fields = _opened(data, _INDEX, magic=INDEX_MAGIC, what="index header")
        return IndexHeader(*fields)


class SnapshotHeader(NamedTuple):
    topic: int
    partition: int
    sequence: int
    chain: int
    epoch: int
    crc: int  # of the data
    length: int
    time_ms: int  # wall clock when it was taken

    def encode(self) -> bytes:
        return _sealed(_SNAPSHOT.pack(SNAPSHOT_MAGIC, VERSION, 0, *self))

    @staticmethod
    def decode(data: Buffer) -> SnapshotHeader:
        _, *fields = _opened(data, _SNAPSHOT, magic=SNAPSHOT_MAGIC, what="snapshot header")
        return SnapshotHeader(*fields)


class ReplicaRecord(NamedTuple):
    generation: int  # the record with the greater one counts
    promised: int  # the highest epoch promised
    uuid: str  # at most 64 bytes

    def encode(self) -> bytes:
        text = self.uuid.encode()
        if not 0 < len(text) <= 64:
            raise ValueError(f"not a replica's uuid: {self.uuid!r}")
        return _sealed(
            _REPLICA.pack(REPLICA_MAGIC, VERSION, 0, self.generation, self.promised, text)
        )

    @staticmethod
    def decode(data: Buffer) -> ReplicaRecord:
        what = "replica record"
        _, generation, promised, text = _opened(data, _REPLICA, magic=REPLICA_MAGIC, what=what)
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
        return _sealed(
            _GENERATION.pack(
                GENERATION_MAGIC, VERSION, 0, self.written,
                current.number, bytes.fromhex(current.token),
                intended.number, bytes.fromhex(intended.token),
            )
        )  # fmt: skip

    @staticmethod
    def decode(data: Buffer) -> GenerationRecord:
        what = "generation record"
        _, written, number, token, intended, wanted = _opened(
            data, _GENERATION, magic=GENERATION_MAGIC, what=what
        )
        return GenerationRecord(
            written, Generation(number, token.hex()), Generation(intended, wanted.hex())
        )


def _sealed(record: bytes) -> bytes:
    return record + _CRC.pack(crc32c(record))


def _opened(
    data: Buffer, form: struct.Struct, *, magic: int, what: str, version_max: int = VERSION
) -> tuple[Any, ...]:
    """Check size, magic, CRC and version of a record; returns its fields from the flags on."""
    size = form.size
    if len(data) != size + 4:
        raise Corruption(f"a {what} is cut short")
    found, version, *fields = form.unpack(data[:size])
    if found != magic or _CRC.unpack(data[size:])[0] != crc32c(data[:size]):
        raise Corruption(f"CRC mismatch in a {what}")
    if not 1 <= version <= version_max:
        raise Corruption(f"version {version} of a {what} is over {version_max}")
    return tuple(fields)
