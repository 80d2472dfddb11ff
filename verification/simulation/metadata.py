"""The metadata store: records with revisions, leases, watches that lag, and outages.

Every write is a compare and swap at one moment. What may go wrong lies around it: the request or
the answer takes time or is lost, and a watch tells of a change late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.replication.assignment import PartitionRecord
from verification.simulation.schedule import MS, SECOND

if TYPE_CHECKING:
    from verification.simulation.simulation import Simulation

LATENCY_US: Final = (500, 8 * MS)
WATCH_US: Final = (1 * MS, 20 * MS)
RECONNECT_US: Final = (1 * MS, 1500 * MS)  # until a watch that was cut off tells again
STALE_CHANGES: Final = 8  # that a list may lack
LEASE_US: Final = 1500 * MS
TIMEOUT_US: Final = 500 * MS


class MetadataStore:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._schedule = simulation, simulation.schedule
        self.revision = 0
        self.records: dict[int, tuple[PartitionRecord, int]] = {}
        self.members: dict[str, int] = {}  # node -> create revision
        self._expires: dict[str, int] = {}
        self.changes: list[tuple[int, PartitionRecord, int] | dict[str, int]] = []
        self.away = False
        self.cut: dict[str, int] = {}  # node -> how many faults cut it off
        self.stale: dict[str, int] = {}  # node -> extra delay of its watch

    # --- at the store ---

    def create(self, partition: int, record: PartitionRecord) -> None:
        self._write(partition, record)

    def _write(self, partition: int, record: PartitionRecord) -> int:
        self.revision += 1
        self.records[partition] = (record, self.revision)
        self._changed((partition, record, self.revision))
        return self.revision

    def swap(self, partition: int, record: PartitionRecord, expected: int) -> int:
        """The new revision, 0 if the record has changed since `expected`."""
        before, revision = self.records[partition]
        if revision != expected:
            return 0
        self._simulation.checker.on_record_changed(partition, before, record)
        self._simulation.log("store", "swap", partition, _brief(record))
        return self._write(partition, record)

    def edit(self, partition: int, **changes: Any) -> None:
        """An operator's change."""
        record, revision = self.records[partition]
        self.swap(partition, msgspec.structs.replace(record, **changes), revision)

    def _changed(self, change: tuple[int, PartitionRecord, int] | dict[str, int]) -> None:
        self.changes.append(change)
        for node in self._simulation.nodes:
            self.wake(node)

    # --- between a node and the store ---

    def reaches(self, node: str) -> bool:
        return not self.away and not self.cut.get(node)

    def request(
        self, node: str, ask: Callable[[], Any], answer: Callable[[Any], None], *, lossy: bool
    ) -> None:
        """Have `ask` done at the store and its result told to `answer` at the node; None if the
        outcome is unknown. `lossy`: the answer may be lost after the fact."""
        owner = self._simulation.nodes[node]
        life = owner.life

        def arrive() -> None:
            if not self.reaches(node):
                owner.after_in(life, TIMEOUT_US, answer, None)
                return
            result = ask()
            if lossy and self._schedule.chance(self._simulation.profile.lost_answers):
                owner.after_in(life, TIMEOUT_US, answer, None)
            else:
                owner.after_in(life, self._latency(), answer, result)

        self._schedule.after(self._latency(), arrive)

    def _latency(self) -> int:
        return self._schedule.skewed(*LATENCY_US)

    # --- watches ---

    def wake(self, node: str) -> None:
        """Let the node's watch deliver what is new, after a while."""
        stale = 0 if self._simulation.calm else self.stale.get(node, 0)
        delay = self._schedule.skewed(*WATCH_US) + stale
        self._schedule.after(delay, self._deliver, node)

    def _deliver(self, name: str) -> None:
        node = self._simulation.nodes[name]
        if not node.up or not self.reaches(name) or node.watched is None:
            return
        fresh, node.watched = self.changes[node.watched :], len(self.changes)
        for change in fresh:
            node.run(node.on_change, change)

    def listed(
        self, node: str
    ) -> tuple[int, dict[int, tuple[PartitionRecord, int]], dict[str, int]]:
        """Where a watch would begin, and the records and members then. A member of the store that
        lags tells old ones, and goes on to lag for a while."""
        seen = len(self.changes)
        chance = 0 if self._simulation.calm else self._simulation.profile.stale_lists
        if self._schedule.chance(chance):
            seen -= self._schedule.between(0, min(STALE_CHANGES, seen - len(self.records)))
            self.lag(node, self._schedule.skewed(50 * MS, 3 * SECOND))
        records: dict[int, tuple[PartitionRecord, int]] = {}
        members: dict[str, int] = {}
        for change in self.changes[:seen]:
            if isinstance(change, dict):
                members = change
            else:
                records[change[0]] = change[1:]
        return seen, records, dict(members)

    def lag(self, node: str, lag_us: int) -> None:
        """Have the node's watch tell everything that much later, for that long."""
        self.stale[node] = lag_us

        def over() -> None:
            self.stale[node] = 0
            self.wake(node)

        self._schedule.after(lag_us, over)

    def cut_off(self, node: str) -> None:
        self.cut[node] = self.cut.get(node, 0) + 1

    def reconnect(self, node: str) -> None:
        self.cut[node] -= 1
        self._schedule.after(self._schedule.skewed(*RECONNECT_US), self._deliver, node)

    def come_back(self) -> None:
        self.away = False
        for node in self._simulation.nodes:
            self._schedule.after(self._schedule.skewed(*RECONNECT_US), self._deliver, node)

    # --- leases ---

    def keep_alive(self, node: str) -> None:
        """Renew the node's lease, or register it anew."""
        self._expires[node] = self._schedule.now + LEASE_US
        if node not in self.members:
            self.revision += 1
            self.members[node] = self.revision
            self._changed(dict(self.members))

    def leave(self, node: str) -> None:
        if self.members.pop(node, None) is not None:
            self._changed(dict(self.members))

    def expire(self) -> None:
        """Called now and then. While the store is away no lease ends."""
        now = self._schedule.now
        if self.away:
            self._expires = dict.fromkeys(self._expires, now + LEASE_US)
            return
        for node in [n for n in self.members if self._expires[n] < now]:
            self._simulation.log("store", "expired", node)
            self.leave(node)


def _brief(record: PartitionRecord) -> str:
    return (
        f"e{record.epoch} {record.coordinator} v={','.join(record.voters)}"
        f" j={','.join(record.joint)} l={','.join(record.learners)} t={','.join(record.target)}"
        f" u={','.join(f'{n}:{u}' for n, u in sorted(record.uuids.items()))}"
    )
