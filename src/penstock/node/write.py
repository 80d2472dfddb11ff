"""What partitions are asked to write: the bodies of enqueues, requests, and the answers to them.

A body is checked as it came, placed, merged and cut. A request has a part for each partition that
it goes to, and is answered once all of them are. A partition turns parts into batches of its log
(`node.serve.partition`). Nothing here knows of sockets or of other nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, InvalidArgument, PenstockError, from_wire
from penstock.model.batch import DeadReason
from penstock.model.columns import RUNS_MAX, Binary, Buffer, Columns, Domain, Value
from penstock.model.delta_batch import DeltaBatch, explain
from penstock.model.delta_checks import validate
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    ENQ,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    PRODUCER_NUMBER_MAX,
    RETRIES_MAX,
)
from penstock.model.ids import partitions_of, partitions_of_deltas, partitions_of_digests
from penstock.model.plain import fault_in
from penstock.model.topic import TopicConfig
from penstock.wire.messages import Duplicate, Enqueued, Placed

_ENTRY_FIXED: Final = tuple(
    c.name
    for c in ENQ.columns
    if c.domain is Domain.ENTRY and not c.binary and c.name != "sequence"
)
_ENTRY_BINARY: Final = tuple(c.name for c in ENQ.columns if c.domain is Domain.ENTRY and c.binary)
_BYTES_MAX: Final = (
    ("key", KEY_BYTES_MAX),
    ("headers", HEADERS_BYTES_MAX),
    ("run_producer", PRODUCER_ID_BYTES_MAX),
)
_RANGES: Final = (("delay_ms", 0, DELAY_MS_MAX), ("max_retries", -1, RETRIES_MAX))
FEW: Final = 20  # deltas that are looked at one by one
_MEANINGLESS: Final = ("delay_ms", "max_retries")  # where nothing is ever leased
# What a token takes in a record, and what a return takes once more when some of it is dead.
ACK_BYTES, EXTEND_BYTES, RETURN_BYTES, RETURN_BYTES_APART = 8, 16, 32, 256
REASONS_BYTES_MAX: Final = 1 << 20  # of one request; what very many share is cut short
Reply = Callable[[object], None]  # called once, with a result or a PenstockError


def check_body(body: Buffer, count: int, config: TopicConfig) -> Columns:
    """Decode an untrusted ENQ body and hold it against the topic's limits."""
    if not 1 <= count <= BATCH_ENTRIES_MAX:
        raise InvalidArgument(
            f"a batch has {count} entries, must be from 1 to {BATCH_ENTRIES_MAX}",
            field="entries",
            limit=BATCH_ENTRIES_MAX,
        )
    try:
        columns = ENQ.decode(body, count)
        columns.validate()
    except Corruption as error:
        raise InvalidArgument(f"malformed batch: {error.message}", field="body") from error
    if "sequence" in columns.views:
        raise InvalidArgument("a batch must not name its sequences", field="sequence")
    for name, limit in (("payload", config.payload_bytes_max), *_BYTES_MAX):
        if len(body) > limit:  # else none of its values can be
            _check_sizes(columns, name, limit)
    if "headers" in columns.views:
        _check_headers(columns)
    for name, low, high in _RANGES:
        if name in columns.views:
            _check_range(columns, name, low, high)
    if columns.runs:
        _check_runs(columns)
    return columns


def _check_runs(columns: Columns) -> None:
    counts = columns.views.get("run_count")
    if counts is None or sum(counts) != columns.count:
        raise InvalidArgument("producer runs do not cover the batch", field="run_count")
    if "run_producer" not in columns.views:
        raise InvalidArgument("producer runs name no producer", field="run_producer")
    epochs, firsts = columns.views.get("run_epoch"), columns.views.get("run_sequence")
    if epochs is not None and max(epochs) > PRODUCER_NUMBER_MAX:
        raise _too_large("run_epoch")
    if firsts is not None and any(
        first + count > PRODUCER_NUMBER_MAX for first, count in zip(firsts, counts, strict=True)
    ):
        raise _too_large("run_sequence")


def _too_large(field: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is over {PRODUCER_NUMBER_MAX}", field=field, limit=PRODUCER_NUMBER_MAX
    )


def _check_sizes(columns: Columns, name: str, limit: int) -> None:
    if name not in columns.blobs or len(columns.blobs[name]) <= limit:
        return
    ends = np.asarray(columns.views[name])
    sizes = np.diff(ends)
    if int(sizes.max()) > limit:
        index = int(sizes.argmax())
        raise InvalidArgument(
            f"{name} of entry {index} has {int(sizes[index])} bytes, at most {limit}",
            field=name,
            limit=limit,
            index=index,
        )


def _check_headers(columns: Columns) -> None:
    """Refuse headers that somebody who gets the message could not read."""
    column = columns.binary("headers")
    assert column is not None
    found = fault_in(column)
    if found is not None:
        index, fault = found
        raise InvalidArgument(
            f"headers of entry {index} are not a msgpack map of plain values: {fault.text}",
            field="headers",
            limit=fault.limit,
            index=index,
        )


def _check_range(columns: Columns, name: str, low: int, high: int) -> None:
    values = columns.fixed(name)
    if int(values.min()) < low or int(values.max()) > high:
        raise InvalidArgument(f"{name} must be from {low} to {high}", field=name, limit=high)


def homes_of_entries(columns: Columns, partitions: int, *, fallback: int) -> NDArray[np.int64]:
    """Where each entry goes: by key, else by producer sequence, else to `fallback`."""
    if partitions == 1:
        return np.zeros(columns.count, np.int64)
    keys = columns.binary("key")
    names = [b""] * columns.count if keys is None else list(keys)
    keyless = [i for i, key in enumerate(names) if not key]
    if keyless and columns.runs:
        producer, sequence, run = producer_entries(columns)
        for i in keyless:
            if producer[run[i]]:
                names[i] = b"%s:%d" % (producer[run[i]], sequence[i])
    where = partitions_of(names, partitions)
    where[[i for i in keyless if not names[i]]] = fallback
    return where


def homes_of_deltas(columns: Columns, config: TopicConfig, *, now_ms: int) -> NDArray[np.int64]:
    """The partition of each delta's vector; raises for the first that is no valid delta."""
    payloads = columns.binary("payload")
    if payloads is None:
        raise InvalidArgument("a delta has no payload", field="payload")
    for name in _MEANINGLESS:
        if name in columns.views and (columns.fixed(name) > 0).any():
            raise InvalidArgument(f"{name} has no meaning in a delta topic", field=name, limit=0)
    if len(payloads) <= FEW:
        return _homes_of_few(payloads, config, now_ms)
    deltas = DeltaBatch.of(payloads)
    validate(deltas, dimensions=config.dimensions, now_ms=now_ms)
    return partitions_of_digests(np.ascontiguousarray(deltas.vector[:, 0]), config.partitions)


def _homes_of_few(payloads: Binary, config: TopicConfig, now_ms: int) -> NDArray[np.int64]:
    """The same without columns, which take longer to set up than a few deltas to check."""
    rows = payloads.tolist()
    for row, payload in enumerate(rows):
        explain(payload, row, dimensions=config.dimensions, now_ms=now_ms)
    if config.partitions == 1:
        return np.zeros(len(rows), np.int64)
    return partitions_of_deltas(rows, config.partitions)


def check_partition(homes: NDArray[np.int64], partition: int, partitions: int) -> None:
    """Refuse a part whose producer has another idea of where its vectors belong."""
    if partitions == 1:
        return
    wrong = homes != partition
    if wrong.any():
        raise InvalidArgument(
            f"delta {int(np.argmax(wrong))}: its vector does not belong in partition {partition}",
            field="partition",
            limit=partitions - 1,
        )


def merge(bodies: Sequence[Columns]) -> bytes:
    """One body with the entries of all, in order: what many small enqueues become in the log."""
    values: dict[str, Value | None] = {}
    for name in _ENTRY_FIXED:
        if any(name in c.views for c in bodies):
            values[name] = np.concatenate([c.fixed(name) for c in bodies])
    for name in _ENTRY_BINARY:
        if any(name in c.views for c in bodies):
            values[name] = _concat([(c.binary(name), c.count) for c in bodies])
    runs = 0
    if any(c.runs for c in bodies):
        runs = sum(c.runs or 1 for c in bodies)
        values["run_count"] = np.concatenate(
            [c.fixed("run_count") if c.runs else np.array([c.count], np.uint32) for c in bodies]
        )
        for name in ("run_epoch", "run_sequence"):
            values[name] = np.concatenate(
                [c.fixed(name) if c.runs else np.zeros(1, np.uint64) for c in bodies]
            )
        values["run_producer"] = _concat([(c.binary("run_producer"), c.runs or 1) for c in bodies])
    return ENQ.encode(sum(c.count for c in bodies), values, runs=runs)


def _concat(cells: Sequence[tuple[Binary | None, int]]) -> Binary:
    sizes = [np.zeros(n, np.int32) if c is None else np.diff(c.offsets) for c, n in cells]
    offsets = np.zeros(sum(map(len, sizes)) + 1, np.int32)
    np.cumsum(np.concatenate(sizes), out=offsets[1:])
    return Binary(offsets, b"".join(c.blob for c, _ in cells if c is not None))


def subset(columns: Columns, indices: NDArray[np.int64]) -> bytes:
    """The body with only the entries at `indices` (ascending)."""
    values: dict[str, Value | None] = {
        name: columns.fixed(name)[indices] for name in _ENTRY_FIXED if name in columns.views
    }
    for name in _ENTRY_BINARY:
        cell = columns.binary(name)
        if cell is not None:
            values[name] = cell.take(indices)
    if columns.runs:
        values |= _run_subset(columns, indices)
    runs = values.get("run_count")
    return ENQ.encode(len(indices), values, runs=0 if runs is None else len(runs))


def _run_subset(columns: Columns, indices: NDArray[np.int64]) -> dict[str, Any]:
    """Runs of the chosen entries: a run stays one only where its entries stay neighbours."""
    producer, sequence, run = producer_entries(columns)
    chosen_run, chosen_sequence = run[indices], sequence[indices]
    breaks = np.flatnonzero((np.diff(chosen_run) != 0) | (np.diff(chosen_sequence) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    if len(starts) > RUNS_MAX:
        raise InvalidArgument("too many producer runs", field="run_count", limit=RUNS_MAX)
    first_run = chosen_run[starts]
    return {
        "run_count": np.diff(np.append(starts, len(indices))),
        "run_epoch": columns.fixed("run_epoch")[first_run],
        "run_sequence": chosen_sequence[starts],
        "run_producer": [producer[i] for i in first_run.tolist()],
    }


def producer_entries(columns: Columns) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64]]:
    """Producer ids by run, and for each entry its producer sequence and its run."""
    counts = columns.fixed("run_count").astype(np.int64)
    run = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    sequence = columns.fixed("run_sequence").astype(np.int64)[run] + (
        np.arange(columns.count) - starts[run]
    )
    producers = columns.binary("run_producer")
    return ([] if producers is None else list(producers)), sequence, run


def as_one(errors: Sequence[PenstockError], parts: int) -> PenstockError:
    """The first of what some parts of a request failed with, as the answer to all of it. It says
    `elsewhere`, which means that nothing was done, only if every part does."""
    first = errors[0]
    undone = [error for error in errors if error.details.get("elsewhere")]
    if "elsewhere" not in first.details or len(undone) == parts:
        return first
    return from_wire({n: value for n, value in first.to_wire().items() if n != "elsewhere"})


class Gathered:
    """A request's results, which come in any order; `whole` makes one answer of them, in order."""

    __slots__ = ("_remaining", "_reply", "_results", "_whole")

    def __init__(self, parts: int, whole: Callable[[list[object]], object], reply: Reply) -> None:
        self._results: list[object] = [None] * parts
        self._remaining, self._whole, self._reply = parts, whole, reply

    def part(self, index: int) -> Reply:

        def done(result: object) -> None:
            self._results[index] = result
            self._remaining -= 1
            if not self._remaining:
                self._reply(self._whole(self._results))

        return done


class EnqueueRequest:
    """Answered once all of its parts are, which are made before any of them is handed on."""

    __slots__ = (
        "_duplicates", "_ended", "_errors", "_placed", "parts", "reply", "started", "topic",
    )  # fmt: skip

    def __init__(self, topic: int, reply: Reply) -> None:
        self.topic, self.reply = topic, reply
        self.started = time.perf_counter()
        self.parts = self._ended = 0
        self._placed: list[Placed] = []
        self._duplicates: list[Duplicate] = []
        self._errors: list[PenstockError] = []

    def part_placed(self, placed: Sequence[Placed], duplicates: Sequence[Duplicate] = ()) -> None:
        self._placed.extend(placed)
        self._duplicates.extend(duplicates)
        self._ended += 1
        if self._ended < self.parts:
            return
        if self._errors:
            self.reply(as_one(self._errors, self.parts))
        else:
            self._duplicates.sort(key=lambda known: known.index)  # parts end in any order
            self.reply(Enqueued(self.topic, self._placed, self._duplicates))

    def part_failed(self, error: PenstockError) -> None:
        self._errors.append(error)
        self.part_placed(())


class EnqueuePart:
    """One partition's share. `indices` are its entries' places in the request."""

    __slots__ = (
        "body", "codec", "columns", "count", "expected_sequence", "indices", "known", "request",
    )  # fmt: skip

    def __init__(
        self,
        request: EnqueueRequest,
        columns: Columns,
        *,
        indices: NDArray[np.int64] | range,
        body: Buffer,
        codec: int = 0,
        expected_sequence: int | None = None,
    ) -> None:
        request.parts += 1
        self.request, self.columns, self.count = request, columns, columns.count
        self.indices = indices
        self.body, self.codec = body, codec  # as received, compressed or not
        self.expected_sequence = expected_sequence
        self.known: list[Duplicate] = []

    def fail(self, error: PenstockError) -> None:
        self.request.part_failed(error)

    def leave_out(self, duplicates: list[tuple[int, int, int]], partition: int) -> None:
        """Entries were written before: they are answered as they were then, and only the others are
        written now. `duplicates` are their places here, sequences and times."""
        indices = np.asarray(self.indices, np.int64)
        self.known = [
            Duplicate(int(indices[i]), partition, sequence, time_ms)
            for i, sequence, time_ms in duplicates
        ]
        fresh = np.delete(np.arange(self.count), [i for i, _, _ in duplicates])
        self.indices, self.count = indices[fresh], len(fresh)
        if self.count:
            self.body, self.codec = subset(self.columns, fresh), 0
            self.columns = ENQ.decode(self.body, self.count)

    def placed(self, partition: int, first: int, time_ms: int) -> list[Placed]:
        if isinstance(self.indices, range):
            return [Placed(self.indices.start, self.count, partition, first, time_ms)]
        return stretches(self.indices, np.arange(first, first + self.count), partition, time_ms)


def stretches(
    indices: NDArray[np.int64], sequences: NDArray[np.int64], partition: int, time_ms: int
) -> list[Placed]:
    """Describe entries by the stretches in which index and sequence run on together."""
    breaks = np.flatnonzero((np.diff(indices) != 1) | (np.diff(sequences) != 1)) + 1
    starts = np.concatenate([[0], breaks]).astype(np.int64)
    counts = np.diff(np.append(starts, len(indices)))
    return [
        Placed(i, n, partition, s, time_ms)
        for i, n, s in zip(
            indices[starts].tolist(), counts.tolist(), sequences[starts].tolist(), strict=True
        )
    ]


@dataclass(slots=True, eq=False)
class TokenRequest:
    """Leases of one partition to acknowledge; `reply` gets the lost positions."""

    tokens: NDArray[np.uint64]
    reply: Reply

    @property
    def count(self) -> int:
        return len(self.tokens)

    def fail(self, error: PenstockError) -> None:
        self.reply(error)

    def record_bytes(self, count: int) -> int:
        return count * ACK_BYTES


@dataclass(slots=True, eq=False, kw_only=True)
class ReturnRequest(TokenRequest):
    delay_ms: int | None = None
    reject: bool = False
    counted: bool = True
    reason: bytes = b""
    cause: DeadReason = DeadReason.REJECTED  # of death, if it is rejected

    def reason_for(self, count: int) -> bytes:
        return self.reason[: REASONS_BYTES_MAX // count]

    def record_bytes(self, count: int) -> int:
        return count * (RETURN_BYTES + len(self.reason_for(count))) + RETURN_BYTES_APART


@dataclass(slots=True, eq=False, kw_only=True)
class ExtendRequest(TokenRequest):
    extend_ms: int

    def record_bytes(self, count: int) -> int:
        return count * EXTEND_BYTES


def unused(tokens: NDArray[np.uint64] | range, *, delay_ms: int = 0) -> ReturnRequest:
    """Leases end whose messages nobody was told of, and no attempt is counted."""
    return ReturnRequest(np.asarray(tokens, np.uint64), ignore, delay_ms=delay_ms, counted=False)


def ignore(_: object) -> None:
    """Nobody waits for this answer."""
