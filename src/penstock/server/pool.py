"""One native connection per API key, shared by all requests that carry the key, and the enqueues.

The engine decides about a key when a connection greets it, and ends the connections of a key that
is revoked; the pool remembers which key a living connection was opened with, by its digest. So a
request with a good key costs a lookup, and the gateway itself needs to know nothing about keys.

Both listeners reduce the messages that they were sent to an `Entry`, or to `GatewayEntries`, a list
per column of an ENQ body. `check` finds the first value over its limit with a few passes over whole
columns, and names it as the caller wrote it; nothing reaches the log before it has passed.

Single enqueues are gathered into native ones. A native enqueue costs nearly the same for one
message as for a hundred, so single ones of a topic that arrive in one turn of the loop, or while
earlier ones are under way, go out together. At most `FLIGHTS_MAX` requests of a topic are under way
at once: what arrives meanwhile waits and grows into the next one, so the size of a batch follows
the load by itself.

Every caller gets the answer to its own message. An entry is checked before it joins, so a whole
request is refused only when the topic changed in between. Then the entries go out again one by
one, which is safe: a refused request wrote nothing, and entries with a producer key, which never
share a request with those without, are recognised if they come twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.network.connection import Connection
from penstock.client.queue.producer import ids_in
from penstock.errors import (
    CallerError,
    InvalidArgument,
    LimitExceeded,
    PenstockError,
    StaleProducer,
    Unauthenticated,
    Unavailable,
    from_wire,
)
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    ENQ,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    PRODUCER_NUMBER_MAX,
    RETRIES_MAX,
    EntryRun,
    run_columns,
)
from penstock.model.ids import partitions_of, partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind
from penstock.node.observe.logs import request_id
from penstock.server.vocabulary import EnqueuedAnswer
from penstock.wire.frame import FrameType
from penstock.wire.messages import TEXT_LENGTH_MAX, Enqueue, Enqueued, Part, pack

FLIGHTS_MAX: Final = 2
FLIGHT_ENTRIES_MAX: Final = 1000
FLIGHT_BYTES_MAX: Final = 8 << 20
_DEFAULTS: Final = (b"", b"", 0, -1)  # key, headers, delay, retries: nothing to check
_pack: Final = msgspec.msgpack.Encoder(order="sorted").encode


class Entry(NamedTuple):
    """One message; the fields are the columns of `GatewayEntries`."""

    payload: bytes
    priority: int
    key: bytes
    headers: bytes
    delay_ms: int
    max_retries: int
    run: EntryRun | None

    def check(self, config: TopicConfig, *, bytes_max: int) -> None:
        payload_bytes_max = min(config.payload_bytes_max, bytes_max)
        if len(self.payload) > payload_bytes_max:
            raise InvalidArgument(
                f"payload has {len(self.payload)} bytes, at most {payload_bytes_max}",
                field="payload",
                limit=payload_bytes_max,
            )
        if self[2:6] != _DEFAULTS:
            GatewayEntries.of((self,)).check(config, names="{1}")


class GatewayEntries(NamedTuple):
    """Columns of equal length; None stands for a column of defaults."""

    payloads: Sequence[bytes]
    priorities: Sequence[int]
    keys: Sequence[bytes] | None = None
    headers: Sequence[bytes] | None = None  # msgpack maps, or empty
    delays_ms: Sequence[int] | None = None
    max_retries: Sequence[int] | None = None  # -1: the topic's default
    runs: Sequence[EntryRun] = ()

    @staticmethod
    def of(entries: Sequence[Entry]) -> GatewayEntries:
        """Entries side by side; columns that hold only defaults are left out."""
        payloads, priorities, keys, headers, delays_ms, retries, runs = zip(*entries, strict=True)
        return GatewayEntries(
            payloads,
            priorities,
            keys if any(keys) else None,
            headers if any(headers) else None,
            delays_ms if any(delays_ms) else None,
            retries if max(retries) >= 0 else None,
            joined_runs(runs) if runs[0] is not None else (),
        )

    def body(self) -> bytes:
        count = len(self.payloads)
        return ENQ.encode(
            count,
            {
                "priority": np.fromiter(self.priorities, np.int64, count),
                "delay_ms": self.delays_ms,
                "max_retries": self.max_retries,
                "key": self.keys,
                "headers": self.headers,
                "payload": self.payloads,
                **run_columns(self.runs),
            },
            runs=len(self.runs),
        )

    @property
    def size(self) -> int:
        columns = (self.payloads, self.keys or (), self.headers or ())
        return sum(sum(map(len, column)) for column in columns) + 40 * len(self.payloads)

    def check(self, config: TopicConfig, *, names: str = "messages[{}].{}") -> None:
        """Raise `InvalidArgument` for the first value over its limit. `names` makes its name."""
        if len(self.payloads) > BATCH_ENTRIES_MAX:
            raise InvalidArgument(
                f"{len(self.payloads)} messages in one batch, at most {BATCH_ENTRIES_MAX}",
                field="messages",
                limit=BATCH_ENTRIES_MAX,
            )
        _check_sizes(self.payloads, config.payload_bytes_max, names, "payload")
        _check_sizes(self.keys, KEY_BYTES_MAX, names, "key")
        _check_sizes(self.headers, HEADERS_BYTES_MAX, names, "headers")
        _check_range(self.delays_ms, (0, DELAY_MS_MAX), names, "delay_ms")
        _check_range(self.max_retries, (-1, RETRIES_MAX), names, "max_retries")

    def partition(self, config: TopicConfig) -> int:
        """The one partition all entries belong to, for a call that names its last sequence."""
        if config.partitions == 1:
            return 0
        found = set(self._partitions(config).tolist())
        if len(found) != 1:
            raise InvalidArgument(
                "expected_sequence needs messages whose keys (or vectors) share a partition",
                field="expected_sequence",
            )
        return int(found.pop())

    def _partitions(self, config: TopicConfig) -> NDArray[np.int64]:
        """Where the entries belong; none if one of them belongs nowhere by itself."""
        if config.kind is TopicKind.DELTA:
            return partitions_of_deltas(self.payloads, config.partitions)
        keys = self.keys or ()
        return partitions_of(keys, config.partitions) if all(keys) else np.empty(0, np.int64)


def producer_run(producer_id: str, *, epoch: int, seq: int | None, count: int) -> EntryRun | None:
    """The run of a request that carries a producer key; None when it carries none."""
    if seq is not None and seq > PRODUCER_NUMBER_MAX - count:
        raise InvalidArgument("seq is too large", field="seq", limit=PRODUCER_NUMBER_MAX - count)
    if epoch > PRODUCER_NUMBER_MAX:
        raise InvalidArgument("epoch is too large", field="epoch", limit=PRODUCER_NUMBER_MAX)
    if not producer_id:
        if seq is not None:
            raise InvalidArgument("seq needs a producer_id", field="producer_id")
        return None
    producer = producer_id.encode()
    if len(producer) > PRODUCER_ID_BYTES_MAX:
        raise InvalidArgument(
            f"producer_id has {len(producer)} bytes, at most {PRODUCER_ID_BYTES_MAX}",
            field="producer_id",
            limit=PRODUCER_ID_BYTES_MAX,
        )
    if seq is None:
        raise InvalidArgument("producer_id needs a seq", field="seq")
    return EntryRun(count, epoch, seq, producer)


def joined_runs(runs: tuple[EntryRun, ...]) -> list[EntryRun]:
    joined = [runs[0]]
    for run in runs[1:]:
        last = joined[-1]
        follows = last.sequence + last.entries == run.sequence
        if follows and (last.producer, last.epoch) == (run.producer, run.epoch):
            joined[-1] = last._replace(entries=last.entries + run.entries)
        else:
            joined.append(run)
    return joined


def packed_headers(headers: Mapping[str, str]) -> bytes:
    return _pack(dict(headers)) if headers else b""


def _check_sizes(values: Sequence[bytes] | None, limit: int, names: str, field: str) -> None:
    if values and max(map(len, values)) > limit:
        at, size = next((i, len(v)) for i, v in enumerate(values) if len(v) > limit)
        name = names.format(at, field)
        raise InvalidArgument(f"{name} has {size} bytes, at most {limit}", field=name, limit=limit)


def _check_range(
    values: Sequence[int] | None, bounds: tuple[int, int], names: str, field: str
) -> None:
    low, high = bounds
    if values and (min(values) < low or max(values) > high):
        at, value = next((i, v) for i, v in enumerate(values) if not low <= v <= high)
        name = names.format(at, field)
        raise InvalidArgument(
            f"{name} is {value}, must be from {max(low, 0)} to {high}", field=name, limit=high
        )


Waiter = tuple[Entry, "asyncio.Future[EnqueuedAnswer]"]


class Coalescer:
    def __init__(self, connection: Connection, topic: str, *, bytes_max: int) -> None:
        self._connection = connection
        self._topic = topic
        self._bytes_max = bytes_max
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Waiter] = deque()
        self._flights = 0
        self._scheduled = False

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._flights

    def put(self, entry: Entry) -> asyncio.Future[EnqueuedAnswer]:
        future: asyncio.Future[EnqueuedAnswer] = self._loop.create_future()
        self._waiting.append((entry, future))
        self._schedule()
        return future

    def _schedule(self) -> None:
        if self._waiting and self._flights < FLIGHTS_MAX and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._launch)

    def _launch(self) -> None:
        self._scheduled = False
        self._send(self._take())
        self._schedule()

    def _take(self) -> list[Waiter]:
        taken: list[Waiter] = []
        size = 0
        while self._waiting and len(taken) < FLIGHT_ENTRIES_MAX:
            entry = self._waiting[0][0]
            size += len(entry.payload) + len(entry.key) + len(entry.headers)
            if taken and size > self._bytes_max:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _send(self, flight: list[Waiter]) -> None:
        self._flights += 1
        try:
            body = GatewayEntries.of([entry for entry, _ in flight]).body()
            request = Enqueue(self._topic, [Part(0, len(flight), len(body))], partitioned=False)
            answer = self._connection.ask(FrameType.BATCH, Enqueued, pack(request), body)
        except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
            self._flights -= 1
            refuse(flight, error)
            return
        answer.add_done_callback(lambda done: self._land(flight, done))

    def _land(self, flight: list[Waiter], answer: asyncio.Future[Enqueued]) -> None:
        self._flights -= 1
        error = answer.exception()
        if error is None:
            try:
                settle(flight, answer.result())
            except Exception as wrong:  # noqa: BLE001 - it is told to those who wait for it
                refuse(flight, wrong)
        elif len(flight) > 1 and isinstance(error, InvalidArgument | StaleProducer):
            for waiter in flight:
                self._send([waiter])
        else:
            refuse(flight, error)
        self._schedule()


def settle(flight: list[Waiter], enqueued: Enqueued) -> None:
    ids = ids_in(enqueued, len(flight))
    known = {duplicate.index for duplicate in enqueued.duplicates}
    for position, ((_, future), message_id) in enumerate(zip(flight, ids, strict=True)):
        if not future.done():
            answer = EnqueuedAnswer(message_id=message_id, duplicate=position in known)
            future.set_result(answer)


def refuse(flight: list[Waiter], error: BaseException) -> None:
    """Each waiter gets an exception of its own, for each adds its own traceback to it."""
    for _, future in flight:
        if not future.done():
            own = from_wire(error.to_wire()) if isinstance(error, PenstockError) else error
            future.set_exception(own)


Connect = Callable[[str | None], Awaitable[Connection]]
KEYS_MAX: Final = 256  # connections kept, one per API key
CONFIGS_MAX: Final = 1024
CONFIG_S: Final = 2.0  # for which a topic's configuration is believed
FRAME_SLACK: Final = 64 << 10  # for offsets, numbers and the control message of a frame


class GatewayLink:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # What one native enqueue may hold, with room for its offsets and numbers.
        self.body_bytes_max = connection.welcome.payload_bytes_max - FRAME_SLACK
        self._coalescers: dict[tuple[str, bool], Coalescer] = {}  # kept while they have work
        self.users = 0  # requests that hold it; a link in use is not evicted
        self._configs: dict[str, tuple[TopicConfig, float]] = {}
        self._loop = asyncio.get_running_loop()

    async def config(self, topic: str) -> TopicConfig:
        """The topic's configuration, at most `CONFIG_S` old; raises `NotFound`."""
        found = self._configs.get(topic)
        if found is not None and self._loop.time() < found[1]:
            return found[0]
        fields = await self.call("topic_get", topic=topic)
        config = msgspec.convert(fields, TopicConfig)
        if len(self._configs) >= CONFIGS_MAX:
            self._configs.clear()
        self._configs[topic] = (config, self._loop.time() + CONFIG_S)
        return config

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """An administrative call that carries the id of the request it serves."""
        return await self.connection.call(method, request_id=request_id.get(), **arguments)

    def forget(self, topic: str) -> None:
        """Ask again next time: the topic is not what it was believed to be."""
        self._configs.pop(topic, None)

    async def put(self, topic: str, entry: Entry) -> EnqueuedAnswer:
        """Enqueue one message, together with what else is on its way to the topic."""
        entry.check(await self.config(topic), bytes_max=self.body_bytes_max)
        try:
            return await self.coalescer(topic, entry).put(entry)
        except CallerError:
            self.forget(topic)
            raise

    def coalescer(self, topic: str, entry: Entry) -> Coalescer:
        """For entries without a producer key, or for those with one."""
        place = topic, entry.run is None
        found = self._coalescers.get(place)
        if found is None:
            self._coalescers = {p: one for p, one in self._coalescers.items() if not one.idle}
            bytes_max = min(self.body_bytes_max, FLIGHT_BYTES_MAX)
            found = Coalescer(self.connection, topic, bytes_max=bytes_max)
            self._coalescers[place] = found
        return found

    async def put_batch(
        self, topic: str, entries: GatewayEntries, *, atomic: bool, expected_sequence: int | None
    ) -> dict[str, Any]:
        config = await self.config(topic)
        entries.check(config)
        if entries.size > self.body_bytes_max:
            raise InvalidArgument(
                f"the messages are over {self.body_bytes_max} bytes together",
                field="messages",
                limit=self.body_bytes_max,
            )
        count = len(entries.payloads)
        partition = 0 if expected_sequence is None else entries.partition(config)
        try:
            enqueued = await self.connection.enqueue(
                topic,
                [(partition, count, entries.body())],
                atomic=atomic,
                expected_sequence=expected_sequence,
                partitioned=expected_sequence is not None,
            )
        except CallerError:
            self.forget(topic)
            raise
        return {
            "message_ids": ids_in(enqueued, count),
            "duplicates": [known.index for known in enqueued.duplicates],
            "sequence_last": _sequence_last(enqueued),
        }

    def __enter__(self) -> None:
        self.users += 1

    def __exit__(self, *error: object) -> None:
        self.users -= 1


class Pool:
    """Links by key, least recently used first. Invariant: never more than `keys_max`."""

    def __init__(self, connect: Connect, *, keys_max: int = KEYS_MAX) -> None:
        self._connect = connect
        self._keys_max = keys_max
        self._links: OrderedDict[bytes, GatewayLink] = OrderedDict()
        self._opening: dict[bytes, asyncio.Lock] = {}
        self._closed = False

    async def link(self, api_key: str | None) -> GatewayLink:
        """The living link of a key; raises `Unauthenticated` when the engine refuses it."""
        place = _place(api_key)
        found = self._links.get(place)
        if found is not None and found.connection.alive:
            self._links.move_to_end(place)
            return found
        return await self._open(place, api_key)

    async def connect(self, api_key: str | None) -> Connection:
        """A connection apart, for a caller that keeps streams open; it is the caller's to close."""
        if self._closed:
            raise Unavailable("the gateway stops")
        return await self._connect(api_key)

    async def close(self) -> None:
        self._closed = True
        links, self._links = self._links, OrderedDict()
        for link in links.values():
            await link.connection.close()

    async def _open(self, place: bytes, api_key: str | None) -> GatewayLink:
        if api_key is not None and len(api_key) > TEXT_LENGTH_MAX:
            raise Unauthenticated("the API key is not valid")  # no greeting could carry it
        lock = self._opening.setdefault(place, asyncio.Lock())
        try:
            async with lock:
                found = self._links.get(place)
                if found is not None and found.connection.alive:
                    return found
                self._links.pop(place, None)
                connection = await self._connect(api_key)
                return await self._keep(place, connection)
        finally:
            if not lock.locked():
                self._opening.pop(place, None)

    async def _keep(self, place: bytes, connection: Connection) -> GatewayLink:
        if self._closed:
            await connection.close()
            raise Unavailable("the gateway stops")
        idle = [p for p, link in self._links.items() if not link.users]
        if len(self._links) >= self._keys_max and not idle:
            await connection.close()
            raise LimitExceeded(f"{self._keys_max} API keys are in use", limit=self._keys_max)
        link = GatewayLink(connection)
        self._links[place] = link
        if len(self._links) > self._keys_max:
            await self._links.pop(idle[0]).connection.close()
        return link


def _sequence_last(enqueued: Enqueued) -> int | None:
    """What the next call of a writer that is alone in its partition expects."""
    placed = enqueued.placed
    if len({run.partition for run in placed}) != 1:
        return None
    return max(run.sequence + run.count - 1 for run in placed)


def _place(api_key: str | None) -> bytes:
    """A digest, so that looking a key up takes as long whatever of it is right."""
    return b"" if api_key is None else hashlib.sha256(api_key.encode()).digest()
