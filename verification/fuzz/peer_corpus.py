"""Valid frames that only nodes of a cluster send each other, as about topics that are there."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.model.batch import SCHEMAS, Codec, Kind
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Ack, Fence, Fenced, Follow, Probe, Probed
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Ask,
    Call,
    Enqueue,
    Grant,
    LeaseAt,
    OpenFollow,
    OpenLog,
    OpenSubscription,
    OpenSupply,
    Order,
    Part,
    Tell,
    Told,
)
from verification.fuzz import corpus
from verification.fuzz.corpus import DELTAS, QUEUE, WANTED, Sent

NODES: Final = ("n1", "n2", "n3", "n9")
SHARES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("peek_share", {"limit": 3}), ("log_status_share", {}), ("log_find_share", {"time_ms": 9}),
    ("log_extent_share", {"extents": [{"partition": 0, "from_sequence": 1, "through": 9, "place": 0,
                                       "entries_max": 5, "bytes_max": 99}]}),
    ("purge_share", {}), ("move_share", {"message_id": "x", "reason": "why"}),
    ("dlq_list_share", {"start": 0, "after": 0, "limit": 5}),
    ("dlq_check_share", {"message_ids": ["x"]}), ("dlq_delete_share", {"message_ids": None}),
    ("dlq_replay_share", {"message_ids": None, "limit": 4}), ("stats_share", {}),
    ("snapshot_share", {}), ("verify_share", {}), ("live_status_share", {}),
    ("vector_search_share", {"vector": [1.0] * corpus.DIMENSIONS, "limit": 3, "namespace": None,
                             "sink": None}),
)  # fmt: skip


class PeerCorpus:
    """Frames about replicas as the records say that they are; what else clients send as well."""

    def __init__(self, records: Mapping[tuple[int, int], PartitionRecord]) -> None:
        self._records = dict(records)
        self.kinds = (
            self._tell, self._follow, self._share, self._call, self._forwarded, self._transaction,
            self._open, self._on_stream,
        )  # fmt: skip

    def valid(self, dice: random.Random, number: int, codec: Codec) -> Sent:
        if dice.random() < 0.2:
            return corpus.valid(dice, number, codec)
        made = dice.choice(self.kinds)(dice, number)
        return made._replace(codec=codec) if codec and dice.randrange(2) else made

    def _place(self, dice: random.Random) -> tuple[int, int, int, str, str]:
        """Topic id, partition, an epoch, a node, and the id of its replica."""
        topic, partition = dice.choice(list(self._records))
        record = self._records[topic, partition]
        node = dice.choice(NODES)
        uuid = record.uuids.get(node, "u9") if dice.random() < 0.9 else "other"
        return topic, partition, max(0, record.epoch + dice.choice((-1, 0, 0, 0, 1))), node, uuid

    def _follow(self, dice: random.Random, number: int) -> Sent:
        topic, partition, epoch, node, uuid = self._place(dice)
        tail = dice.choice(([], [(epoch, 1)], [(1, 2), (epoch, 5)]))
        follow = Follow(
            node, uuid, epoch, dice.randrange(5), dice.randrange(4), tail, dice.choice((1, 1000)),
            1 << dice.choice((0, 20)), dice.random() < 0.2,
        )  # fmt: skip
        control = OpenFollow(topic, partition, msgspec.msgpack.encode(follow))
        return Sent(FrameType.SUBSCRIBE, WANTED, number, control)

    def _tell(self, dice: random.Random, number: int) -> Sent:
        told = []
        for _ in range(dice.choice((1, 1, 5))):
            topic, partition, epoch, node, uuid = self._place(dice)
            stream, end = dice.randrange(5), dice.randrange(30)
            kind, message = dice.choice(
                (
                    ("fence", Fence(node, epoch)),
                    ("fenced", Fenced(node, uuid, epoch, epoch, end, end)),
                    ("probe", Probe(node, epoch)),
                    ("probed", Probed(node, epoch, bool(dice.randrange(2)))),
                    ("ack", Ack(node, uuid, epoch, stream, end, end * 100, end, epoch)),
                )
            )
            packed = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
            if dice.random() < 0.3:  # well formed on the outside
                packed[dice.randrange(len(packed))] = dice.choice(
                    (0, -1, 2**63, 2**64 - 1, "", None)
                )
            told.append(Told(topic, partition, kind, msgspec.msgpack.encode(packed)))
        return Sent(FrameType.SUBSCRIBE, 0, number, Tell(told))

    def _share(self, dice: random.Random, number: int) -> Sent:
        of, arguments = dice.choice(SHARES)
        share = {
            "topic": dice.choice((QUEUE, DELTAS)), "of": of, "arguments": arguments,
            "partitions": dice.choice(([0], [1], [0, 1], [])),
        }  # fmt: skip
        return Sent(FrameType.SUBSCRIBE, WANTED, number, Call("share", share))

    def _call(self, dice: random.Random, number: int) -> Sent:
        topic, partition, _, node, _ = self._place(dice)
        where = {"topic": topic, "partition": partition}
        method, arguments = dice.choice(
            (
                ("replica_topic", {"topic": topic, "name": dice.choice((QUEUE, DELTAS))}),
                ("replica_status", {}),
                ("replica_drain", {"draining": False}),
                ("replica_clock", {}),
                ("replica_resign", {**where, "node": node}),
                ("replica_seed", where),
                ("replica_seed_slice", {**where, "from_sequence": 1, "through": 9}),
                ("replica_seed_chunk", {"piece": 1, "offset": 0}),
                ("cluster_status", {}),
                ("routes", {"topic": QUEUE}),
                ("cluster_rebalance", {"dry_run": True}),
                ("cluster_moves", {}),
            )
        )
        return Sent(FrameType.SUBSCRIBE, WANTED, number, Call(method, arguments))

    def _forwarded(self, dice: random.Random, number: int) -> Sent:
        body = SCHEMAS[Kind.ENQ].encode(2, {"payload": [b"x", b"y"]})
        part = Part(dice.randrange(2), 2, len(body))
        transaction = dice.choice((b"", b"", b"t" * 16, dice.randbytes(16)))
        control = Enqueue(
            QUEUE, [part], forwarded=True, transaction=transaction, home=dice.randrange(2)
        )
        return Sent(FrameType.BATCH, WANTED, number, control, body)

    def _transaction(self, dice: random.Random, number: int) -> Sent:
        asked: dict[str, Any] = {
            "topic": QUEUE, "partition": dice.randrange(2),
            "transaction": dice.choice((b"t" * 16, b"", dice.randbytes(16))),
        }  # fmt: skip
        method = dice.choice(
            ("transaction_decide", "transaction_outcome", "transaction_apply", "transaction_doubts")
        )
        if method == "transaction_doubts":
            asked["home"] = dice.randrange(3)
        elif method != "transaction_outcome":
            asked["commit"] = bool(dice.randrange(2))
        if method == "transaction_decide":
            asked["places"] = [(dice.randrange(3), dice.randrange(1 << 8))] * dice.randrange(3)
        return Sent(FrameType.SUBSCRIBE, WANTED, number, Call(method, asked))

    def _open(self, dice: random.Random, number: int) -> Sent:
        control = dice.choice(
            (
                OpenSupply(QUEUE, b"n9/"),
                OpenSubscription(DELTAS, 0, [], "sequence", 1, forwarded=True),
                OpenSubscription(DELTAS, 0),
                OpenLog(QUEUE, dice.randrange(2), 1),
            )
        )
        return Sent(FrameType.SUBSCRIBE, WANTED, number, control)

    def _on_stream(self, dice: random.Random, number: int) -> Sent:
        """Something for a stream that an earlier frame may have opened."""
        orders = [
            Order(
                b"n9/%d" % dice.randrange(3), 1000, 10, [dice.randrange(3)], [dice.randrange(1, 9)],
                [dice.choice((99, 2**62, -5))], [dice.randrange(30)],
            )
            for _ in range(dice.choice((1, 3)))
        ]  # fmt: skip
        control = dice.choice(
            (
                Grant(dice.randrange(5), dice.randrange(999), dice.randrange(9)),
                Ask(1, dice.choice((1, 10_000))),
                LeaseAt(1, orders, dice.choice((None, 5))),
            )
        )
        return Sent(FrameType.ACK, 0, dice.randrange(1, number + 1), control)
