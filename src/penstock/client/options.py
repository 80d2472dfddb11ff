"""What a client may be told, and its defaults."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import Any, Final

import msgspec

from penstock.errors import InvalidArgument
from penstock.model.entries import DELAY_MS_MAX
from penstock.model.topic import Compression

SECONDS_MAX: Final = DELAY_MS_MAX // 1000  # that any duration may last: a leap year
Duration = float | int | timedelta  # seconds unless it says otherwise


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound of a client. The defaults suit a service with some hundred concurrent puts."""

    producer: str | None = None  # a stable name; None: a fresh one for each client
    requests_max: int = 4  # enqueue requests of one topic that wait for an answer at once
    batch_entries_max: int = 1000  # puts that share one request
    batch_bytes_max: int = 1 << 20
    stay_s: float = 0.02  # how long puts without a key stay with one partition of a cluster
    stay_entries: int = 100  # how many of them do; the others go to the next partition
    inflight_entries_max: int = 20_000  # entries put and not yet answered; further puts wait
    inflight_bytes_max: int = 64 << 20
    attempt_s: float | None = 10.0  # how long a node may take to answer one try; None: for ever
    retry_s: float = 60.0  # how long a retryable failure is retried before it is raised
    retry_wait_s: float = 0.05  # before the first retry; doubles
    retry_wait_s_max: float = 2.0
    drain_s: float = 30.0  # how long leaving the client waits for what is in flight
    compression: Compression = Compression.NONE  # of frames, if the server can; not in one process

    def __post_init__(self) -> None:
        if self.attempt_s is not None and not 0 < self.attempt_s < math.inf:
            raise InvalidArgument("attempt_s must be positive, or None", field="attempt_s")

    @property
    def codecs(self) -> list[str]:
        return [] if self.compression is Compression.NONE else [self.compression.value]


def deadline(timeout: Duration | None) -> float | None:
    """When a duration that begins now is over, by the running loop's clock."""
    if timeout is None:
        return None
    return asyncio.get_running_loop().time() + milliseconds(timeout, field="timeout") / 1000


def milliseconds(value: Duration, *, field: str) -> int:
    wrong = f"{field} must be seconds or a timedelta, not {value!r:.100}"
    given: Any = value
    if isinstance(given, str | bytes):  # which `float` would read
        raise InvalidArgument(wrong, field=field)
    try:
        seconds = given.total_seconds() if isinstance(given, timedelta) else float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(wrong, field=field) from error
    if not seconds >= 0:
        raise InvalidArgument(f"{field} must not be negative", field=field)
    if seconds > SECONDS_MAX:
        raise InvalidArgument(
            f"{field} is {seconds} s, at most {SECONDS_MAX}", field=field, limit=SECONDS_MAX
        )
    return round(seconds * 1000)


def optional_ms(value: Duration | None, *, field: str) -> int | None:
    return None if value is None else milliseconds(value, field=field)
