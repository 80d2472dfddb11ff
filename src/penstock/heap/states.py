"""The states of a message and the one table of how they follow each other.

            ┌────────────► PREPARED ──┐ commit                ┌──► DEAD ──► READY (replay), DONE
            │                 │ abort  ▼                       │
    NONE ───┼─► READY ◄── DELAYED ◄───┴── back ── LEASED ◄─────┼── READY, DELAYED
            └─► DELAYED       due                    │         │
                                                     └─────────┴──► DONE

`NONE` is a sequence that never was a message, or whose message is long done and forgotten. `DONE`
is the same for as long as its page is kept. Nothing leads out of `DONE`.

Whether a waiting message is `DELAYED` or already `READY` depends on the clock of whoever asks,
not on the log: both mean *waiting until `not_before_ms`*, and a replica that was never asked
still calls a message delayed that another has found due. So they count as one state wherever
replicas are compared.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption


class State(IntEnum):
    NONE = 0
    READY = 1
    DELAYED = 2
    LEASED = 3
    DEAD = 4
    PREPARED = 5
    DONE = 6


STATES: Final = len(State)

# From each state (row) to the states it may become.
FOLLOWS: Final[dict[State, frozenset[State]]] = {
    State.NONE: frozenset({State.READY, State.DELAYED, State.PREPARED}),
    State.READY: frozenset({State.LEASED, State.DEAD, State.DONE}),
    State.DELAYED: frozenset({State.READY, State.LEASED, State.DEAD, State.DONE}),
    State.LEASED: frozenset({State.READY, State.DELAYED, State.DEAD, State.DONE}),
    State.DEAD: frozenset({State.READY, State.DONE}),
    State.PREPARED: frozenset({State.READY, State.DELAYED, State.DONE}),
    State.DONE: frozenset(),
}

# The same by target: ALLOWED[to][from].
ALLOWED: Final = tuple(tuple(to in FOLLOWS[start] for start in State) for to in State)

ALIVE: Final = frozenset({State.READY, State.DELAYED, State.LEASED, State.DEAD, State.PREPARED})
WAITING: Final = frozenset({State.READY, State.DELAYED})


def mask_of(states: frozenset[State]) -> NDArray[np.bool_]:
    """A lookup table: `mask_of(states)[state]`."""
    return np.array([state in states for state in State])


def reject_transition(start: int, to: State) -> Corruption:
    """A log that asks for this was not written by this machine."""
    return Corruption(f"a message cannot go from {State(start).name} to {to.name}")
