"""How a client shuts out earlier clients of the same producer name.

A client whose producer has a lasting name takes the place of earlier clients of that name. A
partition refuses an earlier client once it has heard of the later one. So before its first put a
client has its epoch written into every partition of the topic; it does so again when the topic has
other partitions than then, and before partitions forget it, as they do with a producer that is
silent for the topic's `dedup_ms`. A client with a name of its own has nobody to succeed, and pays
nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from penstock.client.network.link import Link
from penstock.client.queue.entries import ProducerIdentity
from penstock.model.topic import TopicConfig

AGAIN: Final = 0.5  # the part of `dedup_ms` after which partitions are told again


class _Told(NamedTuple):
    topic: int  # its id
    partitions: int
    until: float  # a time of the loop


class Succession:
    """Has the partitions of a topic refuse earlier clients of a lasting producer name."""

    def __init__(self, link: Link, identity: ProducerIdentity) -> None:
        self._link, self._identity = link, identity
        self._loop = asyncio.get_running_loop()
        self._told: _Told | None = None
        self._telling = asyncio.Lock()

    def known(self, config: TopicConfig) -> bool:
        """Whether all partitions refuse earlier clients of the name, and will for a while."""
        told = self._told
        return not self._identity.lasting or (
            told is not None
            and told[:2] == (config.id, config.partitions)
            and self._loop.time() < told.until
        )

    async def tell(self, config: TopicConfig) -> None:
        """Have all partitions refuse them; raises `StaleProducer` if there is a later client."""
        async with self._telling:
            if self.known(config):
                return
            until = self._loop.time() + config.dedup_ms / 1000 * AGAIN
            await self._link.call(
                "producer_begin",
                topic=config.name,
                producer=self._identity.name,
                epoch=self._identity.epoch,
            )
            self._told = _Told(config.id, config.partitions, until)
