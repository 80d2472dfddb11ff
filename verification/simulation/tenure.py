"""What a coordinator does for its clients, as the node does it: requests become batches, a batch is
applied when it is appended, and whoever asked is answered when it is committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.heap.machine import ReturnPlan
from penstock.heap.spine import Spine
from penstock.heap.transactions import Doubts, SharePlace, pack_places
from penstock.model.batch import SCHEMAS, Batch, DeadReason, Decision, Kind, seal
from penstock.model.columns import Columns, Value
from verification.simulation.ranks import left_behind

if TYPE_CHECKING:
    from verification.simulation.host import Host

EXPIRE_MAX: Final = 100
DOUBT_MS: Final = 1500  # after which a prepared batch asks its home for the decision
CONFIRM_MS: Final = 600  # between a home's questions whether its commits are everywhere
Answer = Callable[[Any], None]
_NAMES: Final = {kind: (kind.name, f"{kind.name.lower()}.staged") for kind in Kind}


class Entries(msgspec.Struct, frozen=True):
    """Consecutive messages of one producer."""

    producer: bytes
    epoch: int
    first: int
    priorities: tuple[int, ...]
    delay_ms: int = 0

    @property
    def count(self) -> int:
        return len(self.priorities)

    @property
    def payloads(self) -> list[bytes]:
        keys = range(self.first, self.first + self.count)
        return [b"%s/%d/%d" % (self.producer, self.epoch, key) for key in keys]

    def columns(self, kind: Kind, **more: Value) -> Columns:
        """The body of a batch that brings them."""
        count = self.count
        values: dict[str, Value | None] = {
            "priority": self.priorities,
            "delay_ms": [self.delay_ms] * count if self.delay_ms else None,
            "payload": self.payloads,
            "run_count": [count],
            "run_epoch": [self.epoch],
            "run_sequence": [self.first],
            "run_producer": [self.producer],
            **more,
        }
        return SCHEMAS[kind].decode(SCHEMAS[kind].encode(count, values, runs=1), count)


class Enqueue(msgspec.Struct, frozen=True):
    partition: int
    entries: Entries
    expected_sequence: int | None = None


class Pop(msgspec.Struct, frozen=True):
    partition: int
    consumer: bytes
    count: int
    visibility_ms: int


class Settle(msgspec.Struct, frozen=True):
    """End a lease: acknowledge, return, or reject it; or let it run longer (`extend_ms`)."""

    partition: int
    token: int
    how: str  # ack | nack | reject | extend
    ms: int = 0


class Prepare(msgspec.Struct, frozen=True):
    partition: int
    entries: Entries
    transaction: bytes
    home: int


class Decide(msgspec.Struct, frozen=True):
    """Decide, or repeat a decision; answers what holds. `places` are those of all shares."""

    partition: int
    transaction: bytes
    commit: bool
    places: tuple[SharePlace, ...] = ()


class AskDoubts(msgspec.Struct, frozen=True):
    """Which batches of a home wait for its decision."""

    partition: int
    home: int


Request = Enqueue | Pop | Settle | Prepare | Decide | AskDoubts


class Tenure:
    """One node's time as coordinator of one partition."""

    def __init__(self, host: Host, epoch: int) -> None:
        self.host, self.epoch = host, epoch
        self.heap, self._disk = host.heap, host.disk
        self.serving = False
        self._waiting: deque[tuple[int, Callable[[], None], Answer]] = deque()
        self._asked: dict[bytes, int] = {}  # prepared batches -> when their home was asked
        self._confirmed_ms = 0  # when participants were asked for their copies
        # Log time never steps back. The node's other partitions keep their own time: leases that
        # run there must not end early because a log from a faster clock was taken over here. Nor
        # does it begin later than the clocks of the quorum that promised the epoch: nodes of the
        # simulator do not compare theirs, so none knows that it is right.
        clock_ms: int = host.node.clock_ms
        begin_ms = min(clock_ms, host.replica.quorum_ms(clock_ms, host.now))
        self._ahead_ms: int = max(begin_ms, self._disk.end.time_ms) - clock_ms

    @property
    def now_ms(self) -> int:
        return self.host.node.clock_ms + self._ahead_ms

    # --- the log ---

    def append(
        self, kind: Kind, count: int, values: dict[str, Value | None], runs: int = 0
    ) -> Batch:
        body = SCHEMAS[kind].encode(count, values, runs=runs)
        return self._append_columns(kind, SCHEMAS[kind].decode(body, count))

    def _append_columns(self, kind: Kind, columns: Columns) -> Batch:
        host, end = self.host, self._disk.end
        now_ms = self.now_ms
        batch = seal(
            kind,
            columns.body,
            topic=host.simulation.config.id,
            partition=host.partition,
            epoch=self.epoch,
            epoch_previous=end.epoch,
            first=end.sequence + 1,
            count=columns.count,
            time_ms=max(now_ms, end.time_ms),
            chain_previous=end.chain,
        )
        host.simulation.checker.on_append(host.partition, host.node.name, end, batch)
        host.simulation.keep_columns(batch, columns)
        self._disk.append([batch])
        host.replica.on_staged(batch)
        self.heap.apply(batch, columns)
        name, point = _NAMES[kind]
        host.log("append", name, batch.first, batch.last, self.epoch)
        host.node.point(point)
        return batch

    def append_barrier(self) -> Batch:
        return self.append(Kind.BARRIER, 1, {"node": [self.host.node.name.encode()]})

    def on_commit(self, sequence: int) -> None:
        while self._waiting and self._waiting[0][0] <= sequence:
            _, answer, _ = self._waiting.popleft()
            answer()

    def on_serving(self) -> None:
        for transaction in list(self.heap.prepared):
            self._resolve(transaction)

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    def answer_unknown(self) -> None:
        """Nobody knows what becomes of that which is not committed."""
        waiting, self._waiting = self._waiting, deque()
        for _, _, reply in waiting:
            reply(("unknown",))

    def _when_committed(self, sequence: int, reply: Answer, answer: Callable[[], Any]) -> None:
        if sequence <= self.host.committed:
            reply(answer())
            return
        if self._waiting:
            sequence = max(sequence, self._waiting[-1][0])
        self._waiting.append((sequence, lambda: reply(answer()), reply))

    # --- requests ---

    def serve(self, request: Request, reply: Answer) -> None:
        refusal = self.host.replica.writable(self.host.now)
        if refusal is not None:
            reply(("refused", refusal.code))
            return
        try:
            match request:
                case Enqueue():
                    self._enqueue(request, reply)
                case Pop():
                    self._pop(request, reply)
                case Settle():
                    self._settle(request, reply)
                case Prepare():
                    self._prepare(request, reply)
                case Decide():
                    self._decide(request, reply)
                case AskDoubts():
                    self._tell_doubts(request, reply)
        except PenstockError as error:
            reply(("failed", error.code))

    def _enqueue(self, request: Enqueue, reply: Answer) -> None:
        entries = request.entries
        columns = entries.columns(Kind.ENQ)
        known = self._known(columns)
        if known is not None:
            self._when_committed(known, reply, lambda: ("ok", known - entries.count + 1))
            return
        if request.expected_sequence not in (None, self.heap.sequence_enqueued):
            # Said only once what it is about is certain.
            self._when_committed(
                self._disk.end.sequence, reply, lambda: ("failed", "sequence_conflict")
            )
            return
        batch = self._append_columns(Kind.ENQ, columns)
        self.host.simulation.delays.note(self.host.partition, batch, entries.delay_ms)
        self._when_committed(batch.last, reply, lambda: ("ok", batch.first))

    def _known(self, columns: Columns) -> int | None:
        """The last message of these entries if they are here already: all of them, or none."""
        duplicates = self.heap.dedup.admit(columns)
        if not duplicates:
            return None
        if len(duplicates) != columns.count:
            known = f"{len(duplicates)} of {columns.count} entries are known: {duplicates}"
            self.host.simulation.checker.broken("torn_batches", known)
        return duplicates[-1][1]

    def _pop(self, request: Pop, reply: Answer) -> None:
        self._check_rank(request.count)
        messages = self.heap.select(request.count, self.now_ms)
        self.host.simulation.delays.check(self.host.partition, messages.tolist())
        if not len(messages):
            reply(("ok", ()))
            return
        batch = self.append(
            Kind.LEASE,
            len(messages),
            {
                "message": messages,
                "run_count": [len(messages)],
                "run_visibility_ms": [request.visibility_ms],
                "run_consumer": [request.consumer],
            },
            runs=1,
        )
        leased = tuple(
            (message, batch.first + i, self._payload(message))
            for i, message in enumerate(messages.tolist())
        )
        self._when_committed(batch.last, reply, lambda: ("ok", leased))

    def _payload(self, message: int) -> bytes | None:
        """As our log has it; None if retention has dropped that part, which a node keeps."""
        batch = self._disk.batch_holding(message)
        if batch is None:
            return None
        payloads = self.host.simulation.columns_of(batch).binary("payload")
        return payloads[message - batch.first] if payloads is not None else b""

    def _check_rank(self, count: int) -> None:
        """What a pop over all that this node serves would get is the best that there is."""
        simulation, hosts = self.host.simulation, self.host.node.hosts.values()
        serving = [host.tenure for host in hosts if host.tenure and host.tenure.serving]
        behind = left_behind(serving, count, spine=Spine(1, simulation.config.partitions))
        if behind:
            simulation.checker.broken("rank_errors", f"{behind} left by {self.host.node.name}")

    def _settle(self, request: Settle, reply: Answer) -> None:
        tokens = np.array([request.token], np.uint64)
        _, held = self.heap.resolve(tokens)
        if not held.all():
            reply(("lost",))
            return
        if request.how == "ack":
            sequence = self.append(Kind.ACK, 1, {"token": tokens}).last
        elif request.how == "extend":
            until = self.heap.cap_extend(tokens, self.now_ms, request.ms)
            sequence = self.append(Kind.EXTEND, 1, {"token": tokens, "extend_ms": until}).last
        elif request.how == "reject":
            reason = [int(DeadReason.REJECTED)]
            sequence = self.append(Kind.DEAD, 1, {"token": tokens, "reason": reason}).last
        else:
            plan = self.heap.plan_return(tokens, self.now_ms, delay_ms=request.ms, counted=True)
            sequence = self._return(Kind.NACK, plan)
        self._when_committed(sequence, reply, lambda: ("ok",))

    def _return(self, kind: Kind, plan: ReturnPlan) -> int:
        sequence = 0
        if len(plan.tokens):
            values: dict[str, Value | None] = {
                "token": plan.tokens,
                "not_before_ms": plan.not_before_ms,
            }
            sequence = self.append(kind, len(plan.tokens), values).last
        if len(plan.dead):
            reasons = np.full(len(plan.dead), DeadReason.RETRIES)
            values = {"token": plan.dead, "reason": reasons}
            sequence = self.append(Kind.DEAD, len(plan.dead), values).last
        return sequence

    # --- time ---

    def on_tick(self) -> None:
        if not self.serving or self.host.replica.writable(self.host.now) is not None:
            return
        tokens = self.heap.expired(self.now_ms, EXPIRE_MAX)
        if len(tokens):
            plan = self.heap.plan_return(tokens, self.now_ms, delay_ms=None, counted=True)
            self._return(Kind.EXPIRE, plan)
        for name, transaction in list(self.heap.prepared.items()):
            if self.now_ms - max(transaction.time_ms, self._asked.get(name, 0)) > DOUBT_MS:
                self._resolve(name)
        if self.heap.transactions.unconfirmed and self.now_ms - self._confirmed_ms > CONFIRM_MS:
            self._confirm()

    # --- atomic batches ---

    def _prepare(self, request: Prepare, reply: Answer) -> None:
        entries = request.entries
        columns = entries.columns(
            Kind.PREPARE, transaction=[request.transaction], home=[request.home]
        )  # fmt: skip
        known = self._known(columns)
        if known is not None:
            # Of an earlier attempt. While that is undecided, so is this one.
            mine = request.transaction in self.heap.prepared
            verdict = "ok" if mine else "busy" if self.heap.is_prepared(known) else "known"
            first = known - entries.count + 1
            self._when_committed(known, reply, lambda: (verdict, first))
            return
        batch = self._append_columns(Kind.PREPARE, columns)
        self._when_committed(batch.last, reply, lambda: ("ok", batch.first))

    def _decide(self, request: Decide, reply: Answer) -> None:
        decided = self.heap.transactions.outcome(request.transaction)
        if decided is None:
            others = [p for p in request.places if p.partition != self.host.partition]
            own = len(others) < len(request.places)
            decided = request.commit and self.heap.transactions.may_commit(
                request.transaction, own=own
            )
            values: dict[str, Value | None] = {
                "transaction": [request.transaction],
                "commit": [int(decided)],
                "participants": [pack_places(others)] if decided and others else None,
            }
            self.append(Kind.DECIDE, 1, values)
        self._when_committed(self._disk.end.sequence, reply, lambda: ("ok", decided))

    def _tell_doubts(self, request: AskDoubts, reply: Answer) -> None:
        doubts = Doubts(
            self.heap.sequence_applied, self.heap.transactions.doubts(request.home)
        )  # fmt: skip
        self._when_committed(doubts.sequence, reply, lambda: ("ok", doubts))

    def _confirm(self) -> None:
        """Ask the participants of what this home keeps whether they have their copies."""
        self._confirmed_ms = self.now_ms
        transactions, answers = self.heap.transactions, dict[int, Doubts]()
        commits = transactions.unconfirmed.values()

        def on_answer(index: int, answer: Any) -> None:
            if answer[0] != "ok" or self.host.tenure is not self or not self.serving:
                return
            answers[index] = answer[1]
            names = transactions.confirmed(answers)
            if names and self.host.replica.writable(self.host.now) is None:
                commit = [int(Decision.CONFIRMED)] * len(names)
                self.append(Kind.DECIDE, len(names), {"transaction": names, "commit": commit})
                self.host.pump()

        for index in sorted({place.partition for commit in commits for place in commit.places}):
            self.host.node.caller.call(
                AskDoubts(index, self.host.partition), partial(on_answer, index)
            )

    def _resolve(self, transaction: bytes) -> None:
        """A prepared share never decides alone: ask the home partition, which decides against the
        batch if it has not decided yet."""
        self._asked[transaction] = self.now_ms
        home = self.heap.prepared[transaction].home
        self.host.log("ask home", home, transaction)

        def on_answer(answer: Any) -> None:
            if answer[0] == "ok" and self.host.tenure is self and self.serving:
                self.serve(
                    Decide(self.host.partition, transaction, bool(answer[1])), lambda _: None
                )
                self.host.pump()

        self.host.node.caller.call(Decide(home, transaction, False), on_answer)
