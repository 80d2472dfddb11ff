"""What must hold of every history, whoever recorded it: the simulator, or the clients and nodes of
a real cluster, who write one JSON object per line (`verification.events`).

    checker = Checker()
    checker.read(lines)             # or checker.add(event), one by one
    checker.add_log(batches)        # each partition's committed log, from its beginning
    print(msgspec.json.encode(checker.verdict()))

The first fields of a verdict are sizes; every other number counts violations and must be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Final

import msgspec

from penstock.model.batch import Batch
from penstock.model.columns import Columns
from verification.events import (
    AnyEvent,
    Atomic,
    AtRest,
    Committed,
    Delivered,
    Enqueued,
    Enqueuing,
    Entered,
    Extended,
    Message,
    Refused,
    Released,
    Settled,
    Stuck,
    decode_event,
    log_events,
)
from verification.replay import Key, LogReplay

PROBLEMS_MAX: Final = 20  # spelled out in a verdict; all are counted


class Verdict(msgspec.Struct):
    """Sizes of the history, then violations: each of these must be 0."""

    acknowledged: int = 0  # messages
    committed: int = 0  # sequences in the log
    leases: int = 0
    settled: int = 0
    epochs: int = 0
    acknowledged_lost: int = 0  # told to be in, not in the log where it was said
    phantoms: int = 0  # in the log, never sent, or refused, or altered
    duplicates: int = 0  # one producer key, two messages
    double_leases: int = 0  # leased while leased, by the log or by what consumers knew
    undone: int = 0  # delivered or leased again after its acknowledgement
    torn_batches: int = 0  # an atomic batch of which only a part is in
    split_epochs: int = 0  # two coordinators in one epoch
    unmatched: int = 0  # an entry after another history than the one it was written after
    records: int = 0  # a replica set that changed without a joint step
    changed: int = 0  # committed entries that are different elsewhere or later
    regressions: int = 0  # a watermark that went back
    gaps: int = 0
    unequal: int = 0  # replicas that differ at rest
    rank_errors: int = 0  # a pick that left something better behind
    early: int = 0  # a delayed message that was popped before its time
    halts: int = 0
    wrong_answers: int = 0
    exceptions: int = 0
    stuck: int = 0
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        return not any(getattr(self, name) for name in VIOLATIONS)


VIOLATIONS: Final = tuple(
    name for name in Verdict.__struct_fields__[5:] if name != "problems"
)  # fmt: skip


class Checker:
    """Feed it a history in any order that keeps each reporter's own; the log comes last."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(VIOLATIONS, 0)
        self._problems: list[str] = []
        self._chains: dict[tuple[int, int], tuple[int, str]] = {}  # (partition, sequence)
        self._watermarks: dict[tuple[int, str, int], int] = {}
        self._coordinators: dict[tuple[int, int], str] = {}
        self._sent: dict[Key, tuple[int, int]] = {}  # key -> partition, digest of the payload
        self._refused: set[Key] = set()
        self._acknowledged: dict[tuple[int, int], Key] = {}
        self._atomic: list[list[tuple[Key, int]]] = []
        self._deliveries: dict[tuple[int, int], Delivered] = {}  # (partition, token)
        self._extended: dict[tuple[int, int], int] = {}
        self._released: dict[tuple[int, int], int] = {}
        self._settled: dict[tuple[int, int], int] = {}
        self._at_rest: dict[int, AtRest] = {}
        self._log: list[Any] = []

    # --- input ---

    def read(self, lines: Iterable[bytes | str]) -> None:
        for line in lines:
            self.add(decode_event(line))

    def add(self, event: AnyEvent) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is None:
            self._log.append(event)
        else:
            handler(self, event)

    def add_log(
        self, batches: Iterable[Batch], decode: Callable[[Batch], Columns] = Batch.columns
    ) -> None:
        """The committed log of a partition, from its beginning."""
        for batch in batches:
            self._log += log_events(batch, decode(batch))

    def broken(self, what: str, problem: str) -> None:
        """A violation that the reporter itself has seen."""
        self._counts[what] += 1
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(f"{what}: {problem}")

    # --- as it happens ---

    def _on_enqueuing(self, event: Enqueuing) -> None:
        for i, digest in zip(range(event.count), event.digests, strict=True):
            key = (event.producer, event.epoch, event.sequence + i)
            self._sent[key] = (event.partition, digest)

    def _on_enqueued(self, event: Enqueued) -> None:
        for i in range(event.count):
            key = (event.producer, event.epoch, event.sequence + i)
            self._acknowledged[event.partition, event.first + i] = key

    def _on_refused(self, event: Refused) -> None:
        self._refused.add((event.producer, event.epoch, event.sequence))

    def _on_atomic(self, event: Atomic) -> None:
        keys = [
            ((producer, epoch, first + i), partition)
            for producer, epoch, first, count, partition in event.parts
            for i in range(count)
        ]
        self._atomic.append(keys)

    def _on_delivered(self, event: Delivered) -> None:
        self._deliveries[event.partition, event.token] = event

    def _on_extended(self, event: Extended) -> None:
        place = (event.partition, event.token)
        self._extended[place] = max(self._extended.get(place, 0), event.until_us)

    def _on_released(self, event: Released) -> None:
        self._released.setdefault((event.partition, event.token), event.at_us)

    def _on_settled(self, event: Settled) -> None:
        self._settled[event.partition, event.token] = event.at_us

    def _on_entered(self, event: Entered) -> None:
        before = self._coordinators.setdefault((event.partition, event.epoch), event.node)
        if before != event.node:
            self.broken(
                "split_epochs",
                f"{before} and {event.node} in epoch {event.epoch} of {event.partition}",
            )

    def _on_committed(self, event: Committed) -> None:
        who = (event.partition, event.node, event.life)
        if event.sequence < self._watermarks.get(who, 0):
            self.broken("regressions", f"{who} from {self._watermarks[who]} to {event.sequence}")
        self._watermarks[who] = event.sequence
        known = self._chains.setdefault(
            (event.partition, event.sequence), (event.chain, event.node)
        )
        if known[0] != event.chain:
            self.broken(
                "changed",
                f"{event.node} and {known[1]} differ at {event.partition}/{event.sequence}",
            )

    def _on_at_rest(self, event: AtRest) -> None:
        first = self._at_rest.setdefault(event.partition, event)
        if (first.sequence, first.chain, first.digest) != (
            event.sequence, event.chain, event.digest,
        ):  # fmt: skip
            self.broken("unequal", f"{first} and {event}")

    def _on_stuck(self, event: Stuck) -> None:
        self.broken("stuck", event.what)

    # --- the verdict ---

    def verdict(self) -> Verdict:
        replay = LogReplay(self.broken)
        for event in self._log:
            replay.add(event)
        self._check_messages(replay)
        self._check_atomic(replay)
        self._check_leases(replay)
        return Verdict(
            acknowledged=len(self._acknowledged),
            committed=sum(replay.ends.values()),
            leases=len(replay.leases),
            settled=len(self._settled),
            epochs=len(self._coordinators),
            **self._counts,
            problems=list(self._problems),
        )

    def _check_messages(self, replay: LogReplay) -> None:
        for place, key in self._acknowledged.items():
            message = replay.messages.get(place)
            if message is None or message.key != key or not replay.is_in(place):
                self.broken("acknowledged_lost", f"{key} is not at {place}: {message}")
        for place, message in replay.messages.items():
            if not message.producer:
                continue
            partition, digest = self._sent.get(message.key, (None, None))
            if partition != place[0]:
                self.broken("phantoms", f"{message.key} at {place} was never sent there")
            elif digest != message.digest:
                self.broken("phantoms", f"{message.key} at {place} was sent with another payload")
            elif message.key in self._refused and replay.is_in(place):
                self.broken("phantoms", f"{message.key} at {place} was refused")

    def _check_atomic(self, replay: LogReplay) -> None:
        for keys in self._atomic:
            there = [key in replay.places for key, _ in keys]
            if any(there) != all(there):
                self.broken("torn_batches", f"{sum(there)} of {len(there)} of {keys[0]}")

    def _check_leases(self, replay: LogReplay) -> None:
        """Leases as the consumers knew them: known to the log, and one at a time."""
        held: dict[tuple[int, int], list[Delivered]] = {}
        for place, delivery in self._deliveries.items():
            message = (delivery.partition, delivery.message)
            if delivery.until_us > delivery.at_us:  # else it was over when it arrived
                held.setdefault(message, []).append(delivery)
            if replay.leases.get(place) != delivery.message:
                self.broken("phantoms", f"the log has no lease for {delivery}")
            elif self._is_altered(delivery, replay.messages.get(message)):
                self.broken("phantoms", f"the log has another payload for {delivery}")
        for deliveries in held.values():
            deliveries.sort(key=lambda delivery: delivery.at_us)
            for one, two in pairwise(deliveries):
                if self._held_until(one) > two.at_us:
                    self.broken("double_leases", f"{one} and {two}")
        for place in self._settled:
            if place not in replay.acked:
                self.broken("undone", f"the log has no acknowledgement of lease {place}")

    def _is_altered(self, delivery: Delivered, message: Message | None) -> bool:
        return message is not None and delivery.digest not in (None, message.digest)

    def _held_until(self, delivery: Delivered) -> int:
        place = (delivery.partition, delivery.token)
        until = max(delivery.until_us, self._extended.get(place, 0))
        return min(until, self._released.get(place, until))


_HANDLERS: Final[dict[type, Any]] = {
    Enqueuing: Checker._on_enqueuing,
    Enqueued: Checker._on_enqueued,
    Refused: Checker._on_refused,
    Atomic: Checker._on_atomic,
    Delivered: Checker._on_delivered,
    Extended: Checker._on_extended,
    Released: Checker._on_released,
    Settled: Checker._on_settled,
    Entered: Checker._on_entered,
    Committed: Checker._on_committed,
    AtRest: Checker._on_at_rest,
    Stuck: Checker._on_stuck,
}
