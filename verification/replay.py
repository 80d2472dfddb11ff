"""A second, plain reading of the committed log, to hold the heap and the clients against.

It knows nothing of priorities, only which messages there are, who holds them and what is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from verification.events import AnyEvent, Decided, Ended, Leased, Message, Range

Key = tuple[str, int, int]  # producer, its epoch, its sequence
Place = tuple[int, int]  # partition, sequence


class LogReplay:
    """Give it each partition's log in order."""

    def __init__(self, broken: Callable[[str, str], None]) -> None:
        self._broken = broken
        self.ends: dict[int, int] = {}  # partition -> last sequence
        self._epochs: dict[int, int] = {}
        self.messages: dict[Place, Message] = {}
        self.places: dict[Key, Place] = {}  # of messages that are in
        self.leases: dict[Place, int] = {}  # (partition, token) -> message
        self.acked: set[Place] = set()  # tokens
        self._holder: dict[Place, int] = {}  # message -> token of its live lease
        self._done: set[Place] = set()  # messages
        self._prepared: dict[tuple[int, bytes], list[Message]] = {}
        self._decided: dict[tuple[int, bytes], bool] = {}

    def add(self, event: AnyEvent) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TypeError(f"{event} is not read off a log")
        handler(self, event)

    def is_in(self, place: Place) -> bool:
        """Whether a message counts: it is no share of a batch that was decided against."""
        message = self.messages[place]
        return not message.transaction or self.places.get(message.key) == place

    def _on_range(self, event: Range) -> None:
        partition = event.partition
        if event.first != self.ends.get(partition, 0) + 1:
            self._broken("gaps", f"{event} after {self.ends.get(partition, 0)}")
        if event.epoch_previous != self._epochs.get(partition, 0) or event.epoch < (
            event.epoch_previous
        ):
            self._broken("gaps", f"{event} after epoch {self._epochs.get(partition, 0)}")
        self.ends[partition], self._epochs[partition] = event.last, event.epoch

    def _on_message(self, event: Message) -> None:
        self.messages[event.partition, event.sequence] = event
        if not event.producer:
            return
        if not event.transaction:
            self._enter(event)
            return
        name = (event.partition, event.transaction)
        outcome = self._decided.get(name)
        if outcome is None:
            self._prepared.setdefault(name, []).append(event)
        elif outcome:
            self._enter(event)

    def _enter(self, event: Message) -> None:
        place = (event.partition, event.sequence)
        if self.places.setdefault(event.key, place) != place:
            self._broken("duplicates", f"{event.key} at {self.places[event.key]} and {place}")

    def _on_decided(self, event: Decided) -> None:
        name = (event.partition, event.transaction)
        if name in self._decided:
            return  # the first one holds
        self._decided[name] = event.commit
        for message in self._prepared.pop(name, []):
            if event.commit:
                self._enter(message)

    def _on_leased(self, event: Leased) -> None:
        place = (event.partition, event.message)
        self.leases[event.partition, event.token] = event.message
        if place not in self.messages or not self.is_in(place):
            self._broken("phantoms", f"{event} of a message that is not there")
        if place in self._holder:
            self._broken("double_leases", f"{event} while {self._holder[place]} is held")
        if place in self._done:
            self._broken("undone", f"{event} of a message that is done")
        self._holder[place] = event.token

    def _on_ended(self, event: Ended) -> None:
        token, message = event.token, event.message
        if token:
            message = self.leases.get((event.partition, token), 0)
            if self._holder.get((event.partition, message)) != token:
                return  # it was over: without effect
        place = (event.partition, message)
        self._holder.pop(place, None)
        if event.how == "ack":
            self._done.add(place)
            if token:
                self.acked.add((event.partition, token))


_HANDLERS: Final[dict[type, Callable[[LogReplay, Any], None]]] = {
    Range: LogReplay._on_range,
    Message: LogReplay._on_message,
    Decided: LogReplay._on_decided,
    Leased: LogReplay._on_leased,
    Ended: LogReplay._on_ended,
}
