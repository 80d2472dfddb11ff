"""Every call's arguments, with their limits, as both listeners decode them.

A field is declared once here: decoding refuses what does not fit and names the field, the OpenAPI
document is made from these types under their names without `Call`, and the gRPC messages have
fields of the same names.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.errors import InvalidArgument
from penstock.model.delta import NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    RETRIES_MAX,
)
from penstock.model.topic import BOUNDS, CONSUMER_BYTES_MAX, FIXED, HOUR_MS, TopicConfig
from penstock.wire.limits import BATCH_MS_MAX, CURSOR_BYTES_MAX, ROUTE_BYTES_MAX, ROUTES_MAX

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
    str,
    Meta(max_length=KEY_BYTES_MAX, description="Messages of one key share a partition."),
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


def _heap_call(name: str, attributes: list[str], *others: tuple[Any, ...]) -> Any:
    """Arguments that name a topic, attributes of it that may be left out, and others."""
    fields = [("topic", Topic), *((a, _attribute(a), UNSET) for a in attributes), *others]
    return msgspec.defstruct(
        name, fields, bases=(CallArguments,), frozen=True, kw_only=True, forbid_unknown_fields=True
    )


MakeHeapCall = _heap_call("MakeHeapCall", ATTRIBUTES, ("exists_ok", bool, False))
UpdateHeapConfigCall = _heap_call(
    "UpdateHeapConfigCall", [name for name in ATTRIBUTES if name not in FIXED]
)


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


class PurgeCall(Destructive, frozen=True, kw_only=True):
    topic: Topic


class ListingCall(CallArguments, frozen=True, kw_only=True):
    """A page of a list."""

    after: Cursor | None = None


class StatsCall(ListingCall, frozen=True, kw_only=True):
    topic: Topic | None = None


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


class PeekCall(OfTopic, frozen=True, kw_only=True):
    limit: Limit = 10


class MoveToDLQCall(OfTopic, frozen=True, kw_only=True):
    message_id: MessageIdText
    reason: Reason = ""


class DlqListCall(OfTopic, frozen=True, kw_only=True):
    after: Cursor | None = None
    limit: Limit = 100


MessageIds = Annotated[list[MessageIdText], Meta(min_length=1, max_length=BATCH_ENTRIES_MAX)]


class DlqReplayCall(OfTopic, frozen=True, kw_only=True):
    message_ids: Annotated[MessageIds, Meta(description="Left out: all.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class DlqDeleteCall(Destructive, frozen=True, kw_only=True):
    topic: Topic
    message_ids: Annotated[MessageIds, Meta(description="Left out: all.")] | None = None


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


class CreateKeyCall(CallArguments, frozen=True, kw_only=True):
    name: KeyName


class RevokeKeyCall(Destructive, frozen=True, kw_only=True):
    id: KeyId


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
    """The argument whose text is not UTF-8."""
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
