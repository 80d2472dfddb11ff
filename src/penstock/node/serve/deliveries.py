"""From a lease to its delivery: the LEASE record, its commit, the payloads out of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.log.crash import crash_point
from penstock.model.batch import Batch, DeadReason
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics
from penstock.node.serve.message_reader import MessageRows
from penstock.node.serve.partition import Partition
from penstock.node.serve.streams import ConsumerStream
from penstock.node.write.settler import ReturnRequest, ignore, unused
from penstock.wire.limits import ANSWER_BYTES_MAX
from penstock.wire.messages import Delivery

UNREADABLE_MS: Final = 5_000  # until a message whose bytes are damaged is tried once more
SEQUENCES_TOLD: Final = 10  # of unreadable messages in one line of the log
log = get_logger(__name__)


class LeasedPart(NamedTuple):
    """Messages of one delivery: part of a LEASE batch, or all of it."""

    partition: Partition
    batch: Batch
    token_first: int
    messages: NDArray[np.uint64]
    visibility_ms: int

    def part(self, start: int, end: int) -> LeasedPart:
        return self._replace(
            token_first=self.token_first + start, messages=self.messages[start:end]
        )


class Deliveries:
    """Leases messages of one topic to streams and sends them once that is committed."""

    def __init__(
        self,
        topic: str,
        *,
        metrics: Metrics,
        on_damage: Callable[[PenstockError], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._topic, self._metrics = topic, metrics
        self._on_damage, self._on_fatal = on_damage, on_fatal
        self._loop = asyncio.get_running_loop()

    def lease(
        self,
        stream: ConsumerStream,
        partition: Partition,
        messages: NDArray[np.uint64],
        *,
        visibility_ms: int,
    ) -> int:
        started = time.perf_counter()
        batch = partition.lease(messages, consumer=stream.consumer, visibility_ms=visibility_ms)
        stream.on_leased(len(messages))

        def committed() -> None:
            for at in range(0, len(messages), stream.batch_max):
                part = messages[at : at + stream.batch_max]
                lease = LeasedPart(partition, batch, batch.first + at, part, visibility_ms)
                self._deliver(stream, lease)
            seconds = time.perf_counter() - started
            self._metrics.pop_seconds.observe((self._topic,), seconds, len(messages))

        partition.journal.when_committed(batch.last, committed)
        return len(messages)

    def _deliver(
        self, stream: ConsumerStream, lease: LeasedPart, rows: MessageRows | None = None
    ) -> None:
        partition, messages = lease.partition, lease.messages
        if not stream.open:
            _give_back(lease, delay_ms=0)
            return
        crash_point("node.lease.undelivered")
        sequences: list[int] = messages.tolist()
        try:
            rows = rows or partition.reader.gather(sequences)
            if rows is None:
                loading = self._loop.run_in_executor(
                    None, partition.reader.load, sequences, ANSWER_BYTES_MAX
                )
                loading.add_done_callback(lambda done: self._on_loaded(done, stream, lease))
                return
            if len(sequences) > 1 and rows.exceed(ANSWER_BYTES_MAX):
                self._deliver_halves(stream, lease)
                return
            faults = rows.faults()
            body = b"" if faults else rows.encode(partition.heap.attempts(messages))
        except Exception as error:  # noqa: BLE001 - nothing that is stored may end the node
            self._on_error(stream, lease, error)
            return
        if faults:
            self._deliver_readable(stream, lease, faults)
            return
        delivery = Delivery(
            partition.index, lease.batch.epoch, lease.token_first, len(messages),
            lease.batch.time_ms - partition.ahead_ms + lease.visibility_ms, lease.visibility_ms,
            lease.batch.topic,
        )  # fmt: skip
        stream.send(delivery, body)

    def _on_error(self, stream: ConsumerStream, lease: LeasedPart, error: BaseException) -> None:
        """Something of it cannot be read. Its halves are tried by themselves, until it is known
        which messages those are: their neighbours are delivered."""
        if not isinstance(error, Exception) or isinstance(error, OSError):
            self._on_fatal(error)
        elif len(lease.messages) > 1:
            self._deliver_halves(stream, lease)
        elif isinstance(error, MemoryError):  # which is the node's trouble, and may pass
            _give_back(lease, delay_ms=UNREADABLE_MS)
        elif isinstance(error, PenstockError):
            # A damaged message goes back, and no try is counted: it is no fault of the message, and
            # another replica may have it whole.
            self._on_damage(error)
            _give_back(lease, delay_ms=UNREADABLE_MS)
            if stream.fail is not None:
                stream.fail(error)
        else:
            self._deliver_readable(stream, lease, {0: f"{type(error).__name__}: {error}"})

    def _deliver_readable(
        self, stream: ConsumerStream, lease: LeasedPart, faults: dict[int, str]
    ) -> None:
        """Make dead letters of the messages that nobody could read, and deliver the others."""
        stream.unreadable += len(faults)
        for why in sorted(set(faults.values())):
            rows = np.array([row for row, fault in faults.items() if fault == why])
            lease.partition.settle(
                ReturnRequest(
                    (rows + lease.token_first).astype(np.uint64), ignore, reject=True,
                    reason=why.encode(), cause=DeadReason.UNREADABLE,
                )
            )  # fmt: skip
            log.error(
                "messages cannot be read",
                topic=self._topic,
                partition=lease.partition.index,
                sequences=lease.messages[rows[:SEQUENCES_TOLD]].tolist(),
                count=len(rows),
                why=why,
            )
        sound = np.array([row for row in range(len(lease.messages)) if row not in faults], int)
        for some in np.split(sound, np.flatnonzero(np.diff(sound) != 1) + 1):
            if len(some):
                self._deliver(stream, lease.part(int(some[0]), int(some[-1]) + 1))

    def _deliver_halves(self, stream: ConsumerStream, lease: LeasedPart) -> None:
        """What cannot go as one delivery goes as two, each of which may be halved again."""
        half = len(lease.messages) // 2
        self._deliver(stream, lease.part(0, half))
        self._deliver(stream, lease.part(half, len(lease.messages)))

    def _on_loaded(
        self, done: asyncio.Future[MessageRows | None], stream: ConsumerStream, lease: LeasedPart
    ) -> None:
        error = done.exception()
        if error is None and (rows := done.result()) is None:
            self._deliver_halves(stream, lease)
        elif error is None:
            self._deliver(stream, lease, rows)
        else:
            self._on_error(stream, lease, error)


def _give_back(lease: LeasedPart, *, delay_ms: int) -> None:
    first = lease.token_first
    tokens = np.arange(first, first + len(lease.messages), dtype=np.uint64)
    lease.partition.settle(unused(tokens, delay_ms=delay_ms))
