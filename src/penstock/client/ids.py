"""Message ids as text, many at a time.

The text of consecutive sequences differs only in its last characters, so one prefix serves up to
2^20 of them. The result equals `str(MessageId(…))`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.model.ids import MessageId

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]  # 10 bits each
_TAIL_BITS: Final = 20  # the last four characters


def message_ids(time_ms: int, topic: int, partition: int, sequences: Iterable[int]) -> list[str]:
    """The ids of messages of one batch."""
    texts: list[str] = []
    prefix, block = "", -1
    for sequence in sequences:
        if sequence >> _TAIL_BITS != block:
            block = sequence >> _TAIL_BITS
            prefix = str(MessageId(time_ms, topic, partition, sequence))[:-4]
        texts.append(prefix + _PAIRS[sequence >> 10 & 1023] + _PAIRS[sequence & 1023])
    return texts
