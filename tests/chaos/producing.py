"""Producers that write down every key they use, and what they were told of it.

They are the SDK's own clients with one request at a time each, so that the keys which a request
takes, and the ids it is answered with, belong together.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from tests.chaos.arena import KEY
from tests.chaos.history import History, Operation, now_us

from penstock.client.client import Client
from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import Remote, open_connection
from penstock.client.options import Options
from penstock.client.queue.entries import Item, ProducerIdentity, encode_key
from penstock.client.queue.producer import ids_in
from penstock.errors import CallerError, PenstockError, SequenceConflict, Unavailable
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import MessageId, partitions_of
from verification.events import Atomic, Enqueued, Enqueuing, Refused, digest_of

JOBS: Final = "jobs"
LEDGER: Final = "ledger"  # appended to by `expected_sequence` only
RETRY_S: Final = 30.0
REQUEST_S_MAX: Final = 10.0
PAYLOAD_BYTES: Final = 200
Take = tuple[int, int, int]  # partition, first sequence, count
Act = Callable[[list[Item]], Awaitable[list[str]]]


class RecordingIdentity(ProducerIdentity):
    """Tells of each key, and of the payload under it, before it is used; a retry uses the ones
    it has."""

    def __init__(self, name: str, epoch: int, *, topic: str, history: History) -> None:
        super().__init__(name, epoch)
        self._topic, self._history = topic, history
        self._digests: dict[int, list[int]] = {}  # of what is to be sent, by partition, in order
        self.taken: list[Take] = []  # by the request under way

    def sends(self, payloads: Sequence[bytes], partitions: Iterable[int]) -> None:
        """What the next request is made of. Its keys are given out in this order."""
        self.taken.clear()
        self._digests.clear()
        for payload, partition in zip(payloads, partitions, strict=True):
            self._digests.setdefault(partition, []).append(digest_of(payload))

    def take(self, partition: int, count: int) -> int:
        first = super().take(partition, count)
        self.taken.append((partition, first, count))
        waiting = self._digests[partition]
        digests, self._digests[partition] = waiting[:count], waiting[count:]
        self._history.add(
            self._topic,
            Enqueuing(now_us(), self.of(partition), self.epoch, first, count, partition, digests),
        )
        return first

    def of(self, partition: int) -> str:
        """The producer id of a partition, as the log has it."""
        return f"{self.name}.{partition}"


class RecordingClient(Client):
    """A client whose keys are written down."""

    def __init__(self, urls: Sequence[str], *, name: str, history: History) -> None:
        source = Remote(urls, api_key=KEY, tls=None, client=f"chaos-{name}")
        super().__init__(source, Options(producer=name, retry_s=RETRY_S, drain_s=2.0))
        self._history, self._made = history, dict[str, RecordingIdentity]()

    def identity(self, topic: str) -> RecordingIdentity:
        if topic not in self._made:
            self._made[topic] = RecordingIdentity(
                self._name, self._epoch, topic=topic, history=self._history
            )
        return self._made[topic]


class Producer:
    """Puts, batches and atomic batches through the SDK, one after the other."""

    def __init__(self, name: str, urls: Sequence[str], history: History, seed: str) -> None:
        self._name, self._urls, self._history = name, urls, history
        self._dice = random.Random(seed)
        self._numbers = itertools.count(1)

    async def run(self, stop: asyncio.Event, *, pause_s: float) -> None:
        async with RecordingClient(self._urls, name=self._name, history=self._history) as client:
            topic = await client.topic(JOBS, bytes, create=False)
            identity = client.identity(JOBS)
            acts: dict[str, tuple[int, int, Act]] = {  # how many items, and what is done with them
                "put": (1, 1, lambda items: self._put(topic, *items)),
                "batch": (2, 20, lambda items: topic.put_many(items, atomic=False)),
                "atomic": (2, 8, lambda items: topic.put_many(items, atomic=True)),
            }
            while not stop.is_set():
                kind = self._dice.choices(list(acts), (6, 2, 2))[0]
                low, high, act = acts[kind]
                items = self._items(low, high)
                keys = [encode_key(item.key) for item in items]
                partitions = partitions_of(keys, topic.config.partitions).tolist()
                identity.sends([item.value for item in items], partitions)
                await self._enqueue(kind, act(items), identity)
                await asyncio.sleep(self._dice.expovariate(1 / pause_s))

    async def _put(self, topic: Any, item: Item) -> list[str]:
        delay = self._dice.choice((None, None, None, 0.5))
        return [await topic.put(item.value, priority=item.priority, key=item.key, delay=delay)]

    def _items(self, low: int, high: int) -> list[Item]:
        dice = self._dice
        return [
            Item(
                b"%s/%d " % (self._name.encode(), next(self._numbers)) + b"." * PAYLOAD_BYTES,
                priority=dice.randrange(5),
                key=str(dice.randrange(1000)),
            )
            for _ in range(dice.randint(low, high))
        ]

    async def _enqueue(
        self, kind: str, act: Awaitable[list[str]], identity: RecordingIdentity
    ) -> None:
        with self._history.operation(kind, self._name) as operation:
            try:
                ids = await act
                operation.details["ids"] = ids
                self._record(identity, ids)
            finally:
                parts = [(identity.of(p), identity.epoch, f, n, p) for p, f, n in identity.taken]
                operation.details["keys"] = parts
                if kind == "atomic" and parts:
                    self._history.add(JOBS, Atomic(parts))

    def _record(self, identity: RecordingIdentity, ids: Sequence[str]) -> None:
        """Whose key each message is: within a partition both are in the order of the request."""
        self._history.acknowledged()
        by_partition: dict[int, list[int]] = {}
        for found in map(MessageId.parse, ids):
            by_partition.setdefault(found.partition, []).append(found.sequence)
        for partition, first, count in identity.taken:
            mine, by_partition[partition] = (
                by_partition[partition][:count],
                by_partition[partition][count:],
            )
            for i, sequence in enumerate(mine):
                self._history.add(
                    JOBS,
                    Enqueued(
                        now_us(), identity.of(partition), identity.epoch, first + i, 1, partition,
                        sequence,
                    ),
                )  # fmt: skip


class Appender:
    """Appends to a partition that has not moved since it looked, through one node after another.

    A request without an answer is sent again as it is until there is one. If that is a conflict, it
    must never be found in the log: no attempt was written, and none can be any more.
    """

    def __init__(self, name: str, urls: Sequence[str], history: History, seed: str) -> None:
        self._name, self._urls, self._history = name, list(urls), history
        self._dice = random.Random(seed)
        self._identity = RecordingIdentity(name, 1, topic=LEDGER, history=history)
        self._numbers = itertools.count(1)
        self._connection: Connection | None = None
        self._ends: dict[int, int] = {}  # where each partition was when last heard of

    async def run(self, stop: asyncio.Event, *, pause_s: float, partitions: int) -> None:
        while not stop.is_set():
            with self._history.operation("append", self._name) as operation:
                await self._append(self._dice.randrange(partitions), operation, stop)
            await asyncio.sleep(self._dice.expovariate(1 / pause_s))
        if self._connection is not None:
            await self._connection.close()

    async def _append(self, partition: int, operation: Operation, stop: asyncio.Event) -> None:
        identity, expected = self._identity, self._ends.get(partition, 0)
        payload = b"%s/%d" % (self._name.encode(), next(self._numbers))
        identity.sends([payload], [partition])
        first = identity.take(partition, 1)
        columns = {"payload": [payload]}
        body = SCHEMAS[Kind.ENQ].encode(1, columns | identity.run(partition, first, 1), runs=1)
        operation.details |= {"partition": partition, "expected": expected, "sequence": first}
        key = (identity.of(partition), identity.epoch, first)
        for tries in itertools.count(1):
            try:
                sequence = await self._send(partition, body, expected)
            except SequenceConflict as error:
                self._ends[partition] = int(error.details["sequence"])
                self._history.add(LEDGER, Refused(*key))
                raise
            except CallerError:
                raise
            except (PenstockError, TimeoutError) as error:
                self._connection = None
                operation.details["tries"], operation.details["last"] = tries, str(error)[:200]
                if stop.is_set():
                    raise
                await asyncio.sleep(0.2)
            else:
                self._ends[partition] = sequence
                operation.details |= {"message": sequence}
                self._history.acknowledged()
                self._history.add(LEDGER, Enqueued(now_us(), *key, 1, partition, sequence))
                return

    async def _send(self, partition: int, body: bytes, expected: int) -> int:
        async with asyncio.timeout(REQUEST_S_MAX):
            if self._connection is None or not self._connection.alive:
                self._connection = await open_connection(self._dice.choice(self._urls), api_key=KEY)
            answer = await self._connection.enqueue(
                LEDGER, [(partition, 1, body)], expected_sequence=expected
            )
        [message_id] = ids_in(answer, 1)
        if not message_id:
            raise Unavailable("the answer names no message")
        return MessageId.parse(message_id).sequence
