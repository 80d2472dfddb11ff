"""Changing topics and replica sets of a cluster, from any of its nodes.

Everything here is a change in the metadata store that the nodes concerned hear of, followed by a
bounded wait until they have acted on it. If this node ends in between, nothing is half done: a
topic without records gets them from the oldest node, which carries plans of moves out, too.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.cluster.placement import (
    MOVES_MAX,
    Candidate,
    Move,
    Policy,
    place,
    plan_drain,
    plan_rebalance,
)
from penstock.cluster.store import until_won
from penstock.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.model.topic import TopicConfig, TopicKind, topic_config
from penstock.node.cluster.cluster import Cluster
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.node.storage.room import Fitting
from penstock.replication.assignment import PartitionRecord
from penstock.replication.follower import FollowerState
from penstock.replication.replica import LogHealth, Role

REPLICAS: Final = 3  # of a topic that does not say, if there are as many nodes
CALL_S_MAX: Final = 2.0
POLL_S: Final = 0.05
KNOWN_S_MAX: Final = 5.0  # until every node knows of a change
REPAIR_S: Final = 5.0  # between looks for topics without records
LOOK_S: Final = 1.0  # between looks for partitions to take back
RETURNS_MAX: Final = 4  # that are asked for in one look
AGAIN_S: Final = 10.0  # before a partition is asked for once more
IDLE_S: Final = 1.0  # between looks whether there is a plan
BUSY_S: Final = 0.25  # … while there is one
MOVE_S_MAX: Final = 3600.0  # for one partition; then its place is given to the next
log = get_logger(__name__)


class ClusterAdministration:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @property
    def replica_sets(self) -> ClusterAdministration:
        return self

    # --- topics ---

    async def create_topic(self, fields: Mapping[str, Any], *, exists_ok: bool) -> TopicConfig:
        cluster = self.cluster
        wanted = topic_config({**fields, "id": 0})
        try:
            await cluster.catalog.get(wanted.name)
        except NotFound:
            usable = sum(not node.draining for node in cluster.candidates())
            fields = {"replication_factor": REPLICAS if usable >= REPLICAS else 1, **fields}
            wanted = topic_config({**fields, "id": 0})
            replicas = wanted.replication_factor
            if replicas > usable:
                raise FailedPrecondition(
                    f"replication_factor {replicas} needs as many nodes, {usable} are there",
                    field="replication_factor",
                    limit=usable,
                ) from None
            nodes = await self._with_room(wanted.partitions, replicas)
        else:
            nodes = cluster.candidates()
        config = await cluster.catalog.create(fields, exists_ok=exists_ok)
        await self.ensure_records(config, nodes)
        await self._until(
            lambda told: _serves(told, config), config, within_s=cluster.options.serve_s
        )
        return config

    async def update_topic(self, name: str, changes: dict[str, Any]) -> TopicConfig:
        catalog = self.cluster.catalog
        changes = dict(changes)
        partitions = changes.pop("partitions", None)
        nodes = self.cluster.candidates()
        if partitions is not None:
            nodes = await self._grow(name, partitions)
        config = await catalog.update(name, changes) if changes else await catalog.get(name)
        if partitions is not None:
            await self.ensure_records(config, nodes)
        await self._until(
            lambda told: _serves(told, config) if partitions else _knows(told, config),
            config,
            within_s=self.cluster.options.serve_s if partitions else KNOWN_S_MAX,
        )
        return config

    async def delete_topic(self, name: str) -> None:
        config = await self.cluster.catalog.delete(name)
        await self._until(
            lambda told: not any(each["known"] for each in told), config, within_s=KNOWN_S_MAX
        )

    async def _with_room(self, partitions: int, replicas: int) -> list[Candidate]:
        """The nodes that so many new partitions may be placed on: a full one is given nothing.
        Raises what one of them lacks if they do not fit. Who does not answer is taken to have
        room: it is told of its replicas when it is back."""
        told = await self.cluster.ask_all("replica_room", within_s=CALL_S_MAX)
        rooms = {
            node: Fitting(**{name: answer[name] for name in Fitting._fields})
            for node, answer in told.items()
        }
        await self.cluster.catalog.skip_ids(
            max((answer.get("topic_id_highest", 0) for answer in told.values()), default=0)
        )
        full = [node for node, room in rooms.items() if room.refusal(1, of=node) is not None]
        nodes = self.cluster.candidates()
        usable = [node for node in nodes if not node.draining and node.id not in full]
        if len(usable) >= replicas:
            nodes = [node._replace(draining=node.draining or node.id in full) for node in nodes]
        records = await self.cluster.records.list()
        placed = place(
            partitions, replicas=replicas, nodes=nodes, existing=records.values(),
            policy=self.cluster.policy,
        )  # fmt: skip
        for node, count in Counter(node for voters in placed for node in voters).items():
            refusal = rooms[node].refusal(count, of=node) if node in rooms else None
            if refusal is not None:
                raise refusal
        return nodes

    async def ensure_records(
        self, config: TopicConfig, nodes: Iterable[Candidate] | None = None
    ) -> None:
        """Place the partitions that have no record yet. Each of their replicas is named by an id
        that it takes when its disk is found to be empty: nothing was ever written to it."""
        records = await self.cluster.records.list()
        missing = [p for p in range(config.partitions) if (config.id, p) not in records]
        if not missing:
            return
        voters = place(
            len(missing), replicas=config.replication_factor, existing=records.values(),
            nodes=self.cluster.candidates() if nodes is None else nodes,
            policy=self.cluster.policy,
        )  # fmt: skip
        await self.cluster.records.ensure(
            {
                (config.id, partition): PartitionRecord(
                    voters=nodes, uuids={node: str(uuid.uuid4()) for node in nodes}
                )
                for partition, nodes in zip(missing, voters, strict=True)
            }
        )

    async def _grow(self, name: str, partitions: Any) -> list[Candidate]:
        """Record more partitions; returns the nodes that they may be placed on."""
        held = await self.cluster.catalog.get(name)
        if held.kind is TopicKind.DELTA:
            raise InvalidArgument("a delta topic's partitions are fixed", field="partitions")
        if type(partitions) is not int or partitions < held.partitions:
            raise InvalidArgument(
                f"partitions can only grow from {held.partitions}", field="partitions"
            )
        nodes = await self._with_room(partitions - held.partitions, held.replication_factor)
        await self.cluster.catalog.grow(name, partitions)
        return nodes

    async def _until(
        self,
        done: Callable[[Sequence[dict[str, Any]]], bool],
        config: TopicConfig,
        *,
        within_s: float,
    ) -> None:
        """Ask every node that is connected until what they say will do."""
        deadline = time.monotonic() + within_s
        while True:
            told = await self.cluster.ask_all(
                "replica_topic", topic=config.id, name=config.name, within_s=CALL_S_MAX
            )
            if done(list(told.values())):
                return
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"topic {config.name} is changed, but not all nodes have acted on it yet",
                    topic=config.name,
                )
            await asyncio.sleep(POLL_S)

    # --- replica sets ---

    async def rebalance(self, *, dry_run: bool) -> dict[str, Any]:
        records = await self.cluster.records.list()
        moves = plan_rebalance(records, self.cluster.candidates(), policy=self.cluster.policy)
        return await self._begin(moves, records, dry_run=dry_run)

    async def drain(self, node: str, *, dry_run: bool) -> dict[str, Any]:
        records = await self.cluster.records.list()
        known = self.cluster.alive.keys() | {n for r in records.values() for n in r.members}
        if node not in known:
            raise NotFound(f"no node {node}", node=node)
        moves = plan_drain(node, records, self.cluster.candidates(), policy=self.cluster.policy)
        if not dry_run and node in self.cluster.alive:
            await self.cluster.ask(node, "replica_drain", draining=True)
        return await self._begin(moves, records, dry_run=dry_run)

    async def remove_replica(self, key: Key, node: str) -> list[str]:
        """Take a replica out of its partition's set without a replacement."""
        records = self.cluster.records

        async def swap() -> list[str]:
            held, revision = await records.get(key)
            if node not in held.members:
                raise NotFound(f"{node} holds no replica of this partition", node=node)
            wanted = tuple(n for n in held.target or held.joint or held.voters if n != node)
            if not wanted:
                raise FailedPrecondition("the last replica cannot be removed", node=node)
            learners = tuple(n for n in held.learners if n != node)
            target = () if wanted == held.voters and not held.joint else wanted
            changed = msgspec.structs.replace(held, learners=learners, target=target)
            await records.change(key, changed, revision)
            return list(wanted)

        return await until_won(swap)

    async def waiting(self) -> list[dict[str, Any]]:
        return [
            {"topic": self._name(move), "partition": move.partition, "to": list(move.target)}
            for move in await self.cluster.plans.waiting()
        ]

    async def _begin(
        self, moves: list[Move], records: Mapping[Key, PartitionRecord], *, dry_run: bool
    ) -> dict[str, Any]:
        """A later plan takes the place of an earlier one; what has begun goes on."""
        planned = moves[:MOVES_MAX]
        if not dry_run:  # also without moves: what waits may lead to where it should not any more
            await self.cluster.plans.replace(planned)
        told = [
            {
                "topic": self._name(move),
                "partition": move.partition,
                "from": list(records[move.topic, move.partition].voters),
                "to": list(move.target),
            }
            for move in planned
        ]
        return {"moves": told, "left": len(moves) - len(planned)}

    def _name(self, move: Move) -> str:
        topics = self.cluster.control.topics
        return topics[move.topic].name if move.topic in topics else str(move.topic)

    # --- looking after ---

    async def run(self) -> None:
        """A pause, and one look: the oldest node completes what another has left half done."""
        await asyncio.sleep(REPAIR_S)
        if self.cluster.is_oldest:
            await self._complete()

    async def _complete(self) -> None:
        """Records of topics that lack some, and no records of topics that are gone."""
        control = self.cluster.control
        for config in list(control.topics.values()):
            if any((config.id, p) not in control.records for p in range(config.partitions)):
                await self.ensure_records(config)
        orphans = {key[0] for key in control.records} - control.topics.keys()
        if orphans:
            existing = {config.id for config in await self.cluster.catalog.list()}
            for topic in orphans - existing:
                await self.cluster.records.forget(topic)


def _knows(told: Sequence[dict[str, Any]], config: TopicConfig) -> bool:
    wanted = msgspec.to_builtins(config)
    return all(each["known"] and each["config"] == wanted for each in told)


def _serves(told: Sequence[dict[str, Any]], config: TopicConfig) -> bool:
    served = {index for each in told for index in each["serving"]}
    return _knows(told, config) and len(served) == config.partitions


class Mover:
    """Carries a plan of moves out: some at a time, by the oldest node.

    Everything that has to survive a node is in the metadata store: what waits in the plan, what has
    begun in the records. So each look starts from there, and it does not matter which node took the
    last one; two that take the same say the same.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._since: dict[Key, float] = {}  # when a partition was first seen on the move

    async def run(self) -> None:
        more = self._cluster.is_oldest and await self.look(time.monotonic())
        await asyncio.sleep(BUSY_S if more else IDLE_S)

    async def look(self, now: float) -> bool:
        """Begin as many moves as there are places for; whether there is a plan."""
        moves = await self._cluster.plans.waiting()
        if not moves:
            self._since.clear()
            return False
        records = await self._cluster.records.list()
        moving = [key for key, record in records.items() if on_the_move(record)]
        for move in moves[: self._places(moving, now)]:
            await self._begin(move)
        return True

    def _places(self, moving: Iterable[Key], now: float) -> int:
        self._since = {key: self._since.get(key, now) for key in moving}
        held = sum(now - since < MOVE_S_MAX for since in self._since.values())
        return max(0, self._cluster.options.moves_max - held)

    async def _begin(self, move: Move) -> None:
        place = {"topic": move.topic, "partition": move.partition}
        try:
            await self._cluster.records.set_target((move.topic, move.partition), move.target)
            log.info("a move begins", **place, target=move.target)
        except NotFound:
            log.info("not moved: the partition is gone", **place)
        await self._cluster.plans.begun(move)


def on_the_move(record: PartitionRecord) -> bool:
    return bool(record.joint) or record.target not in ((), record.voters)


class Returner:
    """Brings partitions back to their preferred coordinator.

    After a node was away, others coordinate its partitions. Once it follows again and has all of a
    partition of which it is the first replica, it asks the coordinator to resign in its favour; a
    few partitions per second, so that producers hardly notice.
    """

    def __init__(self, cluster: Cluster, hosts: Mapping[Key, Host]) -> None:
        self._cluster, self._hosts = cluster, hosts
        self._asked: dict[Key, float] = {}

    async def run(self) -> None:
        await asyncio.sleep(LOOK_S)
        itself = self._cluster.alive.get(self._cluster.node)
        if self._cluster.policy is not Policy.BALANCED or self._cluster.leaving:
            return
        if itself is None or itself.draining or self._cluster.clocks.barred:
            return
        wanted = [key for key, host in self._hosts.items() if self._wanted(key, host)]
        for key in wanted[:RETURNS_MAX]:
            await self._ask(key)

    def _wanted(self, key: Key, host: Host) -> bool:
        held = self._cluster.control.records.get(key)
        if held is None or time.monotonic() - self._asked.get(key, -AGAIN_S) < AGAIN_S:
            return False
        record, replica = held.record, host.replica
        follower = replica.follower
        return (
            record.voters[0] == self._cluster.node
            and record.coordinator not in ("", self._cluster.node)
            and self._cluster.live(record.coordinator) is not None
            and not record.joint
            and not record.target
            and replica.counts
            and replica.health is LogHealth.SOUND
            and replica.role is Role.FOLLOWING
            and follower is not None
            and follower.state is FollowerState.STREAMING
        )

    async def _ask(self, key: Key) -> None:
        self._asked[key] = time.monotonic()
        node = self._cluster.control.coordinator(key)
        try:
            await self._cluster.ask(
                node, "replica_resign", topic=key[0], partition=key[1], node=self._cluster.node
            )
        except PenstockError as error:
            log.info("not handed back", topic=key[0], partition=key[1], error=error.message)
        else:
            log.info("handed back", topic=key[0], partition=key[1], by=node)
