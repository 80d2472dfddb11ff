"""Message ids, which carry where the message lies, lease tokens, and the partitions of keys.

A message id is a ULID: 48 bits of the coordinator's time, then topic (16), partition (16) and
sequence (48) in place of the random part. It is unique in a cluster, sorts by time, and is found in
the log without an index.

Which partition a key belongs to is found by rendezvous hashing, so that growing a topic moves few
keys. A delta has no key: it belongs where its vector does, and says so by the hash it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from ulid import ULID
from ulid.base32 import ENCODE as ENCODING

from penstock.errors import InvalidArgument

TOPICS_MAX: Final = 1 << 16
PARTITIONS_MAX: Final = 1024
SEQUENCE_MAX: Final = (1 << 48) - 1
_TAILS: Final = [a + b for a in ENCODING for b in ENCODING]  # an id's last two characters
_PAIR: Final = len(_TAILS) - 1  # the bits that two characters stand for
_SHIFTS: Final = range(120, -1, -10)


class MessageId(NamedTuple):
    time_ms: int
    topic: int
    partition: int
    sequence: int

    def __str__(self) -> str:
        value = self.time_ms << 80 | self.topic << 64 | self.partition << 48 | self.sequence
        return "".join([_TAILS[value >> shift & _PAIR] for shift in _SHIFTS])

    @staticmethod
    def parse(text: str) -> MessageId:
        try:
            value = int(ULID.from_str(text))
        except ValueError as error:
            raise InvalidArgument("message_id is not a ULID", field="message_id") from error
        return MessageId(
            value >> 80, value >> 64 & 0xFFFF, value >> 48 & 0xFFFF, value & SEQUENCE_MAX
        )


def message_ids(time_ms: int, topic: int, partition: int, sequences: range) -> list[str]:
    """The ids of consecutive messages of one batch, as `str(MessageId(…))` gives them one by one.
    They differ only in their last characters, so one prefix serves up to 1024 of them."""
    texts: list[str] = []
    first, end = sequences.start, sequences.stop
    while first < end:
        low = first & (len(_TAILS) - 1)
        high = min(len(_TAILS), low + end - first)
        prefix = str(MessageId(time_ms, topic, partition, first))[:-2]
        texts += [prefix + tail for tail in _TAILS[low:high]]
        first += high - low
    return texts


class LeaseToken(NamedTuple):
    """One lease: the sequence of its LEASE entry, in the epoch that granted it.

    The topic's id is a part of it. A topic that is deleted and made again under its name counts its
    sequences from 1 again, and its epochs too; its id is one that no topic had before.
    """

    topic: int
    partition: int
    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.topic:x}.{self.partition:x}.{self.epoch:x}.{self.sequence:x}"

    @staticmethod
    def parse(text: str) -> LeaseToken:
        try:
            numbers = [int(part, 16) for part in text.split(".")]
        except ValueError as error:
            raise InvalidArgument("lease_token is malformed", field="lease_token") from error
        if len(numbers) == 3:  # what tokens were before they named their topic
            raise InvalidArgument(
                "lease_token names no topic: it was made by an earlier version. Its lease runs out"
                " by itself; pop the message again",
                field="lease_token",
            )
        if len(numbers) != 4:
            raise InvalidArgument("lease_token is malformed", field="lease_token")
        return LeaseToken(*numbers)


_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
VECTOR_AT: Final = 64  # of a vector's hash in a delta
_SHIFT: Final = np.uint64(33)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition with the highest score for this key."""
    return int(partitions_of([key], partitions)[0])


def partitions_of(keys: Sequence[bytes], partitions: int) -> NDArray[np.int64]:
    if partitions == 1:
        return np.zeros(len(keys), np.int64)
    digests = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
    return partitions_of_digests(digests, partitions)


def partitions_of_digests(digests: NDArray[np.uint64], partitions: int) -> NDArray[np.int64]:
    """The same for keys that were hashed already: of a vector hash, its first eight bytes."""
    if partitions == 1:
        return np.zeros(len(digests), np.int64)
    scores = (digests[:, None] ^ _salts(partitions)) * _MIX
    scores ^= scores >> _SHIFT
    scores *= _MIX
    best: NDArray[np.int64] = np.argmax(scores, axis=1)
    return best


def partitions_of_deltas(payloads: Sequence[bytes], partitions: int) -> NDArray[np.int64]:
    """Where the deltas in these payloads belong; bytes that are no delta belong anywhere."""
    end = VECTOR_AT + 8
    hashes = [payload[VECTOR_AT:end].ljust(8, b"\0") for payload in payloads]
    return partitions_of_digests(np.frombuffer(b"".join(hashes), "<u8"), partitions)


@lru_cache(maxsize=1024)
def _salts(partitions: int) -> NDArray[np.uint64]:
    digests = (xxhash.xxh3_64_intdigest(b"partition-%d" % p) for p in range(partitions))
    return np.fromiter(digests, np.uint64, partitions)
