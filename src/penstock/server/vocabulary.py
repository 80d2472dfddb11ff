"""Every call's arguments, with their limits, and its result, as the OpenAPI document has them.

A field is declared once here. Decoding refuses arguments that do not fit and names the field; the
engine's maps are converted to answers, and what is not declared is not sent. The document has these
types under their names without `Call` and `Answer`. The gRPC messages have fields of the same
names; payloads are bytes there, JSON or base64 here.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.client.topic import PartitionStats, TopicStats
from penstock.errors import InvalidArgument
from penstock.model.delta import NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    RETRIES_MAX,
)
from penstock.model.plain import plain, plain_map
from penstock.model.topic import BOUNDS, CONSUMER_BYTES_MAX, FIXED, HOUR_MS, TopicConfig
from penstock.wire.messages import BATCH_MS_MAX, CURSOR_BYTES_MAX, ROUTE_BYTES_MAX, ROUTES_MAX

# `$` also matches before a last line feed; the look-ahead shuts that out.
Topic = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_-]{1,255}$(?!\n)", description="The heap's name.")
]
LeaseTokenText = Annotated[
    str,
    Meta(
        # Tokens of three numbers, which an earlier version gave out, pass here: they are refused
        # where they are read, with a word on what they lack.
        pattern=r"^([0-9a-f]{1,4}\.)?[0-9a-f]{1,4}\.[0-9a-f]{1,8}\.[0-9a-f]{1,12}$(?!\n)",
        description="From a pop; opaque.",
    ),
]
MessageIdText = Annotated[
    str,
    Meta(
        pattern=r"^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$(?!\n)",
        description="A ULID, from an enqueue.",
    ),
]
RouteText = Annotated[
    str, Meta(max_length=ROUTE_BYTES_MAX, description="Such as `namespace=shoes` or `op=create`.")
]
POSITIONS_BYTES_MAX: Final = 32 << 10  # of all partitions that a topic may have
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Sequence = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
DelayMs = Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)]
Retries = Annotated[int, Meta(ge=0, le=RETRIES_MAX)]
VisibilityMs = Annotated[int, Meta(ge=1, le=12 * HOUR_MS)]
Consumer = Annotated[str, Meta(max_length=CONSUMER_BYTES_MAX)]
ProducerId = Annotated[str, Meta(max_length=PRODUCER_ID_BYTES_MAX)]
Key = Annotated[
    str, Meta(max_length=KEY_BYTES_MAX, description="Messages of one key share a partition.")
]
Limit = Annotated[int, Meta(ge=1, le=1000)]
Reason = Annotated[str, Meta(max_length=1024)]
Cursor = Annotated[str, Meta(max_length=256, description="`next` of the page before.")]
KeyName = Annotated[str, Meta(min_length=1, max_length=255)]
KeyId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}$(?!\n)")]
ConfirmToken = Annotated[str, Meta(max_length=256, description="From the call Confirm.")]
Credits = Annotated[int, Meta(ge=1, le=1_000_000)]
WAIT_MS_MAX: Final = 60_000


class CallArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of one call; an unknown one is refused by its name."""


class OfTopic(CallArguments, frozen=True, kw_only=True):
    topic: Topic


class Destructive(CallArguments, frozen=True, kw_only=True):
    """Needs both: the intent, and a token bound to this call and subject."""

    force: bool = False
    confirm: ConfirmToken | None = None


def _attribute(name: str) -> Any:
    """A topic attribute's type with the bounds that the model gives it."""
    annotation = msgspec.structs.fields(TopicConfig)[TopicConfig.__struct_fields__.index(name)].type
    bounds = BOUNDS.get(name, (1, 5) if name == "replication_factor" else None)
    if bounds is not None:
        low, high = bounds
        annotation = Annotated[annotation, Meta(ge=low, le=high)]
    return annotation | UnsetType


ATTRIBUTES: Final = [name for name in TopicConfig.__struct_fields__ if name not in ("name", "id")]


def _call(name: str, base: type[CallArguments], *fields: tuple[Any, ...]) -> Any:
    """Arguments of which nothing needs to be said but their fields."""
    return msgspec.defstruct(
        name, fields, bases=(base,), frozen=True, kw_only=True, forbid_unknown_fields=True
    )


_optional = [(name, _attribute(name), UNSET) for name in ATTRIBUTES]
_changeable = [field for field in _optional if field[0] not in FIXED]
MakeHeapCall = _call("MakeHeapCall", OfTopic, *_optional, ("exists_ok", bool, False))
UpdateHeapConfigCall = _call("UpdateHeapConfigCall", OfTopic, *_changeable)


class Nothing(CallArguments, frozen=True, kw_only=True):
    """A call without arguments."""


class SubscribeCall(OfTopic, frozen=True, kw_only=True):
    """Deltas that a topic releases. A partition begins behind its place in `positions`, else where
    the cursor is, else at the time, else at the sequence; without any of them it is now."""

    namespace: Annotated[str, Meta(max_length=NAMESPACE_BYTES_MAX)] | None = None
    vector_id: Annotated[str, Meta(max_length=VECTOR_ID_BYTES_MAX)] | None = None
    op: Annotated[str, Meta(max_length=16)] | None = None
    routes: Annotated[list[RouteText], Meta(max_length=ROUTES_MAX)] = []
    from_sequence: Sequence | None = None
    from_time_ms: Sequence | None = None
    positions: Annotated[str, Meta(max_length=POSITIONS_BYTES_MAX)] | None = None
    cursor: Annotated[str, Meta(max_length=CURSOR_BYTES_MAX)] | None = None
    coalesce_ms: Annotated[int, Meta(ge=0, le=BATCH_MS_MAX)] = 0
    batch_ms: Annotated[int, Meta(ge=0, le=BATCH_MS_MAX)] = 0
    credits: Annotated[int, Meta(ge=1, le=100_000)] = 1000


class DeleteHeapCall(Destructive, frozen=True, kw_only=True):
    topic: Topic


PurgeCall = _call("PurgeCall", Destructive, ("topic", Topic))


class ListingCall(CallArguments, frozen=True, kw_only=True):
    """A page of a list."""

    after: Cursor | None = None


StatsCall = _call("StatsCall", ListingCall, ("topic", Topic | None, None))


class NewMessage(CallArguments, frozen=True, kw_only=True):
    """Exactly one of `payload` and `payload_base64`."""

    payload: Annotated[
        msgspec.Raw | UnsetType, Meta(description="Any JSON value; stored as it is written.")
    ] = UNSET
    payload_base64: Annotated[str, Meta(description="Any bytes.")] | UnsetType = UNSET
    priority: Int64 = 0
    key: Key = ""
    headers: dict[str, str] = {}
    delay_ms: DelayMs = 0
    max_retries: Retries | None = None


class EnqueueCall(NewMessage, frozen=True, kw_only=True):
    topic: Topic
    producer_id: ProducerId = ""
    epoch: Sequence = 0
    seq: Annotated[Sequence, Meta(description="Needed with producer_id.")] | None = None


class EnqueueBatchCall(OfTopic, frozen=True, kw_only=True):
    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=BATCH_ENTRIES_MAX)]
    atomic: Annotated[bool, Meta(description="All or none, also over partitions.")] = True
    producer_id: ProducerId = ""
    epoch: Sequence = 0
    seq: (
        Annotated[Sequence, Meta(description="Of the first message; the others follow.")] | None
    ) = None
    expected_sequence: (
        Annotated[
            Sequence,
            Meta(description="Of the last message in the one partition concerned; 0: none yet."),
        ]
        | None
    ) = None


class PopCall(OfTopic, frozen=True, kw_only=True):
    limit: Limit = 1
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    visibility_ms: VisibilityMs | None = None
    consumer: Consumer = ""


class PopOpen(OfTopic, frozen=True, kw_only=True):
    credits: Credits
    consumer: Consumer = ""
    visibility_ms: VisibilityMs | None = None
    batch_max: Limit = 100


class FlowControl(CallArguments, frozen=True, kw_only=True):
    credits: Credits


class AckCall(OfTopic, frozen=True, kw_only=True):
    lease_token: LeaseTokenText
    message_id: MessageIdText | None = None


class AckBatchCall(OfTopic, frozen=True, kw_only=True):
    lease_tokens: Annotated[list[LeaseTokenText], Meta(min_length=1, max_length=BATCH_ENTRIES_MAX)]


class NackTerms(CallArguments, frozen=True, kw_only=True):
    delay_ms: Annotated[DelayMs, Meta(description="Instead of the heap's backoff.")] | None = None
    reject: Annotated[bool, Meta(description="To the dead letters at once.")] = False
    reason: Reason = ""


class NackCall(NackTerms, frozen=True, kw_only=True):
    topic: Topic
    lease_token: LeaseTokenText
    message_id: MessageIdText | None = None


class NackBatchCall(NackTerms, frozen=True, kw_only=True):
    topic: Topic
    lease_tokens: Annotated[list[LeaseTokenText], Meta(min_length=1, max_length=BATCH_ENTRIES_MAX)]


class ExtendCall(OfTopic, frozen=True, kw_only=True):
    lease_token: LeaseTokenText
    extend_ms: Annotated[VisibilityMs, Meta(description="From now.")]


MessageIds = Annotated[list[MessageIdText], Meta(min_length=1, max_length=BATCH_ENTRIES_MAX)]
_ids = ("message_ids", Annotated[MessageIds, Meta(description="Left out: all.")] | None, None)
_most = Annotated[int, Meta(ge=1, le=1_000_000)] | None
PeekCall = _call("PeekCall", OfTopic, ("limit", Limit, 10))
MoveToDLQCall = _call(
    "MoveToDLQCall", OfTopic, ("message_id", MessageIdText), ("reason", Reason, "")
)
DlqListCall = _call("DlqListCall", OfTopic, ("after", Cursor | None, None), ("limit", Limit, 100))
DlqReplayCall = _call("DlqReplayCall", OfTopic, _ids, ("limit", _most, None))
DlqDeleteCall = _call("DlqDeleteCall", Destructive, ("topic", Topic), _ids)


class ConfirmMethod(StrEnum):
    TOPIC_DELETE = "topic_delete"
    PURGE = "purge"
    DLQ_DELETE = "dlq_delete"
    KEY_REVOKE = "key_revoke"


class ConfirmCall(CallArguments, frozen=True, kw_only=True):
    """A token for one destructive call on one topic or key."""

    method: ConfirmMethod
    topic: Topic | None = None
    key_id: KeyId | None = None


CreateKeyCall = _call("CreateKeyCall", CallArguments, ("name", KeyName))
RevokeKeyCall = _call("RevokeKeyCall", Destructive, ("id", KeyId))


T = TypeVar("T")
_ARGUMENTS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_NAMED: Final = re.compile(r"(?:required|unknown) field `(.*?)`")
_BOUND: Final = re.compile(r"(?:<=|length <=) (-?\d+)")


def invalid(error: msgspec.DecodeError) -> InvalidArgument:
    """The same complaint, with the path of the field, such as `messages[3].priority`."""
    text = str(error)
    path = _PATH.search(text)
    named = _NAMED.search(text)
    bound = _BOUND.search(text)
    places = [path.group(1) if path else "", named.group(1) if named else ""]
    return InvalidArgument(
        _PATH.sub("", text),
        field=".".join(place for place in places if place) or "body",
        limit=int(bound.group(1)) if bound else None,
    )


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """A body in JSON; what is wrong with it is the caller's mistake, whatever the decoder says."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise invalid(error) from error
    except UnicodeDecodeError as error:
        raise InvalidArgument("the text is not UTF-8", field=_garbled(body)) from error
    except RecursionError as error:
        raise InvalidArgument("the document is nested too deeply", field="body") from error


def _garbled(body: bytes | bytearray) -> str:
    try:
        arguments = _ARGUMENTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "body"
    for name, value in arguments.items():
        try:
            bytes(value).decode()
        except UnicodeDecodeError:
            return name
    return "body"


def request_of(fields: dict[str, Any], type: type[T], *, text: bool = False) -> T:
    """`fields` as arguments of a call. `text`: the values come from a query string."""
    try:
        return msgspec.convert(fields, type, strict=not text)
    except msgspec.ValidationError as error:
        raise invalid(error) from error


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The result of one call."""


class DoneAnswer(CallAnswer, frozen=True, kw_only=True):
    """Nothing to say but that it is done."""


def _answer(name: str, *fields: tuple[Any, ...]) -> Any:
    """An answer of which nothing needs to be said but its fields."""
    return msgspec.defstruct(name, fields, bases=(CallAnswer,), frozen=True, kw_only=True)


def _page(name: str, field: str, row: Any) -> Any:
    following = Annotated[str | None, Meta(description="`after` of the next page.")]
    return _answer(name, (field, list[row]), ("next", following, None))


_attributes = [f for f in msgspec.structs.fields(TopicConfig) if f.name != "name"]
HeapAnswer = _answer("HeapAnswer", ("topic", str), *((f.name, f.type) for f in _attributes))
HeapsAnswer = _page("HeapsAnswer", "heaps", HeapAnswer)


class PartitionStatsAnswer(PartitionStats, frozen=True, kw_only=True):
    coordinator: str | None = None  # type: ignore[assignment]


_counts = [(f.name, f.type, f.default) for f in msgspec.structs.fields(TopicStats)[1:-1]]
HeapStats = _answer(
    "HeapStats", ("topic", str), *_counts, ("partitions", list[PartitionStatsAnswer], [])
)
AllStatsAnswer = _page("AllStatsAnswer", "topics", HeapStats)
PurgedAnswer = _answer("PurgedAnswer", ("purged", int))


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


PoppedAnswer = _answer("PoppedAnswer", ("messages", list[LeasedMessageAnswer]))
PeekedAnswer = _answer("PeekedAnswer", ("messages", list[MessageAnswer]))
DeadLettersAnswer = _page("DeadLettersAnswer", "messages", DeadMessageAnswer)


class SettledAnswer(CallAnswer, frozen=True, kw_only=True):
    lost: Annotated[list[str], Meta(description="Tokens whose lease was over.")] = []


ReplayedAnswer = _answer("ReplayedAnswer", ("replayed", int))
DeletedAnswer = _answer("DeletedAnswer", ("deleted", int))
ConfirmationAnswer = _answer("ConfirmationAnswer", ("confirm", str), ("expires_ms", int))


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


KeysAnswer = _page("KeysAnswer", "keys", KeyInfo)


class StatusAnswer(CallAnswer, frozen=True, kw_only=True):
    version: str = ""
    node: str = ""
    uptime_ms: int = 0
    format: int = 0


HealthAnswer = _answer("HealthAnswer", ("status", str))


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
