"""Who holds a partition: one record, read and written as a whole.

The metadata store keeps one `PartitionRecord` per partition, and every change of it is a compare
and swap on that one key. From this follows what the rest of replication leans on:

- An epoch and the replica set it began with are read together, never one from before a change
  and the other from after it.
- Whoever takes an epoch writes the set it read. A change that was made to an older version loses,
  so the set is frozen for everybody but the epoch's holder.

Two quorums intersect because each is a majority of the same set. While the set changes they would
not: a majority of {a, b, c} and one of {d, e, f} share nobody. So a change passes through a joint
record in which a quorum is a majority of `voters` *and* of `joint`. It intersects the quorums of
the record before it (a majority of `voters`) and of the one after it (a majority of what was
`joint`); hence what was committed under one is seen by a takeover under the next, provided that
no record skips the joint one.

A node that stands in both sets counts in both. A learner counts in none.

The JSON form has exactly the fields below, lists where there are tuples, the uuids sorted by node;
equal records have equal bytes. A reader fills in fields that are missing and ignores unknown ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec


class PartitionRecord(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int = 0  # the last one given out; 0: none yet. Never goes back
    coordinator: str = ""  # the node that was given it; "": nobody
    voters: tuple[str, ...]  # durable acks of these count; the first is preferred as coordinator
    joint: tuple[str, ...] = ()  # the voters to be; not empty: majorities of both are needed
    learners: tuple[str, ...] = ()  # copy, and do not count
    target: tuple[str, ...] = ()  # where the replicas should go; (): they are where they should be
    uuids: dict[str, str] = {}  # node -> replica_uuid of its copy, for voters and joint members

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"an epoch is not negative: {self.epoch}")
        if not self.voters:
            raise ValueError("a partition needs at least one voter")
        for nodes in (self.voters, self.joint, self.learners, self.target):
            if len(set(nodes)) != len(nodes):  # a node counted twice would be its own majority
                raise ValueError(f"a node is named twice in {nodes}")

    @property
    def members(self) -> tuple[str, ...]:
        """All nodes that hold a copy, each once: voters first, then joint ones, then learners."""
        return tuple(dict.fromkeys(self.voters + self.joint + self.learners))

    @property
    def quorums(self) -> tuple[tuple[str, ...], ...]:
        """The sets of which each has to give a majority."""
        return (self.voters, self.joint) if self.joint else (self.voters,)

    def is_voter(self, node: str) -> bool:
        """Whether the node's durable acks count, now or in the set to come."""
        return node in self.voters or node in self.joint

    def voters_but(self, node: str) -> list[str]:
        """Whose durable acks count, now or in the set to come, each once and without this node."""
        return [other for other in dict.fromkeys(self.voters + self.joint) if other != node]

    def majority(self, acks: Collection[str]) -> bool:
        """Whether the nodes that agreed are a quorum; it counts no node that is not asked for."""
        for nodes in self.quorums:
            if len([node for node in nodes if node in acks]) < majority_of(len(nodes)):
                return False
        return True

    def disowned(self, node: str, *, uuid: str, epoch: int) -> PartitionRecord | None:
        """The record once a node has given this disk up, because whoever coordinates in `epoch` has
        all that is committed; None if it may not.

        From then on no set of replicas is settled on because of what the disk holds, whatever was
        under way. One at a time: of two that copy, neither could help if the third is damaged too.
        """
        if self.epoch != epoch or self.coordinator == node or self.coordinator not in self.voters:
            return None
        if self.uuids.get(node) != uuid:
            return self  # it does not count as it is
        if any(other != node and other not in self.uuids for other in self.voters + self.joint):
            return None  # another is being replaced
        uuids = {other: disk for other, disk in self.uuids.items() if other != node}
        return msgspec.structs.replace(self, uuids=uuids)

    def committed(self, durable: Mapping[str, int]) -> int:
        """The highest sequence that a quorum holds, given how far each node is durable.

        A node that is missing has nothing. Of a sorted set the entry at the place of the majority
        is held by that many; the lowest of the sets is held by a majority of each.
        """
        held = [
            sorted([durable.get(node, 0) for node in nodes])[-majority_of(len(nodes))]
            for nodes in self.quorums
        ]
        return min(held)


def majority_of(count: int) -> int:
    return count // 2 + 1


encode_record: Final = msgspec.json.Encoder(order="deterministic").encode
decode_record: Final = msgspec.json.Decoder(PartitionRecord).decode
