"""A partition that another node serves, or nobody yet."""

from __future__ import annotations

from penstock.errors import Unavailable
from penstock.node.requests import EnqueuePart, ExtendRequest, ReturnRequest, TokenRequest
from penstock.node.routing.ports import Key


class RemotePartition:
    """The port of a partition that is not served here."""

    def __init__(self, topic: str, key: Key) -> None:
        self.topic, self.key = topic, key
        self.index = key[1]

    @property
    def enqueueing(self) -> RemotePartition:
        return self

    @property
    def settling(self) -> RemotePartition:
        return self

    def enqueue(self, part: EnqueuePart) -> None:
        part.request.part_failed(self._nobody())

    def settle(self, request: TokenRequest) -> None:
        request.reply(self._nobody())

    def give_back(self, request: ReturnRequest) -> None:
        request.reply(self._nobody())

    def extend(self, request: ExtendRequest) -> None:
        request.reply(self._nobody())

    def _nobody(self) -> Unavailable:
        return Unavailable(
            f"nobody serves partition {self.index} of {self.topic} at the moment",
            partition=self.index,
        )
