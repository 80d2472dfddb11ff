"""Leases that end or run longer: acknowledged, given back, extended, expired.

Requests gather here until the partition's turn; acknowledgements of one turn become one ACK batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.heap import ReturnPlan
from penstock.log.crash import crash_point
from penstock.model.batch import DeadReason, Kind
from penstock.model.columns import Value
from penstock.node.write.journal import COALESCE_ENTRIES, Journal
from penstock.node.write.requests import ExtendRequest, Reply, ReturnRequest, TokenRequest

EXPIRE_MAX: Final = 1000  # leases expired in one turn
SETTLE_WRITES_MAX: Final = 2  # that may pass a few settlements by
# What a token takes in a record, and what a return takes once more when some of it is dead.
ACK_BYTES, EXTEND_BYTES, RETURN_BYTES, RETURN_BYTES_APART = 8, 16, 32, 256
REASONS_BYTES_MAX: Final = 1 << 20  # of one request; what very many share is cut short


class LeaseSettler:
    def __init__(self, journal: Journal) -> None:
        self._journal, self._heap = journal, journal.heap
        self._settles: list[TokenRequest] = []
        self._returns: list[ReturnRequest] = []
        self._extends: list[ExtendRequest] = []
        self.gathered = 0  # tokens in the lists above
        self._waiting_since = 0  # the write during which the first of them came

    def settle(self, request: TokenRequest) -> None:
        self._gather(self._settles, request)

    def give_back(self, request: ReturnRequest) -> None:
        self._gather(self._returns, request)

    def extend(self, request: ExtendRequest) -> None:
        self._gather(self._extends, request)

    def take_turn(self) -> None:
        """Turn the requests that have gathered into batches. A few of them may wait for two writes,
        because nobody is blocked by them."""
        journal = self._journal
        if not journal.takes(self.fail, late=True):
            return
        passed = journal.flusher.writes - self._waiting_since
        if (
            journal.flusher.writing
            and self.gathered < COALESCE_ENTRIES
            and passed < SETTLE_WRITES_MAX
        ):
            return
        self.gathered = 0
        self._process_settles()
        self._process_returns()
        self._process_extends()

    def fail(self, error: PenstockError) -> None:
        """Answer everybody who waits with `error`."""
        waiting = [*self._settles, *self._returns, *self._extends]
        self._settles, self._returns, self._extends = [], [], []
        self.gathered = 0
        for request in waiting:
            request.reply(error)

    def expire(self) -> None:
        """Take back leases whose deadline has passed."""
        now_ms = self._journal.now_ms()
        tokens = self._heap.expired(now_ms, EXPIRE_MAX)
        need = len(tokens) * RETURN_BYTES + RETURN_BYTES_APART
        if len(tokens) and self._journal.has_room(need):
            plan = self._heap.plan_return(tokens, now_ms, delay_ms=None, counted=True)
            self._append_return(Kind.EXPIRE, plan, counted=True)

    def _gather(self, waiting: list[Any], request: TokenRequest) -> None:
        if self._journal.failed is not None:
            request.reply(self._journal.failed)
            return
        if not self.gathered:
            self._waiting_since = self._journal.flusher.writes
        waiting.append(request)
        self.gathered += len(request.tokens)
        self._journal.wake()

    def _has_room(self, bytes: int, requests: Sequence[Any], waiting: list[Any]) -> bool:
        """Whether a record of that size fits now. If not, the requests wait for the disk to give
        more; if it just said that it cannot, they are refused."""
        if self._journal.has_room(bytes):
            return True
        full = self._journal.flusher.disk_full()
        if full is not None:
            for request in requests:
                request.reply(full)
            return False
        waiting.extend(requests)
        self.gathered += sum(len(request.tokens) for request in requests)
        self._journal.grow(bytes)
        return False

    def _process_settles(self) -> None:
        requests, self._settles = self._settles, []
        if not requests:
            return
        tokens = requests[0].tokens
        if len(requests) > 1:
            tokens = np.concatenate([r.tokens for r in requests])
        _, held = self._heap.resolve(tokens)
        all_held = bool(held.all())
        kept = tokens if all_held else tokens[held]
        sequence = self._journal.coordinator.sequence_committed
        if len(kept):
            if not self._has_room(len(kept) * ACK_BYTES, requests, self._settles):
                return
            sequence = self._journal.append_record(Kind.ACK, len(kept), {"token": kept}).last
            crash_point("node.ack.staged")
        self._answer_tokens(requests, None if all_held else held, sequence)

    def _answer_tokens(
        self, requests: Sequence[TokenRequest], held: NDArray[np.bool_] | None, sequence: int
    ) -> None:
        """Tell each request, once committed, which of its tokens were lost; None: none was."""
        answers: list[tuple[Reply, list[int]]] = []
        at = 0
        for request in requests:
            end = at + len(request.tokens)
            lost = [] if held is None else np.flatnonzero(~held[at:end]).tolist()
            answers.append((request.reply, lost))
            at = end

        def answer() -> None:
            for reply, lost in answers:
                reply(lost)

        def unknown(error: PenstockError) -> None:
            for reply, _ in answers:
                reply(error)

        self._journal.when_committed(sequence, answer, unknown=unknown)

    def _process_returns(self) -> None:
        requests, self._returns = self._returns, []
        for request in requests:
            _, held = self._heap.resolve(request.tokens)
            kept = request.tokens[held]
            sequence = self._journal.coordinator.sequence_committed
            if len(kept):
                reason = request.reason[: REASONS_BYTES_MAX // len(kept)]
                need = len(kept) * (RETURN_BYTES + len(reason)) + RETURN_BYTES_APART
                if not self._has_room(need, [request], self._returns):
                    continue
                sequence = self._return(kept, request, reason)
            self._answer_tokens([request], held, sequence)

    def _return(self, tokens: NDArray[np.uint64], request: ReturnRequest, reason: bytes) -> int:
        if request.reject:
            values: dict[str, Value | None] = {
                "token": tokens,
                "reason": np.full(len(tokens), request.cause),
                "detail": [reason] * len(tokens),
            }
            return self._journal.append_record(Kind.DEAD, len(tokens), values).last
        plan = self._heap.plan_return(
            tokens, self._journal.now_ms(), delay_ms=request.delay_ms, counted=request.counted
        )
        return self._append_return(Kind.NACK, plan, counted=request.counted, detail=reason)

    def _append_return(
        self, kind: Kind, plan: ReturnPlan, *, counted: bool, detail: bytes = b""
    ) -> int:
        """Write a return plan: a NACK or EXPIRE for those that retry, a DEAD for the others."""
        sequence = 0
        if len(plan.tokens):
            values: dict[str, Value | None] = {
                "token": plan.tokens,
                "not_before_ms": plan.not_before_ms,
            }
            if not counted:
                values["counted"] = np.zeros(len(plan.tokens), np.uint8)
            sequence = self._journal.append_record(kind, len(plan.tokens), values).last
        if len(plan.dead):
            values = {
                "token": plan.dead,
                "reason": np.full(len(plan.dead), DeadReason.RETRIES),
                "detail": [detail] * len(plan.dead) if detail else None,
            }
            sequence = self._journal.append_record(Kind.DEAD, len(plan.dead), values).last
        return sequence

    def _process_extends(self) -> None:
        requests, self._extends = self._extends, []
        for request in requests:
            _, held = self._heap.resolve(request.tokens)
            kept = request.tokens[held]
            sequence = self._journal.coordinator.sequence_committed
            if len(kept):
                if not self._has_room(len(kept) * EXTEND_BYTES, [request], self._extends):
                    continue
                extend_ms = self._heap.cap_extend(kept, self._journal.now_ms(), request.extend_ms)
                values: dict[str, Value | None] = {"token": kept, "extend_ms": extend_ms}
                sequence = self._journal.append_record(Kind.EXTEND, len(kept), values).last
            self._answer_tokens([request], held, sequence)
