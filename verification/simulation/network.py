"""Messages between nodes, and between clients and nodes: late, twice, out of order, or never.

A follower's stream is a connection: what is lost on it breaks it, and sooner or later both ends
notice. Everything else is a datagram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from verification.simulation.schedule import MS, SECOND

if TYPE_CHECKING:
    from verification.simulation.node import Node
    from verification.simulation.simulation import Simulation

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
        profile = simulation.profile
        self._low, high = profile.latency_us
        self._spread = high - self._low + 1
        self._drop, self._straggle, self._copy = profile.drop, profile.straggle, profile.duplicate
        self._straggle_us = profile.straggle_us
        self._ordered = not profile.reorder
        self.cut: dict[tuple[str, str], int] = {}  # (from, to) -> how many faults cut it
        self._last: dict[tuple[str, str], int] = {}  # when the last ordered message arrives
        self.streams: dict[tuple[str, int], Stream] = {}  # (follower, partition)

    def send(
        self, source: str, target: str, deliver: str, *args: Any, stream: Stream | None = None
    ) -> None:
        """Call `target.deliver(*args)` some time from now, perhaps twice, perhaps never.

        Half of what a run does comes through here: it draws its chances itself.
        """
        schedule, calm = self._schedule, self._simulation.calm
        random, link = schedule.random, (source, target)
        lost = self.cut.get(link) or (not calm and self._drop > 0 and random() < self._drop)
        if stream is not None and stream.broken:
            return
        if lost:
            if stream is not None:
                self.break_stream(stream)
            return
        drawn = random()
        delay = self._low + int(drawn * drawn * drawn * self._spread)
        if not calm and self._straggle > 0 and random() < self._straggle:
            delay += schedule.skewed(5 * MS, self._straggle_us)
        if stream is not None and self._ordered:
            # A connection keeps the order.
            arrival = schedule.now + delay
            before = self._last.get(link, 0)
            if before > arrival:
                arrival = before
            self._last[link] = arrival
            delay = arrival - schedule.now
        schedule.after(delay, self._arrive, target, deliver, args, stream)
        if not calm and self._copy > 0 and random() < self._copy:
            late = delay + schedule.skewed(100, self._straggle_us)
            schedule.after(late, self._arrive, target, deliver, args, stream)

    def _arrive(
        self, target: str, deliver: str, args: tuple[Any, ...], stream: Stream | None
    ) -> None:
        receiver = self._simulation.receivers[target]
        if not receiver.up:
            if stream is not None:
                self.break_stream(stream, gone=receiver.refuses)
            return
        if stream is not None and self._ordered and stream.lives[target] != receiver.life:
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
