"""Batches: the unit of append, storage, replication and Spark read.

A batch is 72 bytes of header and one columnar body (`penstock.model.columns`). It covers the
sequences `[first, last]` of one partition; the previous batch ends at `first - 1`, because a log
has no gaps. The same bytes go to disk, to followers, to subscribers and to Spark.

`chain` is a hash over this batch and the chain before it, so two logs that agree on one chain value
agree on the whole prefix. `crc` covers header and body: one batch is what was written.

A *compacted* batch keeps its range and its chain but only the entries that are still alive:
`entries` is then less than `count`, and the body has a `sequence` column.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import lz4.frame
import msgspec
import xxhash
import zstandard
from crc32c import crc32c

from penstock.errors import Corruption
from penstock.model.columns import Buffer, Column, Columns, Domain, Schema

MAGIC: Final = 0x31425350  # "PSB1"
VERSION: Final = 1
HEADER: Final = struct.Struct("<IBBBBIIIIQIIqIIQII")
HEADER_SIZE: Final = HEADER.size  # 72
_COMPACTED: Final = 1  # the only flag
BODY_BYTES_MAX: Final = 64 << 20
WINDOW_BYTES_MAX: Final = 8 << 20  # that a zstd frame may have a reader keep
_CHAINED: Final = struct.Struct("<IBBBBIIIIQIIqII")  # the header up to the chain: what it hashes
_CHAIN: Final = struct.Struct("<QI")
_CRC: Final = struct.Struct("<I")


class Kind(IntEnum):
    BARRIER = 0  # a coordinator's first entry in its epoch
    ENQ = 1  # messages become ready (or delayed)
    LEASE = 2  # messages go out on lease; an entry's own sequence is the lease token
    EXTEND = 3  # leases run longer
    ACK = 4  # messages are done: by token, by message, or all up to a sequence
    NACK = 5  # leases end unfinished; the messages come back at `not_before_ms`
    EXPIRE = 6  # as NACK, because the deadline passed
    DEAD = 7  # messages move to the dead letters
    REPLAY = 8  # dead letters become ready again
    PREPARE = 9  # an atomic batch's share of messages, invisible until decided
    DECIDE = 10  # the outcome of an atomic batch
    CONFIG = 11  # the topic's configuration from here on
    SNAPSHOT_MARK = 12  # a snapshot of the state up to a sequence exists
    PRODUCER = 13  # producers begin an epoch: whoever has a lower one is refused from here on


class Codec(IntEnum):
    NONE = 0
    ZSTD = 1
    LZ4 = 2


_PRODUCER_RUNS: Final = (
    Column("run_count", "uint32", Domain.RUN),
    Column("run_epoch", "uint64", Domain.RUN),
    Column("run_sequence", "uint64", Domain.RUN),  # producer sequence of the run's first entry
    Column("run_producer", "binary", Domain.RUN),  # producer id, empty: no deduplication
)
_MESSAGE: Final = (
    Column("priority", "int64"),
    Column("delay_ms", "int64"),  # counted from the batch's time
    Column("max_retries", "int32", default=-1),  # -1: the topic's default
    Column("key", "binary"),
    Column("headers", "binary"),  # msgpack map, empty: none
    Column("payload", "binary"),
)
_SEQUENCE: Final = Column("sequence", "uint64")  # only in compacted batches

SCHEMAS: Final[dict[Kind, Schema]] = {
    Kind.BARRIER: Schema(1, (Column("node", "binary", Domain.SCALAR),)),
    Kind.ENQ: Schema(1, (*_MESSAGE, *_PRODUCER_RUNS, _SEQUENCE)),
    Kind.LEASE: Schema(
        1,
        (
            Column("message", "uint64"),
            Column("run_count", "uint32", Domain.RUN),
            Column("run_visibility_ms", "int64", Domain.RUN),
            Column("run_consumer", "binary", Domain.RUN),
        ),
    ),
    Kind.EXTEND: Schema(1, (Column("token", "uint64"), Column("extend_ms", "int64"))),
    Kind.ACK: Schema(
        1,
        (
            Column("token", "uint64"),
            Column("message", "uint64"),  # administrative: purge or dead-letter deletion
            Column("through", "uint64"),  # administrative: all ready and delayed up to here
        ),
    ),
    Kind.NACK: Schema(
        1,
        (
            Column("token", "uint64"),
            Column("not_before_ms", "int64"),
            Column("counted", "uint8", default=1),  # 0: given back unused, no attempt counted
        ),
    ),
    Kind.EXPIRE: Schema(1, (Column("token", "uint64"), Column("not_before_ms", "int64"))),
    Kind.DEAD: Schema(
        1,
        (
            Column("token", "uint64"),
            Column("message", "uint64"),
            Column("reason", "uint8"),
            Column("detail", "binary"),
        ),
    ),
    Kind.REPLAY: Schema(1, (Column("message", "uint64"),)),
    Kind.PREPARE: Schema(
        1,
        (
            *_MESSAGE,
            *_PRODUCER_RUNS,
            _SEQUENCE,
            Column("transaction", "binary", Domain.SCALAR),
            Column("home", "uint32", Domain.SCALAR),  # the partition that holds the decision
        ),
    ),
    Kind.DECIDE: Schema(
        2,
        (
            Column("transaction", "binary"),
            Column("commit", "uint8"),  # a Decision
            # Of a home that decides for: where the other shares lie, u32 partition and u64 sequence
            # each. Since version 2.
            Column("participants", "binary"),
        ),
    ),
    Kind.CONFIG: Schema(1, (Column("config", "binary", Domain.SCALAR),)),
    Kind.SNAPSHOT_MARK: Schema(1, (Column("through", "uint64", Domain.SCALAR),)),
    Kind.PRODUCER: Schema(1, (Column("producer", "binary"), Column("producer_epoch", "uint64"))),
}


# By value: making an enum member from its number costs more than the rest of a header.
_KINDS: Final = tuple(Kind)
_CODECS: Final = tuple(Codec)


class Decision(IntEnum):
    ABORT = 0
    COMMIT = 1
    CONFIRMED = 2  # all participants have the commit: it need not be kept for them


class DeadReason(IntEnum):
    RETRIES = 1  # nacked or expired past max_retries
    REJECTED = 2  # by the consumer
    MOVED = 3  # by an administrator
    UNREADABLE = 4  # by its coordinator, which cannot make sense of what is stored

    @staticmethod
    def name_of(number: int) -> str:
        """The name as it is shown; a number that a later version has written stands for itself."""
        return DeadReason(number).name.lower() if number in _REASONS else str(number)


_REASONS: Final = frozenset(DeadReason)


class Batch(msgspec.Struct, frozen=True, gc=False):
    """A sealed batch. `header` and `body` are as stored; `columns()` decompresses and decodes."""

    kind: Kind
    codec: Codec
    compacted: bool
    topic: int
    partition: int
    epoch: int
    epoch_previous: int
    first: int
    last: int
    entries: int  # entries in the body; less than the sequences covered only when compacted
    time_ms: int  # the coordinator's clock
    raw_length: int
    chain: int
    header: bytes
    body: Buffer

    @property
    def count(self) -> int:
        """Sequences covered."""
        return self.last - self.first + 1

    @property
    def size(self) -> int:
        return HEADER_SIZE + len(self.body)

    def encode(self) -> bytes:
        return b"".join((self.header, self.body))

    def columns(self) -> Columns:
        return SCHEMAS[self.kind].decode(self.raw(), self.entries)

    def raw(self) -> Buffer:
        """The body, decompressed within the length that the header promised."""
        if self.codec is Codec.NONE:
            return self.body
        if self.raw_length > BODY_BYTES_MAX:
            raise Corruption(f"a body of {self.raw_length} bytes is over the limit")
        raw = decompress(self.codec, self.body, self.raw_length)
        if len(raw) != self.raw_length:
            raise Corruption("a body did not decompress to its stated length")
        return raw


def seal(
    kind: Kind,
    body: Buffer,
    *,
    topic: int,
    partition: int,
    epoch: int,
    epoch_previous: int,
    first: int,
    count: int,
    time_ms: int,
    chain_previous: int,
    codec: Codec = Codec.NONE,
    raw_length: int | None = None,
) -> Batch:
    """Complete a batch with its chain and CRC. `body` is already compressed if `codec` says so."""
    raw = len(body) if raw_length is None else raw_length
    prefix = _CHAINED.pack(
        MAGIC, VERSION, kind, codec, 0, topic, partition, epoch, epoch_previous, first, count,
        count, time_ms, len(body), raw,
    )  # fmt: skip
    chain = chain_over(prefix, body, chain_previous)
    return Batch(
        kind, codec, False, topic, partition, epoch, epoch_previous, first, first + count - 1,
        count, time_ms, raw, chain, _header(prefix, chain, body), body,
    )  # fmt: skip


def seal_compacted(
    body: Buffer, *, entries: int, covers: tuple[Batch, Batch], codec: Codec, raw_length: int
) -> Batch:
    """Stand for the batches from `covers[0]` to `covers[1]` with only the living `entries`."""
    oldest, newest = covers
    prefix = _CHAINED.pack(
        MAGIC, VERSION, Kind.ENQ, codec, _COMPACTED, newest.topic, newest.partition, newest.epoch,
        oldest.epoch_previous, oldest.first, newest.last - oldest.first + 1, entries,
        newest.time_ms, len(body), raw_length,
    )  # fmt: skip
    head, _ = decode_header(_header(prefix, newest.chain, body))
    return msgspec.structs.replace(head, body=body)


def _header(prefix: bytes, chain: int, body: Buffer) -> bytes:
    covered = prefix + _CHAIN.pack(chain, 0)
    return covered + _CRC.pack(crc32c(body, crc32c(covered)))


def chain_over(header: bytes, body: Buffer, chain_previous: int) -> int:
    """The chain after a batch: over its header up to the chain, its body, and the chain before."""
    digest = xxhash.xxh3_64_digest(body)
    return xxhash.xxh3_64_intdigest(header[: _CHAINED.size] + digest, seed=chain_previous)


def decode_header(data: Buffer, at: int = 0) -> tuple[Batch, int]:
    """Read a header whose body is not at hand yet; returns it with the body's stored length."""
    if len(data) - at < HEADER_SIZE:
        raise Corruption("a batch header is cut short")
    (
        magic, version, kind, codec, flags, topic, partition, epoch, epoch_previous, first, count,
        entries, time_ms, length, raw_length, chain, reserved, _,
    ) = HEADER.unpack_from(data, at)  # fmt: skip
    if magic != MAGIC or reserved:
        raise Corruption("not a batch header")
    if version != VERSION:
        raise Corruption(f"batch version {version} is not {VERSION}")
    if kind >= len(_KINDS) or codec >= len(_CODECS) or flags > _COMPACTED:
        raise Corruption("a batch header has an unknown kind, codec or flag")
    if length > BODY_BYTES_MAX or count == 0 or entries > count or first == 0:
        raise Corruption("a batch header has an impossible length or range")
    batch = Batch(
        _KINDS[kind], _CODECS[codec], flags == _COMPACTED, topic, partition, epoch, epoch_previous,
        first, first + count - 1, entries, time_ms, raw_length, chain,
        bytes(data[at : at + HEADER_SIZE]), b"",
    )  # fmt: skip
    return batch, length


def decode(data: Buffer, at: int = 0) -> Batch:
    """Read one batch at `at`; raises `Corruption` unless header, length and CRC agree."""
    head, length = decode_header(data, at)
    start, end = at + HEADER_SIZE, at + HEADER_SIZE + length
    if len(data) < end:
        raise Corruption("a batch body is cut short")
    body = memoryview(data)[start:end]
    covered = head.header[: -_CRC.size]
    if head.header[-_CRC.size :] != _CRC.pack(crc32c(body, crc32c(covered))):
        raise Corruption(f"CRC mismatch in the batch at sequence {head.first}")
    return msgspec.structs.replace(head, body=body)


def decode_all(data: Buffer) -> list[Batch]:
    """Batches that lie one behind the other, each padded to 8 bytes; verified by their CRCs."""
    found: list[Batch] = []
    at = 0
    while at < len(data):
        batch = decode(data, at)
        found.append(batch)
        at += (batch.size + 7) & ~7
    return found


def verify_chain(batch: Batch, chain_previous: int) -> None:
    """Raise `Corruption` unless `batch` follows the prefix that `chain_previous` stands for."""
    if not batch.compacted and chain_over(batch.header, batch.body, chain_previous) != batch.chain:
        raise Corruption(f"the hash chain breaks at sequence {batch.first}")


def compress(codec: Codec, body: Buffer) -> bytes:
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor(level=1).compress(body)
    if codec is Codec.LZ4:
        return lz4.frame.compress(body)  # type: ignore[no-any-return]
    return bytes(body)


def decompress(codec: Codec, body: Buffer, limit: int) -> bytes:
    """Decompress at most `limit` bytes, so that a hostile body cannot ask for more memory."""
    try:
        if codec is Codec.ZSTD:
            reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
            return reader.stream_reader(body).read(limit)
        if codec is Codec.LZ4:
            return lz4.frame.LZ4FrameDecompressor().decompress(body, limit)  # type: ignore[no-any-return]
    except (zstandard.ZstdError, RuntimeError, EOFError) as error:
        raise Corruption(f"a compressed body cannot be read: {error}") from error
    return bytes(body)
