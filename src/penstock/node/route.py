"""The way to a partition that another node serves, shared by all of a node's topics.

A topic has a port for each of its partitions: the `Partition` itself where this node serves it, a
`RemotePartition` elsewhere. Whoever hands requests over need not know which of the two it is. A
`RemotePartition` makes an errand of each request, which the router sends.

An *errand* is one partition's share of a request. Errands for one node gather until the end of the
loop's turn and then share frames; each gets an outcome of its own back, so that a partition that
refuses does not fail its neighbours. Three things can go wrong:

- Nobody is known to serve the partition, or the node that is known says that it does not: nothing
  has happened. The errand waits for a change, at most `WAIT_S`, and is sent again; if this node is
  cut off, it does not wait, and who asked is told to go `elsewhere`.
- The partition refuses: that is the answer.
- The connection is lost on the way: nobody knows. The answer is `Unavailable`, and whoever asked
  repeats the request with its producer key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from penstock.errors import CallerError, NotFound, PenstockError, Unavailable, WrongEpoch, from_wire
from penstock.model.columns import Buffer
from penstock.model.entries import BATCH_ENTRIES_MAX
from penstock.node.write import (
    EnqueuePart,
    ExtendRequest,
    Gathered,
    Reply,
    ReturnRequest,
    TokenRequest,
    stretches,
)
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Duplicate,
    Enqueue,
    Enqueued,
    Extend,
    Forwarded,
    Outcome,
    Part,
    Placed,
    Return,
    Settle,
    TokenPart,
    pack,
)

Key = tuple[int, int]  # (topic id, partition)
WAIT_S: Final = 2.0  # for a coordinator to appear
LOOK_S: Final = 0.05  # between looks for a coordinator, should nobody tell of a change
FRAME_BYTES_MAX: Final = 4 << 20  # errands that share a frame are not more than this


class PartitionPort(Protocol):
    """A partition, wherever it is. Each request is answered once, at commit or with an error."""

    @property
    def index(self) -> int: ...

    def enqueue(self, part: EnqueuePart) -> None: ...

    def settle(self, request: TokenRequest) -> None: ...


class PeerStream(Protocol):
    def on_answer(self, payload: memoryview) -> None: ...

    def on_batch(self, payload: memoryview) -> None: ...

    def on_end(self, error: PenstockError | None) -> None:
        """Nothing more comes: refused or closed by the other side, or the connection is lost."""


class PeerPort(Protocol):
    """A live connection to another node, on which we are the client."""

    @property
    def alive(self) -> bool: ...

    def ask(self, type: FrameType, answer: Any, *payload: Buffer) -> asyncio.Future[Any]:
        """Send one request. The future gets the answer, unpacked as `answer`, or the error; when
        the connection is lost, `Unavailable`: then nobody knows whether it took effect."""

    def open(self, control: Any, stream: PeerStream) -> int:
        """Subscribe; returns the stream's number. What comes goes to `stream`, a refusal too."""

    def send(self, type: FrameType, sequence: int, *payload: Buffer, flags: int = 0) -> None:
        """A frame that is not answered, on a stream that we opened."""

    def close_stream(self, number: int) -> None: ...


class ClusterView(Protocol):
    @property
    def node(self) -> str: ...

    @property
    def alone(self) -> bool: ...

    @property
    def cut_off(self) -> bool:
        """This node reaches neither a majority of the others nor the metadata store: whoever it
        does not serve itself is better off with another node."""

    @property
    def available(self) -> bool:
        """The metadata store answered when it was asked last."""

    def coordinator(self, key: Key) -> str:
        """The node that coordinates a partition; empty if nobody is known to."""

    def live(self, node: str) -> PeerPort | None: ...

    async def changed(self, key: Key) -> None:
        """Returns when something about a partition's coordinator has changed since the call."""


class Freight(NamedTuple):
    """What errands must have in common to share a frame, besides their node."""

    type: FrameType
    topic: str
    how: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class Errand:
    """One partition's share of a request, and whom to tell how it went."""

    kind: Freight
    key: Key
    count: int
    data: Buffer
    raw_length: int = 0
    served: Callable[[], PartitionPort | None]  # the partition, if this node serves it by now
    hand_over: Callable[[PartitionPort], None]
    succeed: Callable[[Outcome], None]
    fail: Callable[[PenstockError], None]
    deadline: float = field(default_factory=lambda: asyncio.get_running_loop().time() + WAIT_S)

    def give_up(self, *, elsewhere: bool) -> None:
        self.fail(
            Unavailable(
                f"nobody serves partition {self.key[1]} of {self.kind.topic} at the moment",
                partition=self.key[1],
                elsewhere=elsewhere or None,
            )
        )


def control_of(kind: Freight, errands: list[Errand]) -> Any:
    if kind.type is FrameType.BATCH:
        codec, expected = kind.how
        parts = [Part(e.key[1], e.count, len(e.data)) for e in errands]
        raw = [e.raw_length for e in errands] if codec else None
        return Enqueue(
            kind.topic, parts, expected_sequence=expected, codec=codec, raw_lengths=raw,
            forwarded=True, topic_id=errands[0].key[0],
        )  # fmt: skip
    tokens = [TokenPart(e.key[1], 0, e.count, e.key[0]) for e in errands]
    if kind.type is FrameType.ACK:
        return Settle(kind.topic, tokens, forwarded=True)
    if kind.type is FrameType.HEARTBEAT:
        (extend_ms,) = kind.how
        return Extend(kind.topic, tokens, extend_ms, forwarded=True)
    delay_ms, reject, counted, reason = kind.how
    return Return(kind.topic, tokens, delay_ms, reject, counted, reason, forwarded=True)


def frames(errands: list[Errand]) -> Iterator[tuple[Freight, list[Errand]]]:
    """Errands that go together, in the order in which the first of each came."""
    kinds: dict[Freight, list[Errand]] = {}
    for errand in errands:
        kinds.setdefault(errand.kind, []).append(errand)
    for kind, mine in kinds.items():
        some: list[Errand] = []
        count = size = 0
        for errand in mine:
            count, size = count + errand.count, size + len(errand.data)
            alone = kind.type is FrameType.BATCH and kind.how[1] is not None
            if some and (alone or count > BATCH_ENTRIES_MAX or size > FRAME_BYTES_MAX):
                yield kind, some
                some, count, size = [], errand.count, len(errand.data)
            some.append(errand)
        yield kind, some


def not_there(error: BaseException) -> bool:
    """The node did nothing: the partition or topic is not there, or it serves nothing right now."""
    if isinstance(error, Unavailable):
        return bool(error.details.get("elsewhere"))
    unknown = isinstance(error, NotFound) and "topic" in error.details
    return unknown or isinstance(error, WrongEpoch)


class RemotePartition:
    def __init__(
        self,
        topic: str,
        key: Key,
        *,
        served: Callable[[], PartitionPort | None],
        send: Callable[[Errand], None],
    ) -> None:
        self.topic, self.key, self.index = topic, key, key[1]
        self._served, self._send = served, send

    def enqueue(self, part: EnqueuePart) -> None:
        self._send(
            Errand(
                kind=Freight(FrameType.BATCH, self.topic, (part.codec, part.expected_sequence)),
                key=self.key,
                count=part.count,
                data=part.body,
                raw_length=len(part.columns.body),
                served=self._served,
                hand_over=lambda port: port.enqueue(part),
                succeed=lambda outcome: part.request.part_placed(*in_request(part, outcome)),
                fail=part.request.part_failed,
            )
        )

    def settle(self, request: TokenRequest) -> None:
        type = FrameType.ACK
        how: tuple[Any, ...] = ()
        if isinstance(request, ReturnRequest):
            reason = request.reason.decode(errors="replace")
            type = FrameType.NACK
            how = (request.delay_ms, request.reject, request.counted, reason)
        elif isinstance(request, ExtendRequest):
            type, how = FrameType.HEARTBEAT, (request.extend_ms,)
        self._send(
            Errand(
                kind=Freight(type, self.topic, how),
                key=self.key,
                count=len(request.tokens),
                data=np.ascontiguousarray(request.tokens, "<u8").tobytes(),
                served=self._served,
                hand_over=lambda port: port.settle(request),
                succeed=lambda outcome: request.reply(outcome.lost),
                fail=request.reply,
            )
        )


def in_request(part: EnqueuePart, outcome: Outcome) -> tuple[list[Placed], list[Duplicate]]:
    """An outcome counts entries of its part; the request counts those of all parts."""
    indices = part.indices
    placed: list[Placed] = []
    for p in outcome.placed:
        if isinstance(indices, range):
            start = indices.start + p.index
            placed.append(Placed(start, p.count, p.partition, p.sequence, p.time_ms))
        else:
            mine = indices[p.index : p.index + p.count]
            sequences = np.arange(p.sequence, p.sequence + p.count)
            placed += stretches(mine, sequences, p.partition, p.time_ms)
    duplicates = [
        Duplicate(int(indices[d.index]), d.partition, d.sequence, d.time_ms)
        for d in outcome.duplicates
    ]
    return placed, duplicates


class Router:
    def __init__(
        self, cluster: ClusterView, *, spawn: Callable[..., object], consumers: bytes
    ) -> None:
        self.cluster, self.spawn = cluster, spawn  # which runs work beside everything else
        self.consumers = consumers  # what the names of all consumers of this node begin with
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[str, list[Errand]] = {}  # by node, of this turn
        self._waiting: dict[Key, list[Errand]] = {}  # until something changes
        self._served: dict[Key, asyncio.Event] = {}  # who waits for that

    # --- where things are ---

    def coordinator(self, key: Key) -> str:
        """The other node that coordinates a partition; empty: nobody does, or we are to."""
        node = self.cluster.coordinator(key)
        return "" if node == self.cluster.node else node

    # --- errands ---

    def send(self, errand: Errand) -> None:
        """Send it on with what else goes there in this turn, or let it wait for a coordinator."""
        served = errand.served()
        if served is not None:
            errand.hand_over(served)
            return
        node = self.coordinator(errand.key)
        if node and self.cluster.live(node) is not None:
            outbox = self._outboxes.get(node)
            if outbox is None:
                outbox = self._outboxes[node] = []
                self._loop.call_soon(self._flush, node)
            outbox.append(errand)
        else:
            self._wait(errand)

    def on_served(self, key: Key) -> None:
        if key in self._served:
            self._served.pop(key).set()

    # --- sending ---

    def _flush(self, node: str) -> None:
        errands = self._outboxes.pop(node)
        for kind, some in frames(errands):
            self._ask(node, kind, some)

    def _ask(self, node: str, kind: Freight, errands: list[Errand]) -> None:
        peer = self.cluster.live(node)
        if peer is None:  # lost in this very turn, before anything was sent
            for errand in errands:
                self._wait(errand)
            return
        bodies = [errand.data for errand in errands]
        answer = peer.ask(kind.type, Forwarded, pack(control_of(kind, errands)), *bodies)
        answer.add_done_callback(partial(self._on_answer, node, kind, errands))

    def _on_answer(
        self, node: str, kind: Freight, errands: list[Errand], done: asyncio.Future[Forwarded]
    ) -> None:
        given_up = Unavailable("the request was given up")
        error = given_up if done.cancelled() else done.exception()
        if error is None and len(done.result().outcomes) != len(errands):
            error = _unfit(node)
        if error is None:
            for errand, outcome in zip(errands, done.result().outcomes, strict=True):
                self._on_outcome(node, errand, outcome)
        elif not_there(error):
            for errand in errands:
                self._wait(errand)
        elif isinstance(error, CallerError) and len(errands) > 1:
            for errand in errands:  # one of them is wrong, and none was written: ask one by one
                self._ask(node, kind, [errand])
        else:
            known = error if isinstance(error, PenstockError) else Unavailable(str(error))
            for errand in errands:
                errand.fail(from_wire(known.to_wire()))

    def _on_outcome(self, node: str, errand: Errand, outcome: Outcome) -> None:
        if outcome.error is None:
            try:
                errand.succeed(outcome)
            except (IndexError, ValueError, OverflowError):  # of entries that it does not have
                errand.fail(_unfit(node))
            return
        error = from_wire(outcome.error)
        if not_there(error):
            self._wait(errand)
        else:
            errand.fail(error)

    # --- waiting ---

    def _wait(self, errand: Errand) -> None:
        cut_off = self.cluster.cut_off
        if cut_off or self._loop.time() >= errand.deadline:
            errand.give_up(elsewhere=cut_off)
            return
        waiting = self._waiting.get(errand.key)
        if waiting is None:
            self._waiting[errand.key] = [errand]
            self.spawn(self._look(errand.key), name="forward-wait")
        else:
            waiting.append(errand)

    async def _look(self, key: Key) -> None:
        """Send a partition's waiting errands again once something changed about it."""
        await self.changed(key)
        for errand in self._waiting.pop(key):
            if self._loop.time() >= errand.deadline:
                errand.give_up(elsewhere=self.cluster.cut_off)
            else:
                self.send(errand)

    async def changed(self, *keys: Key, within_s: float = LOOK_S) -> bool:
        """Returns when something changed about one of these partitions, or after a while: False."""
        events: list[asyncio.Future[object]] = []
        for key in keys:
            served = self._served.setdefault(key, asyncio.Event())
            events += map(asyncio.ensure_future, (self.cluster.changed(key), served.wait()))
        try:
            done, _ = await asyncio.wait(
                events, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for event in events:
                event.cancel()
            for key in keys:
                self._served.pop(key, None)
        return bool(done)


def _unfit(node: str) -> Unavailable:
    """What happened is not known: the answer is about something else."""
    return Unavailable(f"an answer of node {node} does not fit its request")


# --- at the node that serves the partitions ---


def forwarded(parts: int, reply: Reply) -> Gathered:
    """Gathers the outcome of each part of a request that another node has sent on."""
    return Gathered(parts, lambda results: Forwarded([_outcome(each) for each in results]), reply)


def _outcome(result: object) -> Outcome:
    if isinstance(result, PenstockError):
        return Outcome(error=result.to_wire())
    if isinstance(result, Enqueued):
        return Outcome(result.placed, result.duplicates)
    if isinstance(result, list):
        return Outcome(lost=result)
    raise TypeError(f"a part of a request cannot end in {result!r}")
