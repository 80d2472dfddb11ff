"""Leases that end or run longer: acknowledged, given back, extended, expired.

Requests gather here until the partition's turn; acknowledgements of one turn become one ACK batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.heap import ReturnPlan
from penstock.log.crash import crash_point
from penstock.model.batch import DeadReason, Kind
from penstock.model.columns import Value
from penstock.node.write.journal import COALESCE_ENTRIES, Journal, Reply

EXPIRE_MAX: Final = 1000  # leases expired in one turn
SETTLE_WRITES_MAX: Final = 2  # that may pass a few settlements by
# What a token takes in a record, and what a return takes once more when some of it is dead.
ACK_BYTES, EXTEND_BYTES, RETURN_BYTES, RETURN_BYTES_APART = 8, 16, 32, 256
REASONS_BYTES_MAX: Final = 1 << 20  # of one request; what very many share is cut short


@dataclass(slots=True, eq=False)
class TokenRequest:
    """Leases of one partition to acknowledge; `reply` gets the lost positions."""

    tokens: NDArray[np.uint64]
    reply: Reply


@dataclass(slots=True, eq=False, kw_only=True)
class ReturnRequest(TokenRequest):
    """Leases to give back, or messages to reject."""

    delay_ms: int | None = None
    reject: bool = False
    counted: bool = True
    reason: bytes = b""
    cause: DeadReason = DeadReason.REJECTED  # of death, if it is rejected


@dataclass(slots=True, eq=False, kw_only=True)
class ExtendRequest(TokenRequest):
    extend_ms: int


def unused(tokens: NDArray[np.uint64], *, delay_ms: int = 0) -> ReturnRequest:
    """Leases end whose messages nobody was told of, and no attempt is counted."""
    return ReturnRequest(tokens, ignore, delay_ms=delay_ms, counted=False)


def ignore(_: object) -> None:
    """Nobody waits for this answer."""


class LeaseSettler:
    def __init__(self, journal: Journal) -> None:
        self._journal, self._heap = journal, journal.heap
        self._waiting: list[TokenRequest] = []
        self.gathered = 0  # tokens of those that wait
        self._waiting_since = 0  # the write during which the first of them came

    def settle(self, request: TokenRequest) -> None:
        journal = self._journal
        if journal.failed is not None:
            request.reply(journal.failed)
            return
        if not self.gathered:
            self._waiting_since = journal.flusher.writes
        self._waiting.append(request)
        self.gathered += len(request.tokens)
        journal.wake()

    def take_turn(self) -> None:
        """Turn the requests that have gathered into batches. A few of them may wait for two writes,
        because nobody is blocked by them."""
        if not self._journal.takes(self.fail, late=True):
            return
        flusher = self._journal.flusher
        passed = flusher.writes - self._waiting_since
        if flusher.writing and self.gathered < COALESCE_ENTRIES and passed < SETTLE_WRITES_MAX:
            return
        waiting, self._waiting, self.gathered = self._waiting, [], 0
        acks = [request for request in waiting if type(request) is TokenRequest]
        if acks:
            self._process(acks)
        for request in waiting:
            if type(request) is not TokenRequest:
                self._process([request])

    def fail(self, error: PenstockError) -> None:
        waiting, self._waiting, self.gathered = self._waiting, [], 0
        for request in waiting:
            request.reply(error)

    def expire(self) -> None:
        now_ms = self._journal.now_ms()
        tokens = self._heap.expired(now_ms, EXPIRE_MAX)
        need = len(tokens) * RETURN_BYTES + RETURN_BYTES_APART
        if len(tokens) and self._journal.has_room(need):
            plan = self._heap.plan_return(tokens, now_ms, delay_ms=None, counted=True)
            self._append_return(Kind.EXPIRE, plan, counted=True)

    def _process(self, requests: Sequence[TokenRequest]) -> None:
        """Write one record for several acknowledgements, or for one request of another kind."""
        first = requests[0]
        tokens = first.tokens
        if len(requests) > 1:
            tokens = np.concatenate([request.tokens for request in requests])
        _, held = self._heap.resolve(tokens)
        kept = tokens[held]
        sequence = self._journal.coordinator.sequence_committed
        if len(kept):
            if not self._has_room(_record_bytes(first, len(kept)), requests):
                return
            if isinstance(first, ReturnRequest):
                sequence = self._return(kept, first)
            elif isinstance(first, ExtendRequest):
                extend_ms = self._heap.cap_extend(kept, self._journal.now_ms(), first.extend_ms)
                values: dict[str, Value | None] = {"token": kept, "extend_ms": extend_ms}
                sequence = self._journal.append_record(Kind.EXTEND, len(kept), values).last
            else:
                sequence = self._journal.append_record(Kind.ACK, len(kept), {"token": kept}).last
                crash_point("node.ack.staged")
        self._answer(requests, held, sequence)

    def _has_room(self, bytes: int, requests: Sequence[TokenRequest]) -> bool:
        """Whether a record of that size fits now. If not, the requests wait for the disk to give
        more; if it just said that it cannot, they are refused."""
        if self._journal.has_room(bytes):
            return True
        full = self._journal.flusher.disk_full()
        if full is not None:
            for request in requests:
                request.reply(full)
            return False
        self._waiting.extend(requests)
        self.gathered += sum(len(request.tokens) for request in requests)
        self._journal.grow(bytes)
        return False

    def _answer(
        self, requests: Sequence[TokenRequest], held: NDArray[np.bool_], sequence: int
    ) -> None:
        """Tell each request, once committed, which of its tokens were lost."""
        shares: list[list[int]] = [[]] * len(requests)
        if not held.all():
            ends = np.cumsum([len(request.tokens) for request in requests])
            shares = [np.flatnonzero(~own).tolist() for own in np.split(held, ends[:-1])]

        def answer() -> None:
            for request, lost in zip(requests, shares, strict=True):
                request.reply(lost)

        def unknown(error: PenstockError) -> None:
            for request in requests:
                request.reply(error)

        self._journal.when_committed(sequence, answer, unknown=unknown)

    def _return(self, tokens: NDArray[np.uint64], request: ReturnRequest) -> int:
        reason = _reason(request, len(tokens))
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


def _record_bytes(request: TokenRequest, count: int) -> int:
    """What a record takes for so many of a request's tokens."""
    if isinstance(request, ReturnRequest):
        return count * (RETURN_BYTES + len(_reason(request, count))) + RETURN_BYTES_APART
    return count * (EXTEND_BYTES if isinstance(request, ExtendRequest) else ACK_BYTES)


def _reason(request: ReturnRequest, count: int) -> bytes:
    return request.reason[: REASONS_BYTES_MAX // count]
