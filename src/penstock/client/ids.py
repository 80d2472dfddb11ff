"""Message ids as text, many at a time.

The text of consecutive sequences differs only in its last characters, so one prefix serves up to
1024 of them. The result equals `str(MessageId(…))`.
"""

from __future__ import annotations

from typing import Final

from penstock.model.ids import MessageId

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_TAILS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]  # the last two characters


def message_id(time_ms: int, topic: int, partition: int, sequence: int) -> str:
    return str(MessageId(time_ms, topic, partition, sequence))


def message_ids(time_ms: int, topic: int, partition: int, sequences: range) -> list[str]:
    """The ids of consecutive messages of one batch."""
    texts: list[str] = []
    first, end = sequences.start, sequences.stop
    while first < end:
        low = first & (len(_TAILS) - 1)
        high = min(len(_TAILS), low + end - first)
        prefix = message_id(time_ms, topic, partition, first)[:-2]
        texts += [prefix + tail for tail in _TAILS[low:high]]
        first += high - low
    return texts
