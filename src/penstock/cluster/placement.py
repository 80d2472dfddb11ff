"""Who holds a partition, who will, and where replicas should go.

Where they should go is told by pure functions of what is there, by three wishes in this order:

1. Replicas of a partition lie in as many zones as there are, evenly, and never two on a node.
2. Every node holds about as many replicas as any other.
3. Every node is the preferred coordinator of about as many partitions as any other. The first of a
   partition's voters is preferred (under the policy `oldest` that is the oldest node, and the
   third wish is given up).

`place` serves new partitions. `plan_rebalance` and `plan_drain` change what is there with as few
moves as they can: a replica is moved only where a wish of a higher rank, or the evenness itself,
needs it, and the third wish is met by changing the order of voters, which moves nothing.

The metadata store has who holds a partition, and which moves of replicas wait:

    partitions/<topic id>/<partition>  a `PartitionRecord`, JSON
    cluster/plan    `{"moves": [{"topic": 3, "partition": 0, "target": ["n2", "n3", "n4"]}]}`, JSON

Every change is a compare and swap of the whole record, so two nodes that want the same epoch cannot
both get it, and a change made to an older version loses. Losing is not repeated here: whoever lost
decided on what is no longer so, and has to look again.

A move leaves the plan when it begins: from then on the partition's own record has its target. So
whichever node carries the plan out, nothing of it is lost with another. A later plan takes the
place of all that waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.cluster.store import MetadataChange, MetadataStore, Versioned, until_won
from penstock.errors import (
    Corruption,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RevisionConflict,
)
from penstock.replication.assignment import PartitionRecord, decode_record, encode_record
from penstock.replication.takeover import Policy as Policy

Place = tuple[int, int]  # topic id, partition


class Candidate(NamedTuple):
    """A node that can hold replicas. A node without a zone is a zone by itself."""

    id: str
    zone: str = ""
    age: int = 0  # the lowest is the oldest
    draining: bool = False  # keeps what it has until it is moved, and gets nothing


class Move(msgspec.Struct, frozen=True):
    """What a partition's `target` should become. The same nodes in another order move nothing:
    only the preferred coordinator changes."""

    topic: int
    partition: int
    target: tuple[str, ...]


def place(
    partitions: int,
    *,
    replicas: int,
    nodes: Iterable[Candidate],
    existing: Iterable[PartitionRecord] = (),
    policy: Policy = Policy.BALANCED,
) -> list[tuple[str, ...]]:
    """The voters of each of the new partitions, given what the nodes hold already."""
    board = _Board(nodes, policy)
    board.need(replicas)
    for record in existing:
        board.add(_wanted(record))
    placed = []
    for _ in range(partitions):
        first = min(board.usable, key=lambda node: (board.firsts[node], board.held[node], node))
        chosen = [first]
        while len(chosen) < replicas:
            chosen.append(board.best_addition(chosen))
        voters = board.ordered(chosen)
        board.add(voters)
        placed.append(voters)
    return placed


def plan_rebalance(
    records: Mapping[Place, PartitionRecord],
    nodes: Iterable[Candidate],
    *,
    policy: Policy = Policy.BALANCED,
) -> list[Move]:
    """What to move so that all wishes hold. `nodes` are those that should be used: a replica on any
    other node, or on a draining one, is moved away."""
    board = _Board(nodes, policy)
    wanted = {place: list(_wanted(record)) for place, record in records.items()}
    for voters in wanted.values():
        board.need(len(voters))
        board.add(voters)
    used = {node for voters in wanted.values() for node in voters}
    _replace(wanted, board, used.difference(board.usable))
    _spread_over_zones(wanted, board)
    _even_out(wanted, board)
    if policy is Policy.BALANCED:
        _even_out_firsts(wanted, board)
    return _moves(records, wanted, board)


def plan_drain(
    node: str,
    records: Mapping[Place, PartitionRecord],
    nodes: Iterable[Candidate],
    *,
    policy: Policy = Policy.BALANCED,
) -> list[Move]:
    """What to move so that `node` holds nothing, and nothing else."""
    candidates = [each._replace(draining=each.draining or each.id == node) for each in nodes]
    board = _Board(candidates, policy)
    wanted = {place: list(_wanted(record)) for place, record in records.items()}
    for voters in wanted.values():
        board.add(voters)
    leaving = {place: voters for place, voters in wanted.items() if node in voters}
    for voters in leaving.values():
        board.need(len(voters))
    _replace(leaving, board, {node})
    return _moves(records, leaving, board)


class _Board:
    """The nodes, and how many replicas and first places each has as far as it is planned."""

    def __init__(self, nodes: Iterable[Candidate], policy: Policy) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.usable = sorted(node.id for node in self.nodes.values() if not node.draining)
        self.policy = policy
        self.held: Counter[str] = Counter()
        self.firsts: Counter[str] = Counter()

    def need(self, replicas: int) -> None:
        if replicas < 1:
            raise InvalidArgument("a partition needs at least one replica", field="replicas")
        if replicas > len(self.usable):
            raise FailedPrecondition(
                f"{replicas} replicas need as many nodes, {len(self.usable)} can be used",
                replicas=replicas,
                nodes=len(self.usable),
            )

    def zone(self, node: str) -> str:
        """A node without a zone, or one that is not known any more, is its own."""
        known = self.nodes.get(node)
        return known.zone if known and known.zone else f"\0{node}"

    def crowding(self, voters: Iterable[str]) -> list[int]:
        """How many of them share each zone, most first: the lower, the better spread."""
        return sorted(Counter(self.zone(node) for node in voters).values(), reverse=True)

    def add(self, voters: Sequence[str]) -> None:
        self.held.update(voters)
        self.firsts[voters[0]] += 1

    def replace(self, voters: list[str], old: str, new: str) -> None:
        at = voters.index(old)
        voters[at] = new
        self.held[old] -= 1
        self.held[new] += 1
        if at == 0:
            self.firsts[old] -= 1
            self.firsts[new] += 1

    def prefer(self, voters: list[str], node: str) -> None:
        self.firsts[voters[0]] -= 1
        self.firsts[node] += 1
        voters.remove(node)
        voters.insert(0, node)

    def best_addition(self, voters: Collection[str]) -> str:
        """The node to add: in the zone that has fewest of them, with the fewest replicas."""
        zones = Counter(self.zone(node) for node in voters)
        free = (node for node in self.usable if node not in voters)
        return min(free, key=lambda node: (zones[self.zone(node)], self.held[node], node))

    def ordered(self, voters: Sequence[str]) -> tuple[str, ...]:
        if self.policy is Policy.BALANCED:
            return tuple(voters)
        ages = {node: known.age for node, known in self.nodes.items()}
        return tuple(sorted(voters, key=lambda node: (ages.get(node, 0), node)))


def _wanted(record: PartitionRecord) -> tuple[str, ...]:
    """Where a partition's replicas are, or are on the way to."""
    return record.target or record.joint or record.voters


def _replace(wanted: Mapping[Place, list[str]], board: _Board, gone: Collection[str]) -> None:
    for voters in wanted.values():
        for node in [node for node in voters if node in gone]:
            board.replace(voters, node, board.best_addition([n for n in voters if n != node]))


def _spread_over_zones(wanted: Mapping[Place, list[str]], board: _Board) -> None:
    """Move replicas out of zones that hold more of a partition than they need to."""
    for voters in wanted.values():
        while True:
            zones = Counter(board.zone(node) for node in voters)
            crowded = [node for node in voters if zones[board.zone(node)] == max(zones.values())]
            leaver = max(crowded, key=lambda node: (board.held[node], node))
            rest = [node for node in voters if node != leaver]
            if len(voters) >= len(board.usable):
                break  # every node holds one: there is nobody to move to
            best = board.best_addition(voters)
            if board.crowding([*rest, best]) >= board.crowding(voters):
                break
            board.replace(voters, leaver, best)


def _even_out(wanted: Mapping[Place, list[str]], board: _Board) -> None:
    """Move replicas from nodes with many to nodes with few, two fewer at least, so that each move
    makes it more even and none is taken back."""
    while True:
        pairs = sorted(
            ((few, many) for few in board.usable for many in board.usable
             if board.held[many] - board.held[few] >= 2),
            key=lambda pair: (board.held[pair[0]] - board.held[pair[1]], pair),
        )  # fmt: skip
        if not any(_move_one(wanted, board, many=many, few=few) for few, many in pairs):
            return


def _move_one(wanted: Mapping[Place, list[str]], board: _Board, *, many: str, few: str) -> bool:
    """Move a replica of one partition, if one can without crowding a zone; rather one that takes a
    first place to where there are fewer."""
    more_firsts = board.firsts[many] > board.firsts[few]
    found: list[str] | None = None
    for voters in wanted.values():
        if many not in voters or few in voters:
            continue
        moved = [few if node == many else node for node in voters]
        if board.crowding(moved) > board.crowding(voters):
            continue
        found = found or voters
        if (voters[0] == many) == more_firsts:
            found = voters
            break
    if found is None:
        return False
    board.replace(found, many, few)
    return True


def _even_out_firsts(wanted: Mapping[Place, list[str]], board: _Board) -> None:
    """Hand first places on, along chains of partitions, from nodes with many to nodes with few.

    Partition p, whose first is u, can make any other of its voters v the first: an edge from u to
    v. Along a path from a node to one that has two fewer, every step hands one place on and only
    the ends change. When no such path is left, no other order is more even.
    """
    while True:
        sources = sorted(board.usable, key=lambda node: (-board.firsts[node], node))
        for source in sources:
            chain = _chain(source, wanted, board)
            if chain:
                for place, node in chain:
                    board.prefer(wanted[place], node)
                break
        else:
            return


def _chain(
    source: str, wanted: Mapping[Place, list[str]], board: _Board
) -> list[tuple[Place, str]]:
    """The shortest path from `source` to a node with at least two first places fewer."""
    led: dict[str, list[Place]] = {}
    for place, voters in wanted.items():
        led.setdefault(voters[0], []).append(place)
    reached: dict[str, tuple[str, Place]] = {}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        if board.firsts[source] - board.firsts[node] >= 2:
            steps = []
            while node != source:
                before, place = reached[node]
                steps.append((place, node))
                node = before
            return steps
        for place in led.get(node, ()):
            for other in wanted[place][1:]:
                if other != source and other not in reached:
                    reached[other] = (node, place)
                    queue.append(other)
    return []


def _moves(
    records: Mapping[Place, PartitionRecord], wanted: Mapping[Place, Sequence[str]], board: _Board
) -> list[Move]:
    """The partitions of which something else is wanted than is being done already."""
    moves = []
    for place, voters in sorted(wanted.items()):
        target, held = board.ordered(voters), _wanted(records[place])
        same = target == held or (board.policy is Policy.OLDEST and set(target) == set(held))
        if not same:
            moves.append(Move(*place, target))
    return moves


PARTITIONS: Final = "partitions/"
EPOCHS: Final = "epochs/"  # where epochs were before there were records
PLAN: Final = "cluster/plan"
MOVES_MAX: Final = 2000  # a plan is one value of the store, whose size has a bound


class HeldRecord(NamedTuple):
    """A partition's record, and the revision that a change of it has to name."""

    record: PartitionRecord
    revision: int


class Records:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def get(self, place: Place) -> HeldRecord:
        entry = await self._store.get(record_key(place))
        if entry is None:
            raise NotFound(f"no record of partition {place[1]} of topic {place[0]}")
        return held_record(entry)

    async def list(self, topic: int | None = None) -> dict[Place, PartitionRecord]:
        """All records, or those of one topic, in the order of topics and partitions."""
        found = {
            place_of(entry.key): held_record(entry).record
            for entry in await self._store.range(_prefix(topic))
        }
        return dict(sorted(found.items()))

    async def ensure(self, wanted: Mapping[Place, PartitionRecord]) -> None:
        """Make the records that are not there yet. A partition that was given epochs before there
        were records keeps counting from them."""
        topics = {topic for topic, _ in wanted}
        held = await asyncio.gather(*(self.list(topic) for topic in topics))
        missing = wanted.keys() - {place for part in held for place in part}
        if missing:
            epochs = await self._old_epochs(topics)
            await asyncio.gather(
                *(self._create(place, wanted[place], epochs.get(place, 0)) for place in missing)
            )

    async def take_epoch(
        self, place: Place, held: HeldRecord, *, node: str, above: int = 0
    ) -> HeldRecord:
        """Give `node` the next epoch; the record that is returned holds its replica set. The epoch
        is over `above`, which some replica has promised: none is given out twice, even if the store
        was restored from an older copy."""
        if not held.record.is_voter(node):
            raise FailedPrecondition(f"{node} is no voter of {record_key(place)}", node=node)
        epoch = max(held.record.epoch, above) + 1
        taken = msgspec.structs.replace(held.record, epoch=epoch, coordinator=node)
        return await self.change(place, taken, held.revision)

    async def change(self, place: Place, record: PartitionRecord, revision: int) -> HeldRecord:
        """Write the record. Raises `RevisionConflict` if what is there has another revision."""
        value = encode_record(record)
        swapped = await self._store.put(record_key(place), value, expected_revision=revision)
        return HeldRecord(record, swapped)

    async def set_target(self, place: Place, target: tuple[str, ...]) -> None:
        """Say where the replicas should go; the coordinator brings them there."""

        async def swap() -> None:
            held = await self.get(place)
            record = msgspec.structs.replace(held.record, target=target)
            await self.change(place, record, held.revision)

        await until_won(swap)

    async def forget(self, topic: int) -> None:
        entries = await self._store.range(_prefix(topic))
        await asyncio.gather(*(self._store.delete(entry.key) for entry in entries))

    async def _old_epochs(self, topics: Iterable[int]) -> dict[Place, int]:
        ranges = await asyncio.gather(*(self._store.range(f"{EPOCHS}{t}/") for t in topics))
        return {place_of(entry.key): int(entry.value) for part in ranges for entry in part}

    async def _create(self, place: Place, record: PartitionRecord, epoch: int) -> None:
        record = msgspec.structs.replace(record, epoch=max(record.epoch, epoch))
        try:
            await self.change(place, record, 0)
        except RevisionConflict:
            return  # another has made it
        if epoch:
            await self._store.delete(f"{EPOCHS}{place[0]}/{place[1]}")


def _prefix(topic: int | None) -> str:
    return PARTITIONS if topic is None else f"{PARTITIONS}{topic}/"


def record_key(place: Place) -> str:
    return f"{PARTITIONS}{place[0]}/{place[1]}"


def place_of(key: str) -> Place:
    _, topic, partition = key.split("/")
    return int(topic), int(partition)


def held_record(entry: Versioned | MetadataChange) -> HeldRecord:
    """What is stored; raises `Corruption` if that is no record."""
    try:
        return HeldRecord(decode_record(entry.value or b""), entry.revision)
    except msgspec.DecodeError as error:
        raise Corruption(f"{entry.key} is no partition record: {error}", key=entry.key) from error


class _Plan(msgspec.Struct, frozen=True):
    moves: list[Move] = []


class Plans:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def waiting(self) -> list[Move]:
        """The moves that wait, in the order in which they are to begin."""
        return (await self._read())[0]

    async def replace(self, moves: list[Move]) -> None:
        if not moves:
            await self._store.delete(PLAN)
            return
        await self._store.put(PLAN, _encode(moves))

    async def begun(self, move: Move) -> None:
        """Take a move that has begun out of the plan. If that is another plan by now, it is left as
        it is, unless it has the same move."""

        async def swap() -> None:
            held, revision = await self._read()
            left = [each for each in held if each != move]
            if left == held:
                return
            if left:
                await self._store.put(PLAN, _encode(left), expected_revision=revision)
            else:
                await self._store.delete(PLAN, expected_revision=revision)

        await until_won(swap)

    async def _read(self) -> tuple[list[Move], int]:
        entry = await self._store.get(PLAN)
        if entry is None:
            return [], 0
        try:
            return msgspec.json.decode(entry.value, type=_Plan).moves, entry.revision
        except msgspec.DecodeError as error:
            raise Corruption(f"{PLAN} cannot be read: {error}") from error


def _encode(moves: list[Move]) -> bytes:
    return msgspec.json.encode(_Plan(moves))
