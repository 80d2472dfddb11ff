"""Messages on their way in: checked against the topic, then laid out as the columns of an ENQ body.

Both listeners reduce what they were sent to an `Entry`, or to `GatewayEntries`, a list per column.
`check` finds the first value over its limit with a few passes over whole columns, and names it as
the caller wrote it; nothing reaches the log before it has passed.

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
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.network.connection import Connection
from penstock.client.queue.producer import ids_in
from penstock.errors import InvalidArgument, PenstockError, StaleProducer, from_wire
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
from penstock.model.partitioning import partitions_of, partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind
from penstock.wire.frame import FrameType
from penstock.wire.messages import Enqueue, Enqueued, Part, pack

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
        """Raise `InvalidArgument` for the first value over its limit."""
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
        """How many bytes the body will have, nearly, without making it."""
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


class Written(NamedTuple):
    message_id: str
    duplicate: bool


Waiter = tuple[Entry, "asyncio.Future[Written]"]


class Coalescer:
    """The single enqueues of one topic over one connection."""

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

    def put(self, entry: Entry) -> asyncio.Future[Written]:
        future: asyncio.Future[Written] = self._loop.create_future()
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


class Desk:
    """The coalescers of one connection, kept while they have work."""

    def __init__(self, connection: Connection, *, bytes_max: int) -> None:
        self._connection = connection
        self._bytes_max = bytes_max
        self._coalescers: dict[tuple[str, bool], Coalescer] = {}

    def put(self, topic: str, entry: Entry) -> asyncio.Future[Written]:
        place = (topic, entry.run is None)
        found = self._coalescers.get(place)
        if found is None:
            self._sweep()
            found = self._coalescers[place] = Coalescer(
                self._connection, topic, bytes_max=self._bytes_max
            )
        return found.put(entry)

    def _sweep(self) -> None:
        idle = [place for place, coalescer in self._coalescers.items() if coalescer.idle]
        for place in idle:
            del self._coalescers[place]


def settle(flight: list[Waiter], enqueued: Enqueued) -> None:
    ids = ids_in(enqueued, len(flight))
    known = {duplicate.index for duplicate in enqueued.duplicates}
    for position, ((_, future), message_id) in enumerate(zip(flight, ids, strict=True)):
        if not future.done():
            future.set_result(Written(message_id, position in known))


def refuse(flight: list[Waiter], error: BaseException) -> None:
    """Each waiter gets an exception of its own, for each adds its own traceback to it."""
    for _, future in flight:
        if not future.done():
            own = from_wire(error.to_wire()) if isinstance(error, PenstockError) else error
            future.set_exception(own)
