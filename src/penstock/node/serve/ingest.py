"""Enqueues of a delta topic from their arrival to their turn: bounded, the most urgent first.

As long as its log keeps up, a partition takes deltas as they come, and nothing here costs more than
a comparison. Once as many are on their way into the log as a turn takes, or the live path has no
room, what comes waits in the topic's queue. There classes decide, and what does not fit is refused
with the time after which it is worth trying again: a producer that is told so still has everything.

The live path says how much more may be written by `ServedTopic.live_room`. While there is no room
the queue stands still: that is how a live path that lags is felt by producers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from penstock.errors import Backpressure, PenstockError
from penstock.model.delta import PriorityClass
from penstock.node.clock import Alarm
from penstock.node.route.ports import PartitionPort
from penstock.node.serve.partition import Partition, TopicView
from penstock.node.write.enqueuer import EnqueuePart
from penstock.propagation.flow.ingest import IngestQueue
from penstock.propagation.options import LiveOptions

TURN_ENTRIES: Final = 8192  # of a partition on their way into its log; from there on they wait
LOOK_AGAIN_MS: Final = 5  # at a live path that had no room
_PRIORITY_AT: Final = 2  # in a delta's payload
_VECTOR_AT: Final = slice(64, 80)
Placed = list[tuple[PartitionPort, EnqueuePart]]


class IngestGate:
    def __init__(self, topic: TopicView, options: LiveOptions) -> None:
        self._topic, self._clock, self._metrics = topic, topic.clock, topic.metrics
        self.queue: IngestQueue[EnqueuePart] = IngestQueue(
            options.ingest_max, options.ingest_high_water, options.ageing_ms
        )
        self._again = Alarm(topic.clock, topic.wake)
        self._turns = 0

    # --- arrival ---

    def enqueue(self, parts: Placed) -> None:
        """Hand the parts of a request to their partitions, let them wait, or refuse all of them."""
        if self._free(parts):
            for partition, part in parts:
                partition.enqueue(part)
            return
        queue = self.queue
        waiting = [part.count for p, part in parts if self._topic.served(p.index) is not None]
        if waiting and not queue.fits(sum(waiting)):
            self._refuse(parts)
            return
        crossings, now_ms = queue.crossings, self._clock.now_ms()
        for partition, part in parts:
            if self._topic.served(partition.index) is not None:
                queue.put(
                    part, priority=_most_urgent(part), count=part.count, now_ms=now_ms,
                    group=partition.index, keys=partial(_vectors, part),
                )  # fmt: skip
            else:
                partition.enqueue(part)
        if queue.crossings != crossings:
            self._metrics.ingest_crossings.add((self._topic.config.name,))
        self._topic.wake()

    def _free(self, parts: Placed) -> bool:
        room, waiting = self._topic.live_room, self.queue.depths
        if room is not None and room() <= 0:
            return False
        for port, _ in parts:
            partition = self._topic.served(port.index)
            if partition is not None and (
                port.index in waiting or _under_way(partition) >= TURN_ENTRIES
            ):
                return False
        return True

    def _refuse(self, parts: Placed) -> None:
        queue, name = self.queue, self._topic.config.name
        refusal = Backpressure(
            f"{queue.depth} deltas wait to be written to {name}",
            retry_after_s=round(queue.retry_after_s(self._clock.now_ms()), 3),
            limit=queue.capacity,
        )
        self._metrics.ingest_rejected.add((name,), sum(part.count for _, part in parts))
        for _, part in parts:
            part.request.part_failed(refusal)

    # --- the turn ---

    def drain(self) -> None:
        """Hand on what the partitions and the live path have room for."""
        queue, topic, left = self.queue, self._topic, self._live_room()
        now_ms = self._clock.now_ms()
        self._turns += 1
        groups = list(queue.depths)
        first = self._turns % len(groups) if groups else 0  # so that none is always the last
        for index in groups[first:] + groups[:first]:
            partition = topic.served(index)
            if partition is None:
                continue
            refused = partition.journal.refusal() is not None
            # What cannot be written now is not kept waiting: the partition will say so.
            room = queue.depths[index] if refused else TURN_ENTRIES - _under_way(partition)
            if left is not None and not refused:
                room = min(room, left)
            for part in queue.take(room, now_ms, group=index):
                partition.enqueue(part)
                left = None if left is None else left - part.count
        if queue.depth and left is not None and left <= 0:
            self._again.set(now_ms + LOOK_AGAIN_MS)  # nobody may tell us that it has moved on

    def _live_room(self) -> int | None:
        room = self._topic.live_room
        return None if room is None else room()

    def fail(self, index: int, error: PenstockError) -> None:
        """A partition is no longer served here: what waits for it was surely not written."""
        for part in self.queue.remove(index):
            part.request.part_failed(error)

    def close(self, error: PenstockError) -> None:
        self._again.cancel()
        for index in list(self.queue.depths):
            self.fail(index, error)

    def status(self) -> dict[str, Any]:
        queue = self.queue
        return {
            "depth": queue.depth,
            "depth_by_class": {c.name.lower(): queue.depth_by_class[c] for c in PriorityClass},
            "capacity": queue.capacity,
            "high": queue.high,
            "high_water": queue.mark,
            "crossings": queue.crossings,
            "rejected": queue.rejected,
            "drain_rate": round(queue.drain_rate(self._clock.now_ms())),
            "live_room": self._live_room(),
        }


def _under_way(partition: Partition) -> int:
    """Entries that a partition was handed and has not committed."""
    staged = partition.log.sequence_last - partition.coordinator.sequence_committed
    return partition.enqueuer.gathered + staged


def _most_urgent(part: EnqueuePart) -> int:
    payloads = part.columns.binary("payload")
    assert payloads is not None, "checked when it came"
    blob = np.frombuffer(payloads.blob, np.uint8)
    return int(blob[payloads.offsets[:-1] + _PRIORITY_AT].min())


def _vectors(part: EnqueuePart) -> set[bytes]:
    payloads = part.columns.binary("payload")
    assert payloads is not None, "checked when it came"
    return {payload[_VECTOR_AT] for payload in payloads}
