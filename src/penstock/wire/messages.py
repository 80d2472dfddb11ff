"""Control messages: what stands in a frame's payload before (or instead of) columns.

Which message a frame carries follows from its type, its
direction and, for Subscribe, the message's own tag:

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
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.model.ids import LeaseToken
from penstock.wire.frame import pack as pack
from penstock.wire.frame import unpack as unpack
from penstock.wire.limits import (
    ROUTES_MAX,
    TOLD_MAX,
    Count,
    Cursor,
    Headers,
    Offers,
    Parts,
    Route,
    Text,
)


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
    """Acknowledge leases."""

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
    routes: Annotated[
        list[Route], Meta(max_length=ROUTES_MAX)
    ] = []  # as sinks name them; none: everything
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
        """The lease token of the message in a row."""
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
