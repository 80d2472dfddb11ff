"""Many seeds: the processes that run them, and what came of all of them together."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Final

import msgspec

from verification.checkers import VIOLATIONS, Verdict
from verification.simulation.profiles import PROFILES
from verification.simulation.simulation import Result, run_seed

RUN_SECONDS_MAX: Final = 600  # a run takes a fraction of a second; one that hangs is given up
GARBAGE_MAX: Final = 50_000  # objects that come to be before the collector looks for cycles

Run = tuple[int, str]  # seed and profile


class Failure(msgspec.Struct):
    seed: int
    profile: str
    problems: list[str]


class Summary(msgspec.Struct):
    """Of many runs: what they did, and every violation by its kind."""

    start: int = 0  # the first seed
    runs: int = 0
    seconds: float = 0
    failed: list[Failure] = []
    by_profile: dict[str, int] = {}
    sizes: dict[str, int] = {}
    violations: dict[str, int] = {}  # by the checker that found them
    faults: dict[str, int] = {}  # by their kind
    crash_points: dict[str, int] = {}
    heal_ms_max: int = 0

    def add(self, result: Result) -> None:
        self.runs += 1
        if not result.ok:
            self.failed.append(Failure(result.seed, result.profile, result.verdict.problems))
        verdict = msgspec.structs.asdict(result.verdict)
        sizes = {n: v for n, v in verdict.items() if n not in (*VIOLATIONS, "problems")}
        _count(self.by_profile, {result.profile: 1})
        _count(self.sizes, {**sizes, "events": result.events, "virtual_ms": result.virtual_ms})
        _count(self.violations, {name: verdict[name] for name in VIOLATIONS})
        _count(self.faults, result.faults)
        _count(self.crash_points, result.crashes)
        self.heal_ms_max = max(self.heal_ms_max, result.heal_ms)

    def merge(self, other: Summary) -> None:
        """Add what another part of the same campaign found."""
        self.runs += other.runs
        self.seconds += other.seconds
        self.failed += other.failed
        for mine, theirs in (
            (self.by_profile, other.by_profile),
            (self.sizes, other.sizes),
            (self.violations, other.violations),
            (self.faults, other.faults),
            (self.crash_points, other.crash_points),
        ):
            _count(mine, theirs)
        self.heal_ms_max = max(self.heal_ms_max, other.heal_ms_max)


def _count(totals: dict[str, int], more: dict[str, int]) -> None:
    for name, number in more.items():
        totals[name] = totals.get(name, 0) + number


def runs_of(start: int, seeds: int, profile: str | None) -> list[Run]:
    """Which profile each seed runs in: the one that is asked for, or all of them in turn."""
    names = [profile] if profile else list(PROFILES)
    return [(seed, names[seed % len(names)]) for seed in range(start, start + seeds)]


def results(runs: Sequence[Run], jobs: int) -> Iterator[Result]:
    """In the order in which they end. A run whose process ends or hangs is a failing run."""
    todo = list(reversed(runs))
    workers: dict[Connection, Worker] = {}
    try:
        while todo or workers:
            while todo and len(workers) < jobs:
                worker = Worker()
                worker.begin(todo.pop())
                workers[worker.link] = worker
            ready = wait(list(workers), timeout=1)
            for link, worker in list(workers.items()):
                if link in ready or worker.overdue:
                    result = worker.result()
                    yield result
                    if todo and worker.alive:
                        worker.begin(todo.pop())
                    else:
                        workers.pop(link).stop()
    finally:
        for worker in workers.values():
            worker.stop()


class Worker:
    """A process that runs one seed after the other."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.link, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.alive = True
        self._run: Run = (0, "")
        self._since = 0.0

    def begin(self, run: Run) -> None:
        self._run, self._since = run, time.monotonic()
        with suppress(BrokenPipeError):  # it has ended: `result` finds that out and says so
            self.link.send(run)

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self._since > RUN_SECONDS_MAX

    def result(self) -> Result:
        """Of the run that it began; one that was not survived if there is nothing to read."""
        if not self.link.poll():
            return self._lost(f"the run did not end within {RUN_SECONDS_MAX} s")
        try:
            found: Result = self.link.recv()
        except (EOFError, OSError):
            self._process.join(timeout=10)
            return self._lost(f"the process ended with code {self._process.exitcode}")
        return found

    def _lost(self, why: str) -> Result:
        self.alive = False
        seed, profile = self._run
        verdict = Verdict(exceptions=1, problems=[f"exceptions: {why}"])
        return Result(seed, profile, False, "", 0, 0, 0, {}, {}, verdict)

    def stop(self) -> None:
        self.link.close()
        self._process.kill()
        self._process.join()


def _work(link: Connection) -> None:
    gc.freeze()  # what is imported stays
    gc.set_threshold(GARBAGE_MAX)
    while True:
        try:
            seed, profile = link.recv()
        except EOFError:
            return  # nobody asks any more
        link.send(run_seed(seed, profile))
