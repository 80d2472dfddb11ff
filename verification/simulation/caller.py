"""Asking the coordinator of a partition, whoever that is: find it, wait, ask again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from verification.simulation.schedule import MS
from verification.simulation.tenure import Request

if TYPE_CHECKING:
    from verification.simulation.simulation import Simulation

TIMEOUT_US: Final = 1200 * MS


class Owner(Protocol):
    name: str

    def after(self, delay_us: int, action: Callable[..., None], *args: Any) -> None: ...


class Caller:
    """Requests of one client or node. An answer is given once per call: what the coordinator said,
    or `("unknown",)` after a timeout or a failover, for the caller to decide."""

    def __init__(self, simulation: Simulation, owner: Owner) -> None:
        self._simulation, self._owner = simulation, owner
        self._waiting: dict[int, tuple[int, Callable[[Any], None]]] = {}  # by request
        self._number = 0
        self._coordinators: dict[int, str] = {}  # as far as known

    def reset(self) -> None:
        self._waiting.clear()
        self._coordinators.clear()

    def call(self, request: Request, on_answer: Callable[[Any], None]) -> None:
        """One attempt at the node that is believed to coordinate."""
        self._number += 1
        number = self._number
        self._waiting[number] = (request.partition, on_answer)
        target = self._coordinators.get(request.partition)
        if not target:
            target = self._simulation.schedule.rng.choice(self._simulation.names)
        self._simulation.network.send(
            self._owner.name, target, "on_request", self._owner.name, number, request
        )
        self._owner.after(TIMEOUT_US, self.on_reply, number, ("unknown",))

    def on_reply(self, number: int, answer: Any) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        partition, on_answer = waiting
        if answer[0] == "elsewhere" and answer[1]:
            self._coordinators[partition] = answer[1]
        elif answer[0] in ("unknown", "elsewhere", "refused"):
            self._coordinators.pop(partition, None)
        on_answer(answer)

    def insist(
        self, request: Request, on_answer: Callable[[Any, int], None], *, attempt: int = 1,
        doubts: int = 0,
    ) -> None:  # fmt: skip
        """Ask until somebody has an answer; tells it with the number of attempts whose outcome is
        unknown."""

        def answered(answer: Any) -> None:
            if answer[0] in ("unknown", "elsewhere", "refused"):
                unknown = doubts + (answer[0] == "unknown")
                pause = self._simulation.schedule.skewed(5 * MS, 300 * MS)
                self._owner.after(pause, again, unknown)
                return
            on_answer(answer, doubts)

        def again(unknown: int) -> None:
            self.insist(request, on_answer, doubts=unknown)

        self.call(request, answered)
