"""Identifiers: message ids that carry where the message lies, and lease tokens.

A message id is a ULID: 48 bits of the coordinator's time, then topic (16), partition (16) and
sequence (48) in place of the random part. It is unique in a cluster, sorts by time, and is found in
the log without an index.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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

    They differ only in their last characters, so one prefix serves up to 1024 of them.
    """
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
