"""Delayed messages by the time that passes for everybody: no clock of a node may end a delay early.

It is checked where all clocks but one are about right. Where clocks are set at random there is no
majority to go by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from penstock.model.batch import Batch
from verification.simulation.schedule import MS

if TYPE_CHECKING:
    from verification.simulation.simulation import Simulation

# Right clocks are up to 0.3 s to either side of the middle, and a log may have been written by the
# slowest of them and be read by the fastest.
SPREAD_US: Final = 700 * MS


class Delays:
    """When each message may be popped first, in microseconds of the simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._due_us: dict[tuple[int, int], int] = {}

    def note(self, partition: int, batch: Batch, delay_ms: int) -> None:
        """A batch was appended; one that it takes the place of was never committed."""
        due_us = self._simulation.schedule.now + delay_ms * MS
        for sequence in range(batch.first, batch.last + 1):
            self._due_us[partition, sequence] = due_us

    def check(self, partition: int, messages: Iterable[int]) -> None:
        """These are popped now."""
        if not self._simulation.profile.fast_ms:
            return
        now = self._simulation.schedule.now
        for sequence in messages:
            early_us = self._due_us.get((partition, sequence), 0) - now
            if early_us > SPREAD_US:
                problem = f"{partition}/{sequence} was popped {early_us // MS} ms early"
                self._simulation.checker.broken("early", problem)
