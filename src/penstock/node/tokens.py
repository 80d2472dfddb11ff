"""Requests about leases: their tokens, parted by partition, and one answer for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, PenstockError
from penstock.node.partition import Partition
from penstock.node.requests import Reply, as_one
from penstock.node.routing.outcomes import Outcomes
from penstock.node.routing.ports import PartitionPort
from penstock.node.topic import Topic
from penstock.wire.messages import Extend, Return, Settle, Settled

TOKENS_MAX: Final = 100_000
Act = Callable[[PartitionPort, NDArray[np.uint64], Reply], None]


class Tokens:
    """The tokens of one request, checked."""

    def __init__(self, topic: Topic, control: Settle | Return | Extend, data: memoryview) -> None:
        self._topic, self._parts, self._forwarded = topic, control.parts, control.forwarded
        total = sum(part.count for part in self._parts)
        if not 1 <= total <= TOKENS_MAX or len(data) != 8 * total:
            raise InvalidArgument(
                f"tokens must be 1 to {TOKENS_MAX} and match the parts",
                field="tokens",
                limit=TOKENS_MAX,
            )
        if any(part.count < 0 for part in self._parts):
            raise InvalidArgument("a part's count is negative", field="parts")
        self._partitions = [topic.partition(part.partition) for part in self._parts]
        self._tokens = np.frombuffer(data, "<u8")

    def hand_out(self, act: Act, answer: Reply) -> None:
        """Have each partition act on its own; answer once, with the positions that were lost."""
        if self._forwarded:
            self._hand_out_forwarded(act, Outcomes(len(self._parts), answer))
            return
        topic = self._topic

        def whole(result: object) -> None:
            if isinstance(result, Settled) and result.lost:
                topic.metrics.leases_lost(topic.config.name, len(result.lost))
            answer(result)

        if len(self._parts) == 1:
            act(self._partitions[0], self._tokens, lambda result: whole(_settled(result)))
            return
        gathered = _Gathered(len(self._parts), whole)
        at = 0
        for part, partition in zip(self._parts, self._partitions, strict=True):
            act(partition, self._tokens[at : at + part.count], gathered.part(at))
            at += part.count

    def _hand_out_forwarded(self, act: Act, outcomes: Outcomes) -> None:
        """Another node has sent them on: each part has an outcome of its own."""
        at = 0
        for i, part in enumerate(self._parts):
            partition = self._partitions[i]
            if isinstance(partition, Partition):
                act(partition, self._tokens[at : at + part.count], outcomes.part(i))
            else:
                outcomes.part(i)(self._topic.not_here(part.partition))
            at += part.count


def _settled(result: object) -> object:
    return Settled(result) if isinstance(result, list) else result


class _Gathered:
    """Lost positions of several partitions, answered together."""

    def __init__(self, parts: int, reply: Reply) -> None:
        self._parts = self._remaining = parts
        self._reply = reply
        self._lost: list[int] = []
        self._errors: list[PenstockError] = []

    def part(self, offset: int) -> Reply:
        def done(result: object) -> None:
            if isinstance(result, PenstockError):
                self._errors.append(result)
            elif isinstance(result, list):
                self._lost += [offset + position for position in result]
            self._remaining -= 1
            if not self._remaining:
                self._reply(self._whole())

        return done

    def _whole(self) -> object:
        return as_one(self._errors, self._parts) if self._errors else Settled(sorted(self._lost))
