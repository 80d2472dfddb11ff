"""Control messages of a supply stream: one node lets another lease messages of a topic.

The node whose consumers want messages opens the stream (`OpenSupply`) at each node that serves
partitions of the topic. It asks in ACK frames with the stream's number, which are not answered as
requests are; what comes back are BATCH frames of the stream:

    asks        Ask (data: nothing)       →  Heads    + keys, i64 little-endian, head by head
                LeaseAt                   →  Taken, then a Lent + body for each delivery
    is told     Ready       there is something to lease again
                LeasesHeld  how many leases its consumers have here now
"""

from __future__ import annotations

from penstock.wire.messages import ControlMessage, Delivery


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
Told = Heads | Taken | Lent | Ready | LeasesHeld
