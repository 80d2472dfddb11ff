"""The sending ends of one replica's streams: each reader is sent what its credit allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.model.batch import Batch
from penstock.replication.effects import Effects, Followed
from verification.simulation.network import Stream

if TYPE_CHECKING:
    from verification.simulation.host import Host


class Sending:
    def __init__(self, host: Host) -> None:
        self._host = host
        self.streams: dict[str, Stream] = {}  # who was told where its stream begins

    def opened(self, node: str, stream: Stream | None, reply: Followed) -> None:
        """A refused request opens nothing, and leaves alone what is open."""
        if stream is not None and not (reply.refused or reply.reseed):
            self.streams[node] = stream

    def closed(self, stream: Stream) -> None:
        if self.streams.get(stream.follower) is stream:
            del self.streams[stream.follower]

    def pump(self) -> None:
        """Send each reader what it may be sent."""
        host = self._host
        may_send = host.replica.may_send
        for node, stream in list(self.streams.items()):
            while (window := may_send(node)) is not None:
                if window.first <= host.disk.base.sequence:
                    host.simulation.network.break_stream(stream)  # it is not here any more
                    host.on_follower_lost(stream)
                    break
                batches = host.disk.read_some(window)
                if not batches:
                    break
                if host.platter.reads_bad(batches):
                    host.on_unsent()
                    host.simulation.network.break_stream(stream)
                    host.on_follower_lost(stream)
                    break
                for effect in self._send(node, batches):
                    host.do(effect)

    def _send(self, node: str, batches: list[Batch]) -> Effects:
        host = self._host
        append = host.replica.append_to(node)
        network, last = host.simulation.network, batches[-1].last
        stream = network.stream_to(node, host.partition, append.stream)
        host.log("slice", node, batches[0].first, last, append)
        network.send(
            host.node.name, node, "on_slice", host.partition, append, batches, stream=stream
        )
        sent = host.replica.on_sent(
            node,
            last,
            entries=last - batches[0].first + 1,
            bytes=sum([b.size for b in batches]),
            now=host.now,
        )
        host.node.point("slice.sent")
        return sent
