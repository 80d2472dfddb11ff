"""How the other members of a record stand, as their coordinator sees it.

A member that is not streamed to has no credit either, so it is counted like one whose credit ran
out: from the moment that it did or, if there was some left, from when the member was last heard.
It is over with the first acknowledgement on a stream, not with the opening of one: who asks again
and again and hears nothing of what it is sent stays away.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from penstock.replication.credit import Credit
from penstock.replication.sender import Sender


class Standing(NamedTuple):
    """One member; `credit` is None while no stream is open to it."""

    node: str
    durable: int | None  # what it acknowledged last; None: nothing in this epoch
    lag: int  # entries that it is not known to hold durably
    credit: Credit | None
    lagging: bool

    @property
    def credit_share(self) -> float:
        return 0.0 if self.credit is None else self.credit.share


class Absence:
    """A member that has acknowledged nothing since `since_ms`."""

    __slots__ = ("durable", "lagging", "since_ms")

    def __init__(self, since_ms: int, *, durable: int = 0, lagging: bool = False) -> None:
        self.since_ms, self.durable, self.lagging = since_ms, durable, lagging


class Absences:
    """Bounded by the members of the record: others are forgotten at the next tick."""

    def __init__(self) -> None:
        self._of: dict[str, Absence] = {}

    def standing(self, node: str, sender: Sender | None, *, last: int) -> Standing:
        absence = self._of.get(node)
        late = absence is not None and absence.lagging
        held = 0 if absence is None else absence.durable
        if sender is None:
            return Standing(node, held or None, last - held, None, late)
        held = max(held, sender.durable)  # a stream vouches for nothing before its first ack
        return Standing(node, held or None, last - held, sender.credit, sender.lagging or late)

    def on_lost(self, sender: Sender) -> None:
        """Its stream is closed. Who was away already, is for as long as it was."""
        absence = self._of.get(sender.node)
        if absence is None:
            since = sender.heard_ms if sender.exhausted_ms is None else sender.exhausted_ms
            absence = self._of[sender.node] = Absence(since)
        absence.durable = max(absence.durable, sender.durable)
        absence.lagging |= sender.lagging

    def on_matched(self, node: str, matched: int) -> None:
        """It is back, and its log equals ours up to here: what it held beyond is gone."""
        absence = self._of.get(node)
        if absence is not None:
            absence.durable = min(absence.durable, matched)

    def on_heard(self, node: str) -> list[str]:
        """It acknowledged something. Returns what is worth a warning."""
        absence = self._of.pop(node, None)
        return ["resumed"] if absence is not None and absence.lagging else []

    def on_tick(
        self, members: Collection[str], streamed: Collection[str], *, lagging_ms: int, now: int
    ) -> list[str]:
        """Returns those that are lagging from now on."""
        before = self._of
        self._of = {node: before[node] for node in members if node in before}
        for node in members:
            if node not in streamed:
                self._of.setdefault(node, Absence(now))
        found = []
        for node, absence in self._of.items():
            if not absence.lagging and now - absence.since_ms > lagging_ms:
                absence.lagging = True
                found.append(node)
        return found
