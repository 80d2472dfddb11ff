"""Requests about leases: their tokens, parted by partition, and one answer for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, PenstockError
from penstock.node.route.ports import PartitionPort
from penstock.node.route.router import forwarded
from penstock.node.serve.topic import ServedTopic, has_id
from penstock.node.write.enqueuer import Gathered, as_one
from penstock.node.write.journal import Reply
from penstock.node.write.settler import TokenRequest
from penstock.wire.messages import Extend, Return, Settle, Settled, TokenPart

TOKENS_MAX: Final = 100_000
# Makes one partition's request of its tokens, and of who is told which of them were lost.
Make = Callable[[NDArray[np.uint64], Reply], TokenRequest]


class Tokens:
    """The tokens of one request, checked.

    A part of an earlier topic of the same name has no partition here: its tokens are lost, and
    nothing is done about them.
    """

    def __init__(
        self, topic: ServedTopic, control: Settle | Return | Extend, data: memoryview
    ) -> None:
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
        self._partitions = [self._partition(part) for part in self._parts]
        self._tokens = np.frombuffer(data, "<u8")

    def _partition(self, part: TokenPart) -> PartitionPort | None:
        """Where the tokens of a part belong; None: they are of a topic that is no more."""
        if part.topic <= 0:
            raise InvalidArgument("a part of lease tokens names no topic", field="parts")
        if has_id(self._topic, part.topic):
            return self._topic.partition(part.partition)
        return None

    def hand_out(self, make: Make, answer: Reply) -> None:
        if self._forwarded:
            self._hand_out_forwarded(make, forwarded(len(self._parts), answer))
            return
        topic = self._topic

        def whole(result: object) -> None:
            if isinstance(result, Settled) and result.lost:
                topic.metrics.leases_lost.add((topic.config.name,), len(result.lost))
            answer(result)

        if len(self._parts) == 1:

            def only(lost: object) -> None:
                whole(Settled(lost) if isinstance(lost, list) else lost)

            _settle(self._partitions[0], make(self._tokens, only))
            return
        shares = self._by_partition()
        positions = [some for _, some in shares]
        gathered = Gathered(len(shares), partial(_lost_of, positions), whole)
        for i, (partition, some) in enumerate(shares):
            _settle(partition, make(self._tokens[some], gathered.part(i)))

    def _by_partition(self) -> list[tuple[PartitionPort | None, NDArray[np.intp]]]:
        """Each partition once, with the positions of its tokens: a partition acts on many as fast
        as on one, and a request may have thousands of parts."""
        pairs = list(zip(self._parts, self._partitions, strict=True))
        numbers = [-1 if port is None else part.partition for part, port in pairs]
        numbered = np.repeat(np.array(numbers), [part.count for part in self._parts])
        order = np.argsort(numbered, kind="stable")
        found, firsts = np.unique(numbered[order], return_index=True)
        ports = dict(zip(numbers, self._partitions, strict=True))
        groups = np.split(order, firsts[1:])
        return [(ports[int(n)], group) for n, group in zip(found, groups, strict=True)]

    def _hand_out_forwarded(self, make: Make, outcomes: Gathered) -> None:
        """Another node has sent them on: each part has an outcome of its own."""
        at = 0
        for i, part in enumerate(self._parts):
            partition = self._partitions[i]
            if partition is None or self._topic.served(partition.index) is not None:
                tokens = self._tokens[at : at + part.count]
                _settle(partition, make(tokens, outcomes.part(i)))
            else:
                outcomes.part(i)(self._topic.not_here(part.partition))
            at += part.count


def _settle(partition: PartitionPort | None, request: TokenRequest) -> None:
    if partition is None:
        request.reply(list(range(len(request.tokens))))
    else:
        partition.settle(request)


def _lost_of(positions: Sequence[NDArray[np.intp]], results: Sequence[object]) -> object:
    """What several partitions lost, by its positions in the request; or why it is not known."""
    errors = [result for result in results if isinstance(result, PenstockError)]
    if errors:
        return as_one(errors, len(results))
    lost: list[int] = []
    for mine, result in zip(positions, results, strict=True):
        if isinstance(result, list) and result:
            lost += mine[result].tolist()
    return Settled(sorted(lost))
