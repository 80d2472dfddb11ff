"""A topic's configuration: attributes, defaults, limits, and what may change while it runs."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Final

import msgspec

from penstock.errors import InvalidArgument
from penstock.model.delta import DIMENSIONS_MAX
from penstock.model.entries import RETRIES_MAX
from penstock.model.ids import PARTITIONS_MAX

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,255}")
CONSUMER_BYTES_MAX: Final = 255
HOUR_MS: Final = 3600 * 1000
RETENTION_MS_MAX: Final = 10 * 366 * 24 * HOUR_MS


class TopicKind(StrEnum):
    """What a topic's messages are, and so how they are read."""

    QUEUE = "queue"  # leased one by one, best first, and settled
    DELTA = "delta"  # changes of vectors, read in the order of the log; never leased


class Mode(StrEnum):
    MIN = "min"
    MAX = "max"


class Compression(StrEnum):
    NONE = "none"
    ZSTD = "zstd"
    LZ4 = "lz4"


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Everything a topic can be told. Fields in `FIXED` are set at creation only."""

    name: str
    id: int = 0  # given by the metadata store; never reused
    kind: TopicKind = TopicKind.QUEUE
    dimensions: int = 0  # of a delta topic's vectors
    mode: Mode = Mode.MIN
    partitions: int = 1
    replication_factor: int = 1
    k: int = 100  # a pop's rank bound among the ready messages of all partitions
    retention_ms: int = 24 * HOUR_MS  # how long settled messages stay in the log
    visibility_ms: int = 30_000
    visibility_ms_max: int = 12 * HOUR_MS  # from the lease's start, extensions included
    max_retries: int = 3
    backoff_ms_base: int = 1000
    backoff_ms_cap: int = 5 * 60_000
    payload_bytes_max: int = 1 << 20
    compression: Compression = Compression.NONE
    inflight_max: int = 100_000  # leased messages of the topic
    consumer_leases_max: int = 10_000  # leased messages of one consumer
    key_streams_max: int = 100  # open streams of one API key on this topic
    dedup_ms: int = 24 * HOUR_MS
    ageing_per_s: int = 0  # priority units a waiting message gains each second
    dlq_retention_ms: int = 14 * 24 * HOUR_MS  # after which a dead letter is deleted
    dlq: bool = True  # False: a message past its retries is dropped (and counted)
    replay_per_s: int = 1000  # dead letters replayed to their origin each second
    paused: bool = False  # no deliveries; enqueues and settling go on

    def validate(self) -> TopicConfig:
        """Raise `InvalidArgument` that names the first field out of bounds, else return self."""
        if not NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"topic name must match {NAME.pattern}", field="name", limit=NAME.pattern
            )
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(
                    f"{name} is {value}, must be from {low} to {high}", field=name, limit=high
                )
        self._check_kind()
        if self.replication_factor not in (1, 2, 3, 5):
            raise InvalidArgument(
                "replication_factor must be 1, 2, 3 or 5", field="replication_factor", limit=5
            )
        if self.visibility_ms > self.visibility_ms_max:
            raise InvalidArgument(
                f"visibility_ms is over visibility_ms_max {self.visibility_ms_max}",
                field="visibility_ms",
                limit=self.visibility_ms_max,
            )
        return self

    def _check_kind(self) -> None:
        if self.kind is TopicKind.DELTA and not self.dimensions:
            raise InvalidArgument(
                f"dimensions of a delta topic must be from 1 to {DIMENSIONS_MAX}",
                field="dimensions",
                limit=DIMENSIONS_MAX,
            )
        if self.kind is TopicKind.QUEUE and self.dimensions:
            raise InvalidArgument(
                "dimensions are for delta topics only", field="dimensions", limit=0
            )

    def updated(self, changes: dict[str, Any]) -> TopicConfig:
        """A validated copy with `changes`; refuses fields that are fixed or unknown."""
        for name in changes:
            if name not in self.__struct_fields__:
                raise InvalidArgument(f"no such topic attribute: {name}", field=name)
            if name in FIXED:
                raise InvalidArgument(f"{name} is fixed at creation", field=name)
        return topic_config({**msgspec.to_builtins(self), **changes})


FIXED: Final = frozenset(
    {"name", "id", "kind", "dimensions", "mode", "partitions", "replication_factor"}
)
BOUNDS: Final[dict[str, tuple[int, int]]] = {
    "dimensions": (0, DIMENSIONS_MAX),
    "partitions": (1, PARTITIONS_MAX),
    "k": (1, 100_000),
    "retention_ms": (0, RETENTION_MS_MAX),
    "visibility_ms": (1, 12 * HOUR_MS),
    "visibility_ms_max": (1, 12 * HOUR_MS),
    "max_retries": (0, RETRIES_MAX),
    "backoff_ms_base": (0, HOUR_MS),
    "backoff_ms_cap": (0, 24 * HOUR_MS),
    "payload_bytes_max": (1, 16 << 20),
    "inflight_max": (1, 10_000_000),
    "consumer_leases_max": (1, 1_000_000),
    "key_streams_max": (1, 10_000),
    "dedup_ms": (0, 30 * 24 * HOUR_MS),
    "ageing_per_s": (0, 1_000_000_000),
    "dlq_retention_ms": (0, RETENTION_MS_MAX),
    "replay_per_s": (1, 1_000_000),
}


def topic_config(fields: dict[str, Any]) -> TopicConfig:
    """Build and validate a configuration from untrusted fields. The log of a delta topic is the
    truth about its vectors, so it is kept unless told otherwise."""
    if fields.get("kind") == TopicKind.DELTA:
        fields = {"retention_ms": RETENTION_MS_MAX, **fields}
    try:
        config = msgspec.convert(fields, TopicConfig)
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.(\w+)`", str(error)) or re.search(r"field `(\w+)`", str(error))
        raise InvalidArgument(str(error), field=path.group(1) if path else "config") from error
    unknown = fields.keys() - set(TopicConfig.__struct_fields__)
    if unknown:
        name = min(unknown)
        raise InvalidArgument(f"no such topic attribute: {name}", field=name)
    return config.validate()
