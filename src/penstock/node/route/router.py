"""The node's way to partitions that other nodes serve, shared by all of its topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from penstock.errors import CallerError, PenstockError, Unavailable, from_wire
from penstock.node.route.errands import (
    Errand,
    Freight,
    control_of,
    frames,
    not_there,
)
from penstock.node.route.ports import ClusterView, Key
from penstock.wire.messages import Forwarded, Outcome, pack

LOOK_S: Final = 0.05  # between looks for a coordinator, should nobody tell of a change


class Router:
    def __init__(
        self, view: Callable[[], ClusterView], *, spawn: Callable[..., object], consumers: bytes
    ) -> None:
        self._view, self.spawn = view, spawn  # which runs work beside everything else
        self.consumers = consumers  # what the names of all consumers of this node begin with
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[str, list[Errand]] = {}  # by node, of this turn
        self._waiting: dict[Key, list[Errand]] = {}  # until something changes
        self._served: dict[Key, asyncio.Event] = {}  # who waits for that

    @property
    def cluster(self) -> ClusterView:
        """As of now: a node that joins a cluster replaces its view."""
        return self._view()

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
        """A partition is served here from now on."""
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
