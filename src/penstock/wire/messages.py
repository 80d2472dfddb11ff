"""Control messages: what stands in a frame's payload before (or instead of) columns.

Which message a frame carries follows from its type, its direction and, for Subscribe, the message's
own tag:

    client → server                                   server → client
    HEARTBEAT  Hello                                  HEARTBEAT  Welcome
    DELTA      PutDelta  + a delta                    ACK        Enqueued | Settled | result map
    BATCH      Enqueue   + bodies
    ACK        Settle    + tokens (ack wanted)        NACK       error map (`errors.to_wire`)
    ACK        Grant     (on an open stream)          BATCH      Delivery  + columns (lease stream)
    NACK       Return    + tokens                     BATCH      LogSlice  + batches (log stream)
    HEARTBEAT  Extend    + tokens                     BACKPRESSURE  SlowDown
    HEARTBEAT  (empty)   liveness                     HEARTBEAT  (empty) liveness
    SUBSCRIBE  OpenLease | OpenLog | OpenSubscription BATCH      Changes   + columns (subscription)
               | Call                                 UNSUBSCRIBE  error map: the stream ended
    UNSUBSCRIBE (empty)

and between the nodes of a cluster, of which the one that connects is the client:

    SUBSCRIBE  OpenFollow                             ACK        Followed
    SUBSCRIBE  Tell      (never answered)             BATCH      Append    + batches (follow stream)

Tokens in `data` are u64 little-endian columns, grouped by partition as `parts` says.

On a *supply stream* one node lets another lease messages of a topic. The node whose consumers want
messages opens it (`OpenSupply`) at each node that serves partitions of the topic. It asks in ACK
frames with the stream's number, which are not answered as requests are; what comes back are BATCH
frames of the stream:

    asks        Ask (data: nothing)       →  Heads    + keys, i64 little-endian, head by head
                LeaseAt                   →  Taken, then a Lent + body for each delivery
    is told     Ready       there is something to lease again
                LeasesHeld  how many leases its consumers have here now

Of the administrative calls, `CALLS` says what is known of each before it is made. A client reads
here what it may repeat and how long it has to wait, a node what it has to ask of the caller.

A control message over one of the constants below is refused while it is read, before anything is
made of it. `Limits` are those that an operator may change.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from penstock.errors import InvalidArgument
from penstock.model.entries import BATCH_ENTRIES_MAX, HEADERS_BYTES_MAX
from penstock.model.ids import LeaseToken
from penstock.wire.frame import CONTROL_BYTES_MAX as CONTROL_BYTES_MAX
from penstock.wire.frame import PAYLOAD_BYTES_MAX
from penstock.wire.frame import pack as pack
from penstock.wire.frame import unpack as unpack

GREETING_BYTES_MAX: Final = 64 << 10  # of the payload that a greeting is
OPENING_BYTES_MAX: Final = 1 << 20  # of the control that opens a stream or calls something
OFFERS_MAX: Final = 64  # versions, or codecs, in a greeting
# Of the messages in an answer, or in a delivery; one message may be larger by itself. Encoded as
# messages of gRPC they stay below 4 MiB, which is what a client of that takes by default.
ANSWER_BYTES_MAX: Final = 3 << 20
PAGE_BYTES_MAX: Final = 1 << 20  # of the rows in a page of any other list, or one row
SEARCH_MAX: Final = 1000  # neighbours that one search may ask a node for
PARTS_MAX: Final = 16_384  # of one request
TOLD_MAX: Final = 65_536  # messages from node to node in one frame
ROUTES_MAX: Final = 64  # of one subscription
ROUTE_BYTES_MAX: Final = 1024
CURSOR_BYTES_MAX: Final = 128
BATCH_MS_MAX: Final = 60_000  # that a frame may wait for more, or changes be gathered
TEXT_LENGTH_MAX: Final = 4096  # characters of any text; most have a smaller limit of their own

Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
Route = Annotated[str, Meta(max_length=ROUTE_BYTES_MAX)]
Cursor = Annotated[str, Meta(max_length=CURSOR_BYTES_MAX)]
Headers = Annotated[bytes, Meta(max_length=HEADERS_BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=BATCH_ENTRIES_MAX)]  # of rows that are made room for
Offers = Meta(max_length=OFFERS_MAX)
Parts = Meta(max_length=PARTS_MAX)
Routes = Meta(max_length=ROUTES_MAX)


def bounded(value: int, low: int, high: int, field: str) -> int:
    if not low <= value <= high:
        raise InvalidArgument(f"{field} must be from {low} to {high}", field=field, limit=high)
    return value


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What callers may make the node hold, and for how long."""

    frame_bytes_max: int = PAYLOAD_BYTES_MAX  # payload of one frame, HTTP body, gRPC message
    raw_bytes_max: int = PAYLOAD_BYTES_MAX  # the same after decompression
    header_bytes_max: int = 64 << 10  # HTTP headers or gRPC metadata of one request
    idle_s: float = 60.0  # silence after which a connection is closed
    connections_max: int = 4096
    address_connections_max: int = 2048  # of them, from one address
    strangers_max: int = 1024  # connections that have not shown yet that they may be here
    address_strangers_max: int = 256  # of them, from one address
    strangers_bytes_max: int = 8 << 20  # that the node holds for these
    greeting_s: float = 10.0  # for a TLS handshake, and for the greeting after it
    streams_max: int = 1000  # open at once on one connection
    held_bytes_max: int = 112 << 20  # that the node holds for all its callers
    frame_s: float = 10.0  # until a frame or an HTTP body is whole, beside the time for its bytes
    bytes_per_s_min: int = 64 << 10  # at which those are expected to come
    write_s: float = 20.0  # for which an answer may wait to be read

    @property
    def held_bytes_least(self) -> int:
        """Below this, the largest frame would not fit into one caller's part of what is held."""
        return max(self.frame_bytes_max, self.raw_bytes_max) // 4 * 7


class ControlMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A control message. Its fields are only ever appended, with a default."""


class Hello(ControlMessage, frozen=True):
    versions: Annotated[list[int], Offers]
    api_key: Text | None = None
    client: Text = ""
    codecs: Annotated[list[Text], Offers] = []  # for frames, the preferred one first
    cluster_key: Text | None = None  # of a node; who has shown it may send what only nodes send


class Welcome(ControlMessage, frozen=True):
    version: int
    server: str
    node: str
    heartbeat_ms: int  # send something at least this often, or be disconnected
    payload_bytes_max: int
    cluster: str = ""  # its name; empty: the node runs alone
    codec: str = ""  # by which either side may compress frames; empty: none


class Part(ControlMessage, frozen=True):
    """A partition's share of an enqueue: `length` bytes of ENQ body with `count` entries."""

    partition: int
    count: int
    length: int


class Enqueue(ControlMessage, frozen=True):
    topic: Text
    parts: Annotated[list[Part], Parts]
    atomic: bool = False
    expected_sequence: int | None = None  # of the partition's last message; one part only
    codec: int = 0  # how each body is compressed
    raw_lengths: Annotated[list[int], Parts] | None = None  # needed when compressed
    partitioned: bool = True  # False: one part, whose entries the node spreads by key itself
    forwarded: bool = False  # by a node that does not serve these partitions; answered by Forwarded
    transaction: bytes = b""  # forwarded parts of an atomic batch: prepare them
    home: int = 0  # the partition where it is decided
    topic_id: int = 0  # that the sender takes the topic to have; 0: whoever has the name


class PutDelta(ControlMessage, frozen=True):
    """One delta, without the columns of an enqueue; `data` is the delta. With a producer's name it
    is written once, however often it is sent."""

    topic: Text
    producer: Text = ""
    epoch: int = 0
    sequence: int = 0
    headers: Headers = b""  # a msgpack map, or nothing


class Duplicate(ControlMessage, frozen=True):
    """Entry `index` of the request was written before, as this message."""

    index: int
    partition: int
    sequence: int
    time_ms: int


class Placed(ControlMessage, frozen=True):
    """Where a stretch of a request's entries went: entry `index + i` is `sequence + i`."""

    index: int
    count: int
    partition: int
    sequence: int
    time_ms: int


class Enqueued(ControlMessage, frozen=True):
    """`index` counts entries over all parts in the order of the request."""

    topic: int
    placed: list[Placed]
    duplicates: list[Duplicate] = []


class TokenPart(ControlMessage, frozen=True):
    """Tokens of one partition and epoch, of the topic that had this id when it gave them out."""

    partition: int
    epoch: int
    count: int
    topic: int = 0  # refused: without an id, a successor of the same name might be meant


class Settle(ControlMessage, frozen=True):
    topic: Text
    parts: Annotated[list[TokenPart], Parts]
    forwarded: bool = False


class Return(ControlMessage, frozen=True):
    """Give leases back: for a retry (delay_ms None: the topic's backoff), to the dead letters
    (`reject`), or unused (`counted` False: no attempt is counted)."""

    topic: Text
    parts: Annotated[list[TokenPart], Parts]
    delay_ms: int | None = None
    reject: bool = False
    counted: bool = True
    reason: Text = ""
    forwarded: bool = False


class Extend(ControlMessage, frozen=True):
    topic: Text
    parts: Annotated[list[TokenPart], Parts]
    extend_ms: int  # from now
    forwarded: bool = False


class Settled(ControlMessage, frozen=True):
    """`lost` are positions in the request's tokens whose lease was no longer held."""

    lost: list[int] = []


class Outcome(ControlMessage, frozen=True):
    """What became of one part of a forwarded request. Indices count the part's own entries."""

    placed: list[Placed] = []
    duplicates: list[Duplicate] = []
    lost: list[int] = []
    error: dict[str, Any] | None = None


class Forwarded(ControlMessage, frozen=True):
    """The answer to a forwarded request: an outcome for each part, in order."""

    outcomes: list[Outcome]


class OpenLease(ControlMessage, frozen=True, tag="lease"):
    topic: Text
    credits: int  # messages that may be out on this stream at once; an ack returns its credit
    consumer: Text = ""
    visibility_ms: int | None = None
    batch_max: int = 100  # messages in one delivery


class OpenLog(ControlMessage, frozen=True, tag="log"):
    topic: Text
    partition: int
    from_sequence: int = 1  # 0: only what commits from now on
    credit_entries: int = 1000
    credit_bytes: int = 8 << 20
    through: int = 0  # the stream ends with the batch that covers it; 0: it follows the log
    topic_id: int = 0  # of the topic that `from_sequence` is a place in; 0: whichever has the name


class OpenSubscription(ControlMessage, frozen=True, tag="subscribe"):
    """The released deltas of one partition: those that the node holds back for a cause come when
    the cause has come. `position` counts in log sequences: a delta stands where the entry stands
    whose arrival released it.

    Answered by a map: `position` (what comes is after it), `ordinal` (how many deltas are released
    up to there), `epoch`, `sequence_committed`, `topic` (its id). Credit counts deltas, and bytes
    of bodies."""

    topic: Text
    partition: int
    routes: Annotated[list[Route], Routes] = []  # as sinks name them; none: everything
    start: Text = "now"  # or "sequence", "time" (both say where in `at`), "cursor"
    at: int = 0  # the first position that is wanted, or a time in ms
    cursor: Cursor = ""  # durable name; where it stands is where `start` "cursor" begins
    credit_entries: int = 10_000
    credit_bytes: int = 8 << 20
    batch_max: int = 1000  # deltas in one frame
    batch_ms: int = 0  # how long a frame may wait for more of them
    coalesce_ms: int = 0  # of one vector's changes within this time, one that has them all
    forwarded: bool = False  # by a node that does not serve the partition
    topic_id: int = 0  # of the topic that `at` is a place in; 0: whichever has the name


class OpenFollow(ControlMessage, frozen=True, tag="follow"):
    """A replica asks another for its log. `follow` is packed as replicas speak to each other, as
    is what comes back; the stream's frames carry the number of this one."""

    topic: int
    partition: int
    follow: bytes


class Told(ControlMessage, frozen=True):
    """What one replica of a partition says to another: `kind` names the message in `message`."""

    topic: int
    partition: int
    kind: str
    message: bytes


class Tell(ControlMessage, frozen=True, tag="tell"):
    """All that one node has to say to another in one turn. It is not answered, and may get lost."""

    told: Annotated[list[Told], Meta(max_length=TOLD_MAX)]


class Call(ControlMessage, frozen=True, tag="call"):
    """One administrative call; answered by one Ack with a result map, or a Nack."""

    method: Text
    arguments: dict[str, Any]


class Grant(ControlMessage, frozen=True):
    """More credit for a stream: messages of a lease stream, entries and bytes of a log stream or
    of a subscription, whose cursor moves to `position`: all up to there is handled."""

    entries: int
    bytes: int = 0
    position: int = 0  # 0: the cursor stays


class Delivery(ControlMessage, frozen=True):
    """Leased messages; `data` is a body in DELIVERY layout. Token *i* is `token_first + i`."""

    partition: int
    epoch: int
    token_first: int
    count: Count
    deadline_ms: int  # wall clock of the node, for display; the lease itself runs on its own clock
    visibility_ms: int
    topic: int = 0  # the id of the topic, which is a part of every token

    def token(self, row: int) -> LeaseToken:
        return LeaseToken(self.topic, self.partition, self.epoch, self.token_first + row)


class LogSlice(ControlMessage, frozen=True):
    """Committed batches, verbatim and padded to 8 bytes each, `[first, last]` without a gap."""

    partition: int
    first: int
    last: int
    sequence_committed: int


class Changes(ControlMessage, frozen=True):
    """Released deltas; `data` is a body in CHANGES layout, nothing if `count` is 0."""

    partition: int
    count: Count
    position: int  # all that the subscription wants up to here is now sent
    sequence_committed: int
    folded: int = 0  # deltas that were merged into those of this frame


class SlowDown(ControlMessage, frozen=True):
    """Put nothing into the topic for a while; what was sent is dealt with as ever."""

    retry_after_ms: int
    reason: str = ""
    topic: str = ""  # empty: any


class OpenSupply(ControlMessage, frozen=True, tag="supply"):
    topic: str
    consumers: bytes  # what the names of all consumers of the asking node begin with
    topic_id: int = 0  # that the asking node takes the topic to have; 0: whoever has the name


class Ask(ControlMessage, frozen=True, tag="ask"):
    """What are your best messages? At most `count` of each partition."""

    round: int
    count: int


class Order(ControlMessage, frozen=True):
    """What one consumer is to get: of each partition the best `counts[i]`, no worse than
    `bounds[i]`; `lasts[i]` is how far its log went when it was asked."""

    consumer: bytes
    visibility_ms: int
    batch_max: int
    partitions: list[int]
    counts: list[int]
    bounds: list[int]
    lasts: list[int]


class LeaseAt(ControlMessage, frozen=True, tag="lease_at"):
    round: int
    orders: list[Order]
    worst: int | None = None  # the worst key of the round, when its rank is to be measured


class SupplyHead(ControlMessage, frozen=True):
    """The keys of a partition's best `count` messages; `more`: it has others, none better."""

    partition: int
    count: int
    more: bool
    last: int  # sequence of its log


class Heads(ControlMessage, frozen=True, tag="heads"):
    round: int
    leased: int  # messages of the topic that are leased here
    heads: list[SupplyHead]


class Taken(ControlMessage, frozen=True, tag="taken"):
    """A LeaseAt was carried out, not yet committed. `held`: leases of each order's consumer."""

    round: int
    leased: int
    held: list[int]
    more: bool  # something is left to lease
    better: int | None = None  # messages left that are better than `worst`


class Lent(ControlMessage, frozen=True, tag="lent"):
    """A delivery, to be passed on as it is."""

    consumer: bytes
    delivery: Delivery


class Ready(ControlMessage, frozen=True, tag="ready"):
    """There was nothing left to lease, and now there is."""


class LeasesHeld(ControlMessage, frozen=True, tag="held"):
    """How many leases these consumers have, as the serving node counts them."""

    consumers: list[bytes]
    counts: list[int]


Asked = Ask | LeaseAt
Supplied = Heads | Taken | Lent | Ready | LeasesHeld


class CallTraits(NamedTuple):
    """What is known of a call; by default nothing that would make it special."""

    repeatable: bool = False  # it may be made twice without harm when the first answer was lost
    # Its work grows with what there is, or it returns when other nodes have done theirs. Only the
    # node knows how long that may be, so its answer is waited for as long as it takes.
    lengthy: bool = False
    large: bool = False  # it is answered with messages or vectors, which may be large
    confirmed: bool = False  # it needs a confirmation token, which the call `confirm` gives
    audited: bool = False  # it leaves a line in the audit log
    between_nodes: bool = False  # only another node of the cluster may make it


_QUESTION: Final = CallTraits(repeatable=True)
_LARGE_QUESTION: Final = CallTraits(repeatable=True, large=True)
_CHANGE: Final = CallTraits(audited=True)
_LENGTHY_CHANGE: Final = CallTraits(lengthy=True, audited=True)
_DESTRUCTION: Final = CallTraits(lengthy=True, confirmed=True, audited=True)
_BETWEEN_NODES: Final = CallTraits(between_nodes=True)

CALLS: Final[dict[str, CallTraits]] = {
    "cluster_drain": _LENGTHY_CHANGE,
    "cluster_moves": CallTraits(),
    "cluster_rebalance": _LENGTHY_CHANGE,
    "cluster_remove_replica": _LENGTHY_CHANGE,
    "cluster_status": _QUESTION,
    "confirm": _QUESTION,
    "cursor_delete": _CHANGE,
    "cursor_list": _QUESTION,
    "dlq_delete": _DESTRUCTION,
    "dlq_list": _LARGE_QUESTION,
    "dlq_replay": _LENGTHY_CHANGE,
    "key_create": _CHANGE,
    "key_list": _QUESTION,
    "key_revoke": CallTraits(confirmed=True, audited=True),
    "live_status": _QUESTION,
    "log_extent": _QUESTION,
    "log_find": _QUESTION,
    "log_status": _QUESTION,
    "move_to_dlq": _CHANGE,
    "node_status": _QUESTION,
    "peek": _LARGE_QUESTION,
    "pop": CallTraits(),
    "producer_begin": _QUESTION,
    "purge": _DESTRUCTION,
    "replica_clock": _BETWEEN_NODES,
    "replica_drain": _BETWEEN_NODES,
    "replica_resign": _BETWEEN_NODES,
    "replica_room": _BETWEEN_NODES,
    "replica_seed": _BETWEEN_NODES,
    "replica_seed_chunk": _BETWEEN_NODES,
    "replica_seed_slice": _BETWEEN_NODES,
    "replica_status": _BETWEEN_NODES,
    "replica_topic": _BETWEEN_NODES,
    "routes": _QUESTION,
    "share": _BETWEEN_NODES,
    "snapshot": _LENGTHY_CHANGE,
    "stats": _QUESTION,
    "topic_create": _LENGTHY_CHANGE,
    "topic_delete": _DESTRUCTION,
    "topic_get": _QUESTION,
    "topic_list": _QUESTION,
    "topic_update": CallTraits(repeatable=True, lengthy=True, audited=True),
    "transaction_apply": _BETWEEN_NODES,
    "transaction_decide": _BETWEEN_NODES,
    "transaction_doubts": _BETWEEN_NODES,
    "transaction_outcome": _BETWEEN_NODES,
    "vector_search": _LARGE_QUESTION,
    "verify": CallTraits(repeatable=True, lengthy=True, audited=True),
}
_UNKNOWN: Final = CallTraits()  # a node refuses what it does not know


def traits_of(method: str) -> CallTraits:
    return CALLS.get(method, _UNKNOWN)


def is_repeatable(method: str, arguments: dict[str, Any]) -> bool:
    """Whether this very call may be made twice. Creating a topic that must be new may not: the
    second answer would be that it exists, which is the one that was just made."""
    if method == "topic_create":
        return bool(arguments.get("exists_ok"))
    return traits_of(method).repeatable
