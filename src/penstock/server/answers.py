"""Every call's result, as the OpenAPI document describes it and HTTP sends it.

The engine's maps are converted to these: what is not declared here is not sent. The document has
them under their names without `Answer`. The gRPC messages have fields of the same names; payloads
are bytes there, JSON or base64 here.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.client.topic import PartitionStats
from penstock.model.plain import plain, plain_map
from penstock.model.topic import TopicConfig


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The result of one call."""


HeapAnswer = msgspec.defstruct(
    "HeapAnswer",
    [
        ("topic", str),
        *((f.name, f.type) for f in msgspec.structs.fields(TopicConfig) if f.name != "name"),
    ],
    bases=(CallAnswer,),
    frozen=True,
    kw_only=True,
)


class DoneAnswer(CallAnswer, frozen=True, kw_only=True):
    """Nothing to say but that it is done."""


Next = Annotated[str | None, Meta(description="`after` of the next page.")]


class HeapsAnswer(CallAnswer, frozen=True, kw_only=True):
    heaps: list[HeapAnswer]  # type: ignore[valid-type]
    next: Next = None


class PartitionStatsAnswer(PartitionStats, frozen=True, kw_only=True):
    coordinator: str | None = None  # type: ignore[assignment]


class HeapStats(CallAnswer, frozen=True, kw_only=True):
    topic: str
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    dead: int = 0
    backlog: int = 0
    oldest_age_ms: int | None = None
    enqueued_total: int = 0
    acked_total: int = 0
    retried_total: int = 0
    dead_total: int = 0
    expired_total: int = 0
    rank_error_max: int = 0
    partitions: list[PartitionStatsAnswer] = []


class AllStatsAnswer(CallAnswer, frozen=True, kw_only=True):
    topics: list[HeapStats]
    next: Next = None


class PurgedAnswer(CallAnswer, frozen=True, kw_only=True):
    purged: int


class EnqueuedAnswer(CallAnswer, frozen=True, kw_only=True):
    message_id: str
    duplicate: Annotated[bool, Meta(description="The producer key was seen before.")] = False


class BatchEnqueuedAnswer(CallAnswer, frozen=True, kw_only=True):
    message_ids: Annotated[list[str], Meta(description="In the order of the request.")]
    duplicates: Annotated[list[int], Meta(description="Positions that were written before.")] = []
    sequence_last: (
        Annotated[int, Meta(description="Of the last message, when all went to one partition.")]
        | None
    ) = None


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload is in `payload` when its bytes are JSON, else in `payload_base64`."""

    message_id: str
    partition: int
    sequence: int
    priority: int
    attempts: Annotated[int, Meta(description="Earlier deliveries that ended unfinished.")]
    time_ms: int
    key: str | UnsetType = UNSET
    key_base64: Annotated[str, Meta(description="A key that is not UTF-8.")] | UnsetType = UNSET
    headers: dict[str, Any] = {}
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET


class LeasedMessageAnswer(MessageAnswer, frozen=True, kw_only=True, omit_defaults=True):
    lease_token: str
    deadline_ms: int
    visibility_ms: int


class DeadMessageAnswer(MessageAnswer, frozen=True, kw_only=True, omit_defaults=True):
    reason: str = ""
    detail: str = ""
    dead_ms: int = 0


class PoppedAnswer(CallAnswer, frozen=True, kw_only=True):
    messages: list[LeasedMessageAnswer]


class PeekedAnswer(CallAnswer, frozen=True, kw_only=True):
    messages: list[MessageAnswer]


class DeadLettersAnswer(CallAnswer, frozen=True, kw_only=True):
    messages: list[DeadMessageAnswer]
    next: Next = None


class SettledAnswer(CallAnswer, frozen=True, kw_only=True):
    lost: Annotated[list[str], Meta(description="Tokens whose lease was over.")] = []


class ReplayedAnswer(CallAnswer, frozen=True, kw_only=True):
    replayed: int


class DeletedAnswer(CallAnswer, frozen=True, kw_only=True):
    deleted: int


class ConfirmationAnswer(CallAnswer, frozen=True, kw_only=True):
    confirm: str
    expires_ms: int


class NewKeyAnswer(CallAnswer, frozen=True, kw_only=True):
    id: str
    key: Annotated[str, Meta(description="Shown here only.")]
    name: str
    created_ms: int


class KeyInfo(CallAnswer, frozen=True, kw_only=True):
    id: str
    name: str
    created_ms: int
    last_used_ms: int | None = None
    revoked_ms: int | None = None


class KeysAnswer(CallAnswer, frozen=True, kw_only=True):
    keys: list[KeyInfo]
    next: Next = None


class StatusAnswer(CallAnswer, frozen=True, kw_only=True):
    version: str = ""
    node: str = ""
    uptime_ms: int = 0
    format: int = 0


class HealthAnswer(CallAnswer, frozen=True, kw_only=True):
    status: str


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What every failed call answers. Details such as `key_id` may stand beside these."""

    code: Annotated[str, Meta(description="Stable and specific, such as `lease_lost`.")]
    status: Annotated[str, Meta(description="One of the canonical eight.")]
    message: str
    retryable: bool
    field: Annotated[str, Meta(description="The argument that is wrong.")] | UnsetType = UNSET
    limit: Annotated[Any, Meta(description="What it may be at most.")] = UNSET
    retry_after_s: float | UnsetType = UNSET
    request_id: str | UnsetType = UNSET


def json_headers(headers: Any) -> dict[str, Any]:
    """Headers as JSON has them. What a native client has written before headers had to be a map
    stands under the empty name."""
    if not headers:
        return {}
    return plain_map(headers) if isinstance(headers, dict) else {"": plain(headers)}


def text_headers(headers: Any) -> dict[str, str]:
    """Headers where only text fits: a value that is none is written as JSON."""
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
        for name, value in json_headers(headers).items()
    }
