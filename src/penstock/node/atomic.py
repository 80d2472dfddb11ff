"""All-or-none batches over several partitions: PREPARE in each, one DECIDE in the home partition.

The decision is the DECIDE record of the home partition: once that is committed, the batch is in,
and nothing can take it back. A prepared participant never decides alone. Whoever coordinates a
partition in which a batch has been prepared for too long asks its home: a decision found there
holds; if there is none, the home decides against, which whoever drove the batch then finds. The
driver may be any node, and so may the partitions' coordinators; each of them may fail at any time.

- A PREPARE is sent once. If nobody knows whether it was written, the batch is decided against, and
  a PREPARE that comes later than that is resolved by its coordinator.
- A decision may be sent again and again: the first one in the home's log holds, and is the answer.
- The other participants get a copy. Should it be lost, they ask, as after a restart.
- The home keeps each commit for those that may still ask (`heap.transactions`). After a while it
  asks them instead: each participant tells which of the home's batches still wait there. What waits
  nowhere is confirmed by a record in the home's log, for many batches at once. A participant that
  cannot answer holds back the batches that it has a share of, and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from ulid import ULID

from penstock.errors import Backpressure, BatchAborted, PenstockError, Unavailable, from_wire
from penstock.heap.transactions import Doubts, SharePlace, pack_places
from penstock.log.crash import crash_point
from penstock.model.batch import SCHEMAS, Decision, Kind
from penstock.model.columns import Value
from penstock.model.entries import ENQ
from penstock.node.clock import Alarm
from penstock.node.observe.logs import get_logger
from penstock.node.route import WAIT_S, PartitionPort, PeerPort, in_request, not_there
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.write import EnqueuePart
from penstock.wire.frame import FrameType
from penstock.wire.messages import Call, Enqueue, Forwarded, Part, Placed, pack

PREPARE = SCHEMAS[Kind.PREPARE]
EARLIER_S: Final = 1.0  # that an earlier attempt at the same entries is waited for
LOOK_S: Final = 0.005  # between looks whether it is decided
FULL_S: Final = 1.0  # after which a home that has too much to remember may be tried again
# That a batch may be prepared for before it is decided for. A home keeps its aborts for longer
# (`heap.transactions.ABORTED_MS`), so a driver that is late finds them.
COMMIT_S: Final = 60.0
DECIDE_S: Final = 10.0  # that a decision is tried; the home's coordinator may change meanwhile
ASK_S: Final = 2.0  # that it is asked for: who is in doubt asks again
HOMES_MAX: Final = 16  # asked at the same time
R = TypeVar("R")
IN_DOUBT_MS: Final = 5000  # that a batch is prepared before its home is asked
DOUBT_PAUSE_MS: Final = 500  # before the next question, at least
CONFIRM_MS: Final = 10_000  # that a commit is kept before its participants are asked, and between
CROWDED: Final = 1 << 13  # commits that are not kept that long
CROWDED_MS: Final = 1000
ASKED_MAX: Final = 16  # participants at the same time
RECORD_MAX: Final = 512  # commits that one record confirms
RECORD_BYTES: Final = 32  # of it for each
RESOLVE, CONFIRM = "resolve-in-doubt", "confirm-atomic"
log = get_logger(__name__)


class ParticipantHere:
    def __init__(self, topic: ServedTopic, partition: Partition) -> None:
        self._topic, self._partition = topic, partition
        self._heap = partition.heap

    async def stage(
        self, part: EnqueuePart, *, transaction: bytes, home: int
    ) -> asyncio.Future[list[Placed]]:
        """Append a PREPARE of what is new. The future gets where that is, once it is committed."""
        self._partition.check_commits()
        if self._partition.index == home and self._heap.transactions.full:
            raise Backpressure(
                "too many atomic batches wait for participants", retry_after_s=FULL_S
            )
        await self._partition.make_room(len(part.columns.body) + 64)
        await self._leave_known_out(part)
        placed = _append(self._partition, part, transaction=transaction, home=home)
        crash_point("node.atomic.preparing")
        # What an earlier attempt wrote is answered as what this one writes: when it is committed.
        durable = self._partition.committed(self._heap.sequence_applied)

        async def prepared() -> list[Placed]:
            await durable
            return placed

        return asyncio.ensure_future(prepared())

    async def prepare(self, part: EnqueuePart, *, transaction: bytes, home: int) -> list[Placed]:
        staged = await self.stage(part, transaction=transaction, home=home)
        self._topic.wake()
        return await staged

    async def decide(
        self, transaction: bytes, *, commit: bool, places: Sequence[SharePlace] = ()
    ) -> bool:
        """Write a decision, unless there is one; returns the one that holds, once committed. With
        `places`, of all shares, a home keeps a commit until the others have their copy."""
        home, transactions = self._partition, self._heap.transactions
        if transactions.outcome(transaction) is None:
            self._partition.check_commits()
            others = [place for place in places if place.partition != home.index]
            own = len(others) < len(places)
            commit = commit and transactions.may_commit(transaction, own=own)
            append_decision(home, [transaction], int(commit), others=others if commit else ())
            crash_point("node.atomic.deciding")
        self._topic.wake()
        await self._partition.committed(self._heap.sequence_applied)
        outcome = transactions.outcome(transaction)
        assert outcome is not None
        return outcome

    async def outcome(self, transaction: bytes) -> bool:
        """The decision, for who is in doubt; it is against if there was none."""
        return await self.decide(transaction, commit=False)

    async def apply(self, transaction: bytes, *, commit: bool) -> None:
        if transaction in self._heap.prepared:
            append_decision(self._partition, [transaction], int(commit))
            crash_point("node.atomic.applying")
            self._topic.wake()

    async def doubts(self, home: int) -> Doubts:
        """Batches of a home that wait for its decision here. A decision that is not committed yet
        may still be lost: the answer is given once nothing in it can change."""
        found = Doubts(self._heap.sequence_applied, self._heap.transactions.doubts(home))
        self._topic.wake()
        await self._partition.committed(found.sequence)
        return found

    async def _leave_known_out(self, part: EnqueuePart) -> None:
        """Write nothing that an earlier attempt wrote. What it has prepared is waited for a while:
        for ever would be a deadlock if that attempt waits for us in another partition."""
        patience = round(EARLIER_S / LOOK_S)
        while duplicates := self._heap.dedup.admit(part.columns):
            if not any(self._heap.is_prepared(sequence) for _, sequence, _ in duplicates):
                part.leave_out(duplicates, self._partition.index)
                return
            if not patience:
                raise BatchAborted("an earlier attempt at these entries is not decided yet")
            patience -= 1
            self._topic.wake()
            await asyncio.sleep(LOOK_S)


class ParticipantAway:
    """A partition that another node serves, over the connection to that node."""

    def __init__(self, topic: ServedTopic, index: int, peer: PeerPort) -> None:
        self._topic, self._index, self._peer = topic.config, index, peer

    async def prepare(self, part: EnqueuePart, *, transaction: bytes, home: int) -> list[Placed]:
        request = Enqueue(
            self._topic.name, [Part(self._index, part.count, len(part.body))], codec=part.codec,
            raw_lengths=[len(part.columns.body)], forwarded=True, transaction=transaction,
            home=home, topic_id=self._topic.id,
        )  # fmt: skip
        asked = self._peer.ask(FrameType.BATCH, Forwarded, pack(request), part.body)
        answer: Forwarded = await asked
        if len(answer.outcomes) != 1:
            raise Unavailable("an answer does not fit its request")
        outcome = answer.outcomes[0]
        if outcome.error is not None:
            raise from_wire(outcome.error)
        placed, part.known = in_request(part, outcome)
        return placed

    async def decide(
        self, transaction: bytes, *, commit: bool, places: Sequence[SharePlace] = ()
    ) -> bool:
        told = [list(place) for place in places]
        return await self._decided("decide", transaction=transaction, commit=commit, places=told)

    async def outcome(self, transaction: bytes) -> bool:
        return await self._decided("outcome", transaction=transaction)

    async def apply(self, transaction: bytes, *, commit: bool) -> None:
        await self._call("apply", transaction=transaction, commit=commit)

    async def doubts(self, home: int) -> Doubts:
        answer = await self._call("doubts", home=home)
        try:
            return msgspec.convert((answer["sequence"], answer["transactions"]), Doubts)
        except (KeyError, msgspec.ValidationError) as error:
            raise Unavailable("an answer does not say what is in doubt") from error

    async def _decided(self, what: str, **arguments: Any) -> bool:
        commit = (await self._call(what, **arguments)).get("commit")
        if not isinstance(commit, bool):
            raise Unavailable("an answer does not say how it was decided")
        return commit

    async def _call(self, what: str, **arguments: Any) -> dict[str, Any]:
        place = {"topic": self._topic.name, "topic_id": self._topic.id, "partition": self._index}
        call = Call(f"transaction_{what}", {**place, **arguments})
        answer: dict[str, Any] = await self._peer.ask(FrameType.SUBSCRIBE, dict, pack(call))
        return answer


Participant = ParticipantHere | ParticipantAway


def append_decision(
    partition: Partition,
    transactions: Sequence[bytes],
    decision: int,
    *,
    others: Sequence[SharePlace] = (),
) -> None:
    values: dict[str, Value | None] = {
        "transaction": transactions,
        "commit": [decision] * len(transactions),
    }
    if others:
        values["participants"] = [pack_places(others)]
    partition.append_record(Kind.DECIDE, len(transactions), values)


def _append(
    partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
) -> list[Placed]:
    if not part.count:
        return []
    columns = part.columns
    values: dict[str, Value | None] = {
        column.name: columns.binary(column.name) if column.binary else columns.fixed(column.name)
        for column in ENQ.columns
        if column.name in columns.views
    }
    values |= {"transaction": [transaction], "home": [home]}
    body = PREPARE.encode(part.count, values, runs=columns.runs)
    batch = partition.append(Kind.PREPARE, body, part.count)
    return part.placed(partition.index, batch.first, batch.time_ms)


async def enqueue_atomically(
    topic: ServedTopic, parts: Sequence[tuple[PartitionPort, EnqueuePart]]
) -> None:
    transaction = ULID().bytes
    home = choose_home([port.index for port, _ in parts], transaction)
    late = asyncio.get_running_loop().time() + COMMIT_S
    try:
        prepared = await _prepare_all(topic, parts, transaction, home)
        crash_point("node.atomic.prepared")
        places = [
            SharePlace(port.index, placed.sequence)
            for (port, _), mine in zip(parts, prepared, strict=True)
            for placed in mine
        ]
        if places:  # else all of it was written before
            await _commit(topic, home, transaction, places, late=late)
    except PenstockError as error:
        for _, part in parts:
            part.request.part_failed(error)
        return
    for (_, part), placed in zip(parts, prepared, strict=True):
        part.request.part_placed(placed, part.known)


def choose_home(partitions: Sequence[int], transaction: bytes) -> int:
    """One of the participants, each as often as the others: what homes keep is spread over them."""
    return partitions[transaction[-1] % len(partitions)]


async def _commit(
    topic: ServedTopic, home: int, transaction: bytes, places: list[SharePlace], *, late: float
) -> None:
    """Have the home decide for the batch, and tell the others; raises if it is decided against."""
    others = sorted({place.partition for place in places} - {home})
    if asyncio.get_running_loop().time() > late:
        await _abort(topic, home, others, transaction)
        raise BatchAborted("it took too long to prepare")
    if not await _decide(topic, home, transaction, commit=True, places=places):
        raise BatchAborted("another decision came first")
    crash_point("node.atomic.decided")
    await _tell(topic, others, transaction, commit=True)


async def _prepare_all(
    topic: ServedTopic,
    parts: Sequence[tuple[PartitionPort, EnqueuePart]],
    transaction: bytes,
    home: int,
) -> list[list[Placed]]:
    """Have every part prepared and committed, or the batch decided against; returns where."""
    staging = await asyncio.gather(
        *(_stage(topic, port.index, part, transaction, home) for port, part in parts),
        return_exceptions=True,
    )
    staged = [
        (port.index, s)
        for (port, _), s in zip(parts, staging, strict=True)
        if not isinstance(s, BaseException)
    ]
    crash_point("node.atomic.staged")
    topic.wake()
    ended = await asyncio.gather(*(s for _, s in staged), return_exceptions=True)
    failed = [e for e in (*staging, *ended) if isinstance(e, BaseException)]
    if failed:
        if staged:
            await _abort(topic, home, [index for index, _ in staged], transaction)
        raise failed[0]
    return [e for e in ended if not isinstance(e, BaseException)]


async def _stage(
    topic: ServedTopic, index: int, part: EnqueuePart, transaction: bytes, home: int
) -> asyncio.Future[list[Placed]]:
    served = topic.served(index)
    if served is not None:
        here = ParticipantHere(topic, served)
        return await here.stage(part, transaction=transaction, home=home)
    work = at_coordinator(
        topic, index, lambda p: p.prepare(part, transaction=transaction, home=home)
    )
    return asyncio.ensure_future(work)


async def _tell(
    topic: ServedTopic, partitions: list[int], transaction: bytes, *, commit: bool
) -> None:
    """Give participants a copy of the decision. One that does not get it will ask."""

    def apply(participant: Participant) -> Awaitable[None]:
        return participant.apply(transaction, commit=commit)

    results = await asyncio.gather(
        *(at_coordinator(topic, index, apply) for index in partitions), return_exceptions=True
    )
    for index, result in zip(partitions, results, strict=True):
        if isinstance(result, PenstockError):
            log.info("a decision was not told", partition=index, error=result.message)
        elif isinstance(result, BaseException):
            raise result


async def _abort(
    topic: ServedTopic, home: int, participants: list[int], transaction: bytes
) -> None:
    """Decide against. If even that is not possible now, participants ask for it later."""
    try:
        outcome = await _decide(topic, home, transaction, commit=False)
    except PenstockError as error:
        log.warning("an atomic batch is in doubt", home=home, error=error.message)
        return
    await _tell(topic, [i for i in participants if i != home], transaction, commit=outcome)


# --- after a crash ---


async def resolve_in_doubt(topic: ServedTopic, *, older_ms: int | None = None) -> int:
    """Give what is prepared here, for that long at least, the decision of its home partition.

    Homes are asked side by side, and each fails by itself: what one of them cannot answer now must
    not keep the batches of others invisible. Returns how many were resolved.
    """
    by_home: dict[int, list[tuple[Partition, bytes]]] = {}
    for partition in topic.local:
        for transaction, prepared in partition.heap.transactions.prepared.items():
            if older_ms is None or prepared.time_ms <= partition.now_ms() - older_ms:
                by_home.setdefault(prepared.home, []).append((partition, transaction))
    slots = asyncio.Semaphore(HOMES_MAX)
    async with asyncio.TaskGroup() as group:
        asking = [
            group.create_task(_resolve_of(topic, home, doubts, slots))
            for home, doubts in by_home.items()
        ]
    return sum(task.result() for task in asking)


async def _resolve_of(
    topic: ServedTopic, home: int, doubts: list[tuple[Partition, bytes]], slots: asyncio.Semaphore
) -> int:
    """Ask one home, as long as it answers; returns how many batches it told of."""
    async with slots:
        for resolved, (partition, transaction) in enumerate(doubts):
            try:
                decision = await _outcome(topic, home, transaction)
                if partition.failed is None:
                    await ParticipantHere(topic, partition).apply(transaction, commit=decision)
            except PenstockError as error:
                log.warning(
                    "still in doubt", topic=topic.config.name, home=home,
                    count=len(doubts) - resolved, error=error.message,
                )  # fmt: skip
                return resolved
    return len(doubts)


# --- what is asked of a partition's coordinator; if that is this node, it acts here ---


async def _decide(
    topic: ServedTopic,
    home: int,
    transaction: bytes,
    *,
    commit: bool,
    places: Sequence[SharePlace] = (),
) -> bool:
    """Have the home decide; returns the decision that holds, committed in the home partition."""
    return await at_coordinator(
        topic, home, lambda p: p.decide(transaction, commit=commit, places=places),
        repeat=True, within_s=DECIDE_S,
    )  # fmt: skip


async def _outcome(topic: ServedTopic, home: int, transaction: bytes) -> bool:
    return await at_coordinator(
        topic, home, lambda p: p.outcome(transaction), repeat=True, within_s=ASK_S
    )


async def at_coordinator(
    topic: ServedTopic,
    index: int,
    ask: Callable[[Participant], Awaitable[R]],
    *,
    repeat: bool = False,
    within_s: float | None = None,
) -> R:
    """Do something at a partition's coordinator, wherever that is.

    While nobody coordinates it, or who was asked does not, it is tried again; when nobody knows
    whether it was done, only if it may be done twice (`repeat`): a decision may, a PREPARE may not.
    """
    loop, router, key = asyncio.get_running_loop(), topic.router, topic.key(index)
    deadline = loop.time() + (WAIT_S if within_s is None else within_s)
    while True:
        unreached = Unavailable(f"nobody serves partition {index} now", partition=index)
        try:
            served = topic.served(index)
            if served is not None:
                return await ask(ParticipantHere(topic, served))
            node = router.coordinator(key)
            peer = router.cluster.live(node) if node else None
            if peer is None:
                raise unreached
            return await ask(ParticipantAway(topic, index, peer))
        except PenstockError as error:
            undone = error is unreached or not_there(error)
            unknown = isinstance(error, Unavailable) and not undone
            if (unknown and not repeat) or not (isinstance(error, Unavailable) or undone):
                raise
            if router.cluster.cut_off or loop.time() >= deadline:
                raise (error if unknown else unreached) from error
        await router.changed(key)


class AtomicBatches:
    def __init__(self, topic: ServedTopic) -> None:
        self._topic, self._clock, self._spawn = topic, topic.clock, topic.router.spawn
        resolve = partial(resolve_in_doubt, topic, older_ms=IN_DOUBT_MS)
        self._doubt = Alarm(topic.clock, partial(self._begin, RESOLVE, resolve))
        self._unconfirmed = Alarm(topic.clock, partial(self._begin, CONFIRM, self._confirm))
        self._asked_ms = 0  # when participants were asked last
        self._under_way: set[str] = set()  # what a timer has begun and is not done

    def enqueue(self, parts: Sequence[tuple[PartitionPort, EnqueuePart]]) -> None:
        self._spawn(enqueue_atomically(self._topic, parts), name="atomic-enqueue")

    def prepare(
        self, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
    ) -> None:

        async def prepare() -> None:
            try:
                here = ParticipantHere(self._topic, partition)
                placed = await here.prepare(part, transaction=transaction, home=home)
            except PenstockError as error:
                part.request.part_failed(error)
            else:
                part.request.part_placed(placed, part.known)

        self._spawn(prepare(), name="atomic-prepare")

    def arm(self) -> None:
        """Set the timers, as far as something waits for them."""
        local = self._topic.local
        waiting = [(p, p.heap.transactions.prepared.values()) for p in local]
        times = [batch.time_ms - p.ahead_ms for p, batches in waiting for batch in batches]
        if times and RESOLVE not in self._under_way:
            self._doubt.set(max(min(times) + IN_DOUBT_MS, self._clock.now_ms() + DOUBT_PAUSE_MS))
        kept = [(p, c) for p in local if (c := p.heap.transactions.unconfirmed)]
        if kept and CONFIRM not in self._under_way:
            crowded = max(len(commits) for _, commits in kept) >= CROWDED
            oldest_ms = min(next(iter(c.values())).time_ms - p.ahead_ms for p, c in kept)
            pause_ms = CROWDED_MS if crowded else CONFIRM_MS
            self._unconfirmed.set(max(oldest_ms, self._asked_ms) + pause_ms)

    async def _confirm(self) -> None:
        try:
            await confirm(self._topic)
        finally:
            self._asked_ms = self._clock.now_ms()

    def _begin(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            try:
                await work()
            finally:
                self._under_way.discard(name)
                self._topic.rearm()

        self._under_way.add(name)
        self._spawn(run(), name=name)

    def close(self) -> None:
        self._doubt.cancel()
        self._unconfirmed.cancel()


async def confirm(topic: ServedTopic) -> int:
    """Ask the participants of what the homes here keep; returns how many commits were confirmed."""
    slots = asyncio.Semaphore(ASKED_MAX)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_confirm_of(topic, home, slots)) for home in topic.local]
    return sum(task.result() for task in tasks)


async def _confirm_of(topic: ServedTopic, home: Partition, slots: asyncio.Semaphore) -> int:
    transactions = home.heap.transactions
    asked = {place.partition for c in transactions.unconfirmed.values() for place in c.places}
    answers: dict[int, Doubts] = {}

    async def ask(index: int) -> None:
        try:
            async with slots:
                answers[index] = await at_coordinator(
                    topic, index, lambda p: p.doubts(home.index), repeat=True
                )
        except PenstockError as error:
            log.info(
                "commits are kept", topic=topic.config.name, home=home.index, participant=index,
                count=len(transactions.unconfirmed), error=error.message,
            )  # fmt: skip

    async with asyncio.TaskGroup() as group:
        for index in asked:
            group.create_task(ask(index))
    confirmed = transactions.confirmed(answers)
    for at in range(0, len(confirmed), RECORD_MAX):
        some = confirmed[at : at + RECORD_MAX]
        if not home.may_commit:
            return at
        if not home.has_room(len(some) * RECORD_BYTES, enqueue=True):
            home.grow(len(some) * RECORD_BYTES)
            return at
        append_decision(home, some, Decision.CONFIRMED)
        topic.wake()
    return len(confirmed)
