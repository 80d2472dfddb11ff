"""Explore every state that a small cluster can be in, nearest first.

    python -m verification.model.check --epochs 3 --entries 1
    python -m verification.model.check --epochs 3 --entries 2 --length 3
    python -m verification.model.check --wipes 1 --epochs 2
    python -m verification.model.check --change swap --epochs 2 --length 2 --prompt

Breadth first, so that the first counterexample is among the shortest. The search is exhaustive
within its bounds, or says that it is not.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass, replace
from typing import Final

from verification.model.replication import Model
from verification.model.world import VOTER, Bounds, Broken, World, check

CHANGES: Final = {
    "": Bounds(),
    # One node hands over to two others: majorities of the two sets have nobody in common.
    "grow": Bounds(seats=(VOTER, 0, 0), target=(False, True, True)),
    "swap": Bounds(seats=(VOTER, VOTER, VOTER, 0), target=(False, True, True, True)),
}


@dataclass(frozen=True)
class Outcome:
    states: int
    transitions: int
    depth: int
    seconds: float
    complete: bool  # nothing is left to explore within the bounds
    broken: str = ""  # which invariant, if one was
    trace: tuple[tuple[str, World], ...] = ()  # the steps to it

    def __str__(self) -> str:
        head = (
            f"{self.states} states, {self.transitions} transitions, depth {self.depth}, "
            f"{self.seconds:.1f} s, {'complete' if self.complete else 'NOT complete'}"
        )
        if not self.broken:
            return head
        steps = [f"  {label}\n{_shown(world)}" for label, world in self.trace]
        return "\n".join([head, f"BROKEN: {self.broken}", *steps])


def _shown(world: World) -> str:
    members = [
        f"      promised {m.promised} log {m.log} durable {m.durable} committed {m.committed}"
        f" {('', 'fencing', 'leading')[m.phase]} {m.epoch or ''} stream {m.stream}"
        f" replies {m.replies} acks {m.acks} disk {m.disk} seat {tuple(m.seat)}"
        for m in world.members
    ]
    return "\n".join([f"      epoch {world.epoch}, committed {world.history}", *members])


def explore(model: Model, *, states_max: int = 5_000_000) -> Outcome:
    """Take every step from every state until there is nothing new, or something is broken."""
    collecting = gc.isenabled()
    gc.disable()  # states are tuples of tuples: looking for cycles among them takes long
    try:
        return _explore(model, states_max)
    finally:
        if collecting:
            gc.enable()


def _explore(model: Model, states_max: int) -> Outcome:
    began = time.monotonic()
    first = model.canonical(model.initial())
    parents: dict[World, tuple[World, str] | None] = {first: None}
    layer, depth, transitions = [first], 0, 0

    def outcome(*, complete: bool = False, broken: str = "", at: World | None = None) -> Outcome:
        return Outcome(
            states=len(parents), transitions=transitions, depth=depth,
            seconds=time.monotonic() - began, complete=complete, broken=broken,
            trace=_trace(parents, at),
        )  # fmt: skip

    while layer:
        following: list[World] = []
        for world in layer:
            try:
                for label, after in model.steps(world):
                    transitions += 1
                    found = model.canonical(after)
                    if found in parents:
                        continue
                    parents[found] = (world, label)
                    check(found)
                    following.append(found)
            except Broken as error:
                last = next(reversed(parents))
                at = last if parents[last] is not None and last not in following else world
                return outcome(broken=str(error), at=at)
            if len(parents) > states_max:
                return outcome()
        layer = following
        depth += bool(layer)
    return outcome(complete=True)


def _trace(
    parents: dict[World, tuple[World, str] | None], at: World | None
) -> tuple[tuple[str, World], ...]:
    steps = []
    while at is not None and (came := parents[at]) is not None:
        steps.append((came[1], at))
        at = came[0]
    return tuple(reversed(steps))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verification.model.check", description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--entries", type=int, default=1, help="of clients, beside the barriers")
    parser.add_argument("--length", type=int, default=0, help="of a log; 0: what the others allow")
    parser.add_argument("--wipes", type=int, default=0, help="how often each disk may be lost")
    parser.add_argument("--change", choices=list(CHANGES), default="", help="reassign the replicas")
    parser.add_argument("--prompt", action="store_true", help="what is said is heard at once")
    parser.add_argument("--states-max", type=int, default=20_000_000)
    args = parser.parse_args(argv)
    bounds = replace(
        CHANGES[args.change], epochs=args.epochs, entries=args.entries, length=args.length,
        wipes=args.wipes, lag=not args.prompt,
    )  # fmt: skip
    outcome = explore(Model(bounds), states_max=args.states_max)
    print(outcome)
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
