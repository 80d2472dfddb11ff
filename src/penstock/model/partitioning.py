"""Which partition a key belongs to: rendezvous hashing, so that growing a topic moves few keys.

A delta has no key: it belongs where its vector does, and says so by the hash it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
VECTOR_AT: Final = 64  # of a vector's hash in a delta
_SHIFT: Final = np.uint64(33)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition with the highest score for this key."""
    return int(partitions_of([key], partitions)[0])


def partitions_of(keys: Sequence[bytes], partitions: int) -> NDArray[np.int64]:
    """`partition_of` for many keys at once."""
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
