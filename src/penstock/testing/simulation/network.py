"""Messages between nodes, and between clients and nodes: late, twice, out of order, or never.

A follower's stream is a connection: what is lost on it breaks it, and sooner or later both ends
notice. Everything else is a datagram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.testing.simulation.schedule import MS, SECOND

if TYPE_CHECKING:
    from penstock.testing.simulation.node import Node
    from penstock.testing.simulation.simulation import Simulation

NOTICE_US: Final = (5 * MS, 1500 * MS)
RESET_US: Final = (1 * MS, 30 * MS)


class Stream:
    """A follower's stream: (follower, source, partition) and the number of its opening."""

    __slots__ = ("broken", "follower", "lives", "number", "partition", "source")

    def __init__(self, follower: Node, source: Node, partition: int, number: int) -> None:
        self.follower, self.source = follower.name, source.name
        self.lives = {follower.name: follower.life, source.name: source.life}
        self.partition, self.number = partition, number
        self.broken = False


class Network:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._schedule = simulation, simulation.schedule
        self.cut: dict[tuple[str, str], int] = {}  # (from, to) -> how many faults cut it
        self._last: dict[tuple[str, str], int] = {}  # when the last ordered message arrives
        self.streams: dict[tuple[str, int], Stream] = {}  # (follower, partition)

    def reaches(self, source: str, target: str) -> bool:
        return not self.cut.get((source, target))

    def send(
        self, source: str, target: str, deliver: str, *args: Any, stream: Stream | None = None
    ) -> None:
        """Call `target.deliver(*args)` some time from now, perhaps twice, perhaps never."""
        profile, schedule = self._simulation.profile, self._schedule
        calm = self._simulation.calm
        lost = not self.reaches(source, target) or (not calm and schedule.chance(profile.drop))
        if stream is not None and stream.broken:
            return
        if lost:
            if stream is not None:
                self.break_stream(stream)
            return
        delay = schedule.skewed(*profile.latency_us)
        if not calm and schedule.chance(profile.straggle):
            delay += schedule.skewed(5 * MS, profile.straggle_us)
        if stream is not None and not profile.reorder:
            # A connection keeps the order.
            key = (source, target)
            arrival = max(self._last.get(key, 0), schedule.now + delay)
            self._last[key] = arrival
            delay = arrival - schedule.now
        schedule.after(delay, self._arrive, target, deliver, args, stream)
        if not calm and schedule.chance(profile.duplicate):
            late = delay + schedule.skewed(100, profile.straggle_us)
            schedule.after(late, self._arrive, target, deliver, args, stream)

    def _arrive(
        self, target: str, deliver: str, args: tuple[Any, ...], stream: Stream | None
    ) -> None:
        receiver = self._simulation.receiver(target)
        if not receiver.up:
            if stream is not None:
                self.break_stream(stream, gone=receiver.refuses)
            return
        ordered = not self._simulation.profile.reorder
        if stream is not None and ordered and stream.lives[target] != receiver.life:
            self.break_stream(stream, gone=True)
            return  # a connection ends with the process
        receiver.run(getattr(receiver, deliver), *args)

    # --- streams ---

    def open(self, follower: str, source: str, partition: int, number: int) -> Stream:
        before = self.streams.get((follower, partition))
        if before is not None:
            self.break_stream(before)
        nodes = self._simulation.nodes
        stream = Stream(nodes[follower], nodes[source], partition, number)
        self.streams[follower, partition] = stream
        return stream

    def stream_to(self, follower: str, partition: int, number: int) -> Stream | None:
        found = self.streams.get((follower, partition))
        return found if found is not None and found.number == number else None

    def close(self, follower: str, partition: int) -> None:
        stream = self.streams.get((follower, partition))
        if stream is not None:
            self.break_stream(stream)

    def break_stream(self, stream: Stream, *, gone: bool = False) -> None:
        """Nothing more passes; both ends are told, each in its own time."""
        if stream.broken:
            return
        stream.broken = True
        schedule = self._schedule
        notice = RESET_US if gone else NOTICE_US
        follower = self._simulation.nodes[stream.follower]
        source = self._simulation.nodes[stream.source]
        follower.after_in(
            follower.life, schedule.skewed(*notice), follower.on_stream_lost, stream, gone
        )
        source.after_in(source.life, schedule.skewed(*notice), source.on_follower_lost, stream)

    def node_stopped(self, node: str, *, refuses: bool) -> None:
        """A process ended: its peers' connections are reset, if its machine still runs."""
        for stream in list(self.streams.values()):
            if node in (stream.follower, stream.source):
                if refuses:
                    self.break_stream(stream, gone=stream.source == node)
                else:
                    late = self._schedule.skewed(200 * MS, 5 * SECOND)
                    self._schedule.after(late, self.break_stream, stream)
