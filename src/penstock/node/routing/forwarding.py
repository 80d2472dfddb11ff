"""Requests on their way to the node that serves their partition.

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
from functools import partial
from typing import Any, Final, NamedTuple

from penstock.errors import CallerError, NotFound, PenstockError, Unavailable, WrongEpoch, from_wire
from penstock.model.columns import Buffer
from penstock.model.topic import BATCH_ENTRIES_MAX
from penstock.node.routing.ports import Key, PartitionPort
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Enqueue,
    Extend,
    Forwarded,
    Outcome,
    Part,
    Return,
    Settle,
    TokenPart,
    pack,
)

WAIT_S: Final = 2.0  # for a coordinator to appear
LOOK_S: Final = 0.05  # between looks for one, should nobody tell of a change
FRAME_BYTES_MAX: Final = 4 << 20  # errands that share a frame are not more than this


class Kind(NamedTuple):
    """What errands must have in common to share a frame, besides their node."""

    type: FrameType
    topic: str
    how: tuple[Any, ...] = ()


class Errand:
    """One partition's share of a request, and whom to tell how it went."""

    __slots__ = (
        "count",
        "data",
        "deadline",
        "fail",
        "here",
        "key",
        "kind",
        "raw_length",
        "succeed",
    )

    def __init__(
        self,
        kind: Kind,
        key: Key,
        *,
        count: int,
        data: Buffer,
        here: Callable[[PartitionPort], bool],
        succeed: Callable[[Outcome], None],
        fail: Callable[[PenstockError], None],
        raw_length: int = 0,
    ) -> None:
        self.kind, self.key = kind, key
        self.count, self.data, self.raw_length = count, data, raw_length
        self.here = here  # hands the request to a port of this node; False: it is not served here
        self.succeed, self.fail = succeed, fail
        self.deadline = asyncio.get_running_loop().time() + WAIT_S

    def give_up(self, *, elsewhere: bool) -> None:
        self.fail(
            Unavailable(
                f"nobody serves partition {self.key[1]} of {self.kind.topic} at the moment",
                partition=self.key[1],
                elsewhere=elsewhere or None,
            )
        )


def control_of(kind: Kind, errands: list[Errand]) -> Any:
    """The control message of a frame that carries these errands."""
    if kind.type is FrameType.BATCH:
        codec, expected = kind.how
        parts = [Part(e.key[1], e.count, len(e.data)) for e in errands]
        raw = [e.raw_length for e in errands] if codec else None
        return Enqueue(
            kind.topic, parts, expected_sequence=expected, codec=codec, raw_lengths=raw,
            forwarded=True,
        )  # fmt: skip
    tokens = [TokenPart(e.key[1], 0, e.count) for e in errands]
    if kind.type is FrameType.ACK:
        return Settle(kind.topic, tokens, forwarded=True)
    if kind.type is FrameType.HEARTBEAT:
        (extend_ms,) = kind.how
        return Extend(kind.topic, tokens, extend_ms, forwarded=True)
    delay_ms, reject, counted, reason = kind.how
    return Return(kind.topic, tokens, delay_ms, reject, counted, reason, forwarded=True)


def frames(errands: list[Errand]) -> Iterator[tuple[Kind, list[Errand]]]:
    """Errands that go together, in the order in which the first of each came."""
    kinds: dict[Kind, list[Errand]] = {}
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


class Forwarder:
    """All errands of this node. `router` says where a partition is."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[str, list[Errand]] = {}  # by node, of this turn
        self._waiting: dict[Key, list[Errand]] = {}  # until something changes
        self._served: dict[Key, asyncio.Event] = {}  # who waits for that

    def send(self, errand: Errand) -> None:
        """Send it on with what else goes there in this turn, or let it wait for a coordinator."""
        if errand.here(self._router.port(errand.key)):
            return
        node = self._router.coordinator(errand.key)
        if node and self._router.cluster.live(node) is not None:
            outbox = self._outboxes.get(node)
            if outbox is None:
                outbox = self._outboxes[node] = []
                self._loop.call_soon(self._flush, node)
            outbox.append(errand)
        else:
            self._wait(errand)

    def on_served(self, key: Key) -> None:
        """A partition is served here from now on."""
        if key in self._served:
            self._served.pop(key).set()

    # --- sending ---

    def _flush(self, node: str) -> None:
        errands = self._outboxes.pop(node)
        for kind, some in frames(errands):
            self._ask(node, kind, some)

    def _ask(self, node: str, kind: Kind, errands: list[Errand]) -> None:
        peer = self._router.cluster.live(node)
        if peer is None:  # lost in this very turn, before anything was sent
            for errand in errands:
                self._wait(errand)
            return
        bodies = [errand.data for errand in errands]
        answer = peer.ask(kind.type, Forwarded, pack(control_of(kind, errands)), *bodies)
        answer.add_done_callback(partial(self._on_answer, node, kind, errands))

    def _on_answer(
        self, node: str, kind: Kind, errands: list[Errand], done: asyncio.Future[Forwarded]
    ) -> None:
        error: BaseException | None
        if done.cancelled():
            error = Unavailable("the request was given up")
        else:
            error = done.exception()
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
        cut_off = self._router.cluster.cut_off
        if cut_off or self._loop.time() >= errand.deadline:
            errand.give_up(elsewhere=cut_off)
            return
        waiting = self._waiting.get(errand.key)
        if waiting is None:
            self._waiting[errand.key] = [errand]
            self._router.spawn(self._look(errand.key), name="forward-wait")
        else:
            waiting.append(errand)

    async def _look(self, key: Key) -> None:
        """Send a partition's waiting errands again once something changed about it."""
        await self.changed(key)
        for errand in self._waiting.pop(key):
            if self._loop.time() >= errand.deadline:
                errand.give_up(elsewhere=self._router.cluster.cut_off)
            else:
                self.send(errand)

    async def changed(self, key: Key) -> None:
        """Returns when something changed about a partition, or after a short while."""
        served = self._served.setdefault(key, asyncio.Event())
        events = [
            asyncio.ensure_future(self._router.cluster.changed(key)),
            asyncio.ensure_future(served.wait()),
        ]
        try:
            await asyncio.wait(events, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
            self._served.pop(key, None)


def not_there(error: BaseException) -> bool:
    """The node did nothing: it does not serve that partition, does not even know the topic yet, or
    serves nothing right now."""
    if isinstance(error, Unavailable):
        return bool(error.details.get("elsewhere"))
    unknown = isinstance(error, NotFound) and "topic" in error.details
    return unknown or isinstance(error, WrongEpoch)


def _unfit(node: str) -> Unavailable:
    """What happened is not known: the answer is about something else."""
    return Unavailable(f"an answer of node {node} does not fit its request")
