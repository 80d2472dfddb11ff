"""`penstock-sim`: run many seeds, or one of them step by step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.testing.checkers import VIOLATIONS
from penstock.testing.simulation.profiles import PROFILES
from penstock.testing.simulation.simulation import Result, Simulation, run_seed

CHUNK: Final = 4  # runs that a worker takes at once
SHOWN_MAX: Final = 20  # failing runs that are printed with their last events


class Summary(msgspec.Struct):
    """Of many runs: what they did, and every violation by its kind."""

    runs: int = 0
    failed: list[tuple[int, str]] = []  # seed and profile
    by_profile: dict[str, int] = {}
    sizes: dict[str, int] = {}
    violations: dict[str, int] = {}
    faults: dict[str, int] = {}
    crash_points: dict[str, int] = {}
    heal_ms_max: int = 0

    def add(self, result: Result) -> None:
        self.runs += 1
        if not result.ok:
            self.failed.append((result.seed, result.profile))
        _count(self.by_profile, {result.profile: 1})
        verdict = msgspec.structs.asdict(result.verdict)
        _count(self.violations, {name: verdict[name] for name in VIOLATIONS})
        _count(self.sizes, {n: v for n, v in verdict.items() if n not in (*VIOLATIONS, "problems")})
        _count(self.faults, result.faults)
        _count(self.crash_points, result.crashes)
        self.heal_ms_max = max(self.heal_ms_max, result.heal_ms)


def _count(totals: dict[str, int], more: dict[str, int]) -> None:
    for name, number in more.items():
        totals[name] = totals.get(name, 0) + number


def runs_of(start: int, seeds: int, profile: str | None) -> list[tuple[int, str]]:
    """Which profile each seed runs in: the one that is asked for, or all of them in turn."""
    names = [profile] if profile else list(PROFILES)
    return [(seed, names[seed % len(names)]) for seed in range(start, start + seeds)]


def results(runs: Sequence[tuple[int, str]], jobs: int) -> Iterator[Result]:
    """In the order in which they end."""
    if jobs == 1:
        yield from map(_run, runs)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run, runs, chunksize=CHUNK)


def _run(run: tuple[int, str]) -> Result:
    return run_seed(*run)


def describe(result: Result) -> str:
    """A failing run: what is wrong, how to see it again, how it ended."""
    again = f"penstock-sim --profile {result.profile} --trace {result.seed}"
    problems = "\n".join(f"  {problem}" for problem in result.verdict.problems)
    last = "\n".join(f"  {line}" for line in result.last)
    return (
        f"seed {result.seed} of profile {result.profile} failed ({again})\n{problems}\n"
        f"last events:\n{last}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.trace is not None:
        return _show_trace(options.trace, options.profile or "mixed")
    runs = runs_of(options.start, options.seeds, options.profile)
    summary, errors = Summary(), Console(stderr=True, highlight=False)
    progress = _progress(errors) if errors.is_terminal and not options.json else None
    with progress or nullcontext():
        task = progress.add_task("seeds", total=len(runs)) if progress else None
        for result in results(runs, options.jobs):
            summary.add(result)
            if not result.ok and len(summary.failed) <= SHOWN_MAX:
                errors.print(describe(result), markup=False)
            if progress is not None and task is not None:
                progress.advance(task)
    _print(summary, as_json=options.json)
    return 1 if summary.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock-sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many runs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--profile", choices=list(PROFILES), help="a mix of faults; else all")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print all events of one run")
    return parser


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)


def _show_trace(seed: int, profile: str) -> int:
    simulation = Simulation(seed, PROFILES[profile], keep=0)
    result = simulation.run()
    for line in simulation.trace.lines():
        print(line)
    print(f"trace {result.trace}, {result.events} events, {result.virtual_ms} ms", file=sys.stderr)
    for problem in result.verdict.problems:
        print(problem, file=sys.stderr)
    return 0 if result.ok else 1


def _print(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
        return
    rows: list[tuple[str, Any]] = [("runs", summary.runs), *summary.sizes.items()]
    rows += [("faults", sum(summary.faults.values()))]
    rows += [("longest time to heal, ms", summary.heal_ms_max)]
    rows += [(name, number) for name, number in summary.violations.items() if number]
    for name, value in rows:
        print(f"{name:26} {value}")
    failed = ", ".join(f"{seed} ({profile})" for seed, profile in summary.failed)
    print(f"{'failing seeds':26} {failed or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
