"""From a lease to its delivery: the LEASE record, its commit, the payloads out of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.log.crash import crash_point
from penstock.model.batch import Batch
from penstock.node.metrics import Metrics
from penstock.node.partition import Partition
from penstock.node.reading import Rows
from penstock.node.requests import ReturnRequest
from penstock.node.streams import LeaseStream
from penstock.wire.messages import Delivery

UNREADABLE_MS: Final = 5_000  # until a message whose bytes are damaged is tried once more


class Lease(NamedTuple):
    """Messages of one delivery: part of a LEASE batch, or all of it."""

    partition: Partition
    batch: Batch
    token_first: int
    messages: NDArray[np.uint64]
    visibility_ms: int


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
        stream: LeaseStream,
        partition: Partition,
        messages: NDArray[np.uint64],
        *,
        visibility_ms: int,
    ) -> int:
        """Lease ready messages to a stream; returns how many."""
        started = time.perf_counter()
        batch = partition.lease(messages, consumer=stream.consumer, visibility_ms=visibility_ms)
        stream.on_leased(len(messages))

        def committed() -> None:
            for at in range(0, len(messages), stream.batch_max):
                part = messages[at : at + stream.batch_max]
                lease = Lease(partition, batch, batch.first + at, part, visibility_ms)
                self._deliver(stream, lease)
            self._metrics.popped(self._topic, len(messages), time.perf_counter() - started)

        partition.journal.when_committed(batch.last, committed)
        return len(messages)

    def _deliver(self, stream: LeaseStream, lease: Lease, rows: Rows | None = None) -> None:
        partition, messages = lease.partition, lease.messages
        if not stream.open:
            _give_back(lease, delay_ms=0)
            return
        crash_point("node.lease.undelivered")
        sequences: list[int] = messages.tolist()
        if rows is None:
            try:
                rows = partition.reader.gather(sequences, nowait=True)
            except PenstockError as error:
                self._on_unreadable(stream, lease, error)
                return
        if rows is None:
            loading = self._loop.run_in_executor(None, partition.reader.load, sequences)
            loading.add_done_callback(lambda done: self._on_loaded(done, stream, lease))
            return
        attempts = partition.heap.attempts(messages)
        delivery = Delivery(
            partition.index, lease.batch.epoch, lease.token_first, len(messages),
            lease.batch.time_ms - partition.ahead_ms + lease.visibility_ms, lease.visibility_ms,
        )  # fmt: skip
        stream.send(delivery, rows.encode(attempts))

    def _on_unreadable(self, stream: LeaseStream, lease: Lease, error: PenstockError) -> None:
        """Deliver what can be read of it. The rest goes back, and no try is counted: it is no fault
        of the message, and another replica may have it whole."""
        if len(lease.messages) > 1:
            half = len(lease.messages) // 2
            first, second = lease.messages[:half], lease.messages[half:]
            self._deliver(stream, lease._replace(messages=first))
            token = lease.token_first + half
            self._deliver(stream, lease._replace(token_first=token, messages=second))
            return
        self._on_damage(error)
        _give_back(lease, delay_ms=UNREADABLE_MS)
        if stream.fail is not None:
            stream.fail(error)

    def _on_loaded(self, done: asyncio.Future[Rows], stream: LeaseStream, lease: Lease) -> None:
        error = done.exception()
        if error is None:
            self._deliver(stream, lease, done.result())
        elif isinstance(error, PenstockError):
            self._on_unreadable(stream, lease, error)
        else:
            self._on_fatal(error)


def _give_back(lease: Lease, *, delay_ms: int) -> None:
    first = lease.token_first
    tokens = np.arange(first, first + len(lease.messages), dtype=np.uint64)
    lease.partition.settling.give_back(
        ReturnRequest(tokens, _ignore, delay_ms=delay_ms, counted=False)
    )


def _ignore(_: Any) -> None:
    """Nobody waits for this answer."""
