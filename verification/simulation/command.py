"""Run many seeds of the simulator, or one of them step by step."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verification.simulation.campaign import Run, Summary, results, runs_of
from verification.simulation.profiles import PROFILES
from verification.simulation.simulation import Result, Simulation

COMMAND: Final = "python -m verification.simulation.command"
SHOWN_MAX: Final = 20  # failing runs that are printed with their last events
REPORT_SECONDS: Final = 30  # between two lines of progress where there is no terminal


def describe(result: Result) -> str:
    """A failing run: what is wrong, how to see it again, how it ended."""
    again = f"{COMMAND} --profile {result.profile} --trace {result.seed}"
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
    total = Summary(options.start)
    left = _parts(options, total)
    with Campaign(sum(len(runs) for runs, _ in left)).shown() as campaign:
        for runs, file in left:
            part = campaign.run(runs, options.jobs)
            if file is not None:
                _store(file, part)
            total.merge(part)
    _print(total, as_json=options.json)
    return 1 if total.failed else 0


def _parts(options: argparse.Namespace, total: Summary) -> list[tuple[list[Run], Path | None]]:
    """What is to be run, and where its summary goes; what is stored already goes into `total`."""
    if options.folder is None:
        return [(runs_of(options.start, options.seeds, options.profile), None)]
    options.folder.mkdir(parents=True, exist_ok=True)
    left: list[tuple[list[Run], Path | None]] = []
    end = options.start + options.seeds
    for start in range(options.start, end, options.part):
        count = min(options.part, end - start)
        file = options.folder / f"{options.profile or 'all'}-{start:07}-{count}.json"
        if file.exists():
            total.merge(msgspec.json.decode(file.read_bytes(), type=Summary))
        else:
            left.append((runs_of(start, count, options.profile), file))
    return left


def _store(file: Path, part: Summary) -> None:
    draft = file.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(part))
    draft.replace(file)


class Campaign:
    """Runs seeds and tells how far it is: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, seeds: int) -> None:
        self._seeds = seeds
        self._done = self._failed = 0
        self._began = self._told = time.monotonic()
        self._console = Console(stderr=True, highlight=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}")
        self._bar = Progress(
            text, *columns, console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._bar.add_task("seeds", total=seeds)

    @contextmanager
    def shown(self) -> Iterator[Campaign]:
        with self._bar:
            yield self

    def run(self, runs: list[Run], jobs: int) -> Summary:
        summary, began = Summary(runs[0][0]), time.monotonic()
        for result in results(runs, jobs):
            summary.add(result)
            self._on_result(result)
        summary.seconds = round(time.monotonic() - began, 1)
        return summary

    def _on_result(self, result: Result) -> None:
        self._done += 1
        self._bar.advance(self._task)
        if not result.ok:
            self._failed += 1
            if self._failed <= SHOWN_MAX:
                self._console.print(describe(result), markup=False, soft_wrap=True)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told >= REPORT_SECONDS:
            self._told = now
            self._console.print(self._progress(now - self._began), markup=False, soft_wrap=True)

    def _progress(self, seconds: float) -> str:
        rate = self._done / seconds
        minutes = round((self._seeds - self._done) / rate / 60)
        return (
            f"{self._done} of {self._seeds} seeds, {self._failed} failing, {rate:.1f} per second,"
            f" {minutes // 60} h {minutes % 60:02} min left"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many runs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--profile", choices=list(PROFILES), help="a mix of faults; else all")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--folder", type=Path, help="store the summary of each part here; parts that are stored"
        " already are not run again",
    )  # fmt: skip
    parser.add_argument("--part", type=int, default=1000, help="seeds of a part that is stored")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print all events of one run")
    return parser


def _show_trace(seed: int, profile: str) -> int:
    simulation = Simulation(seed, PROFILES[profile])
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
    failed = ", ".join(f"{failure.seed} ({failure.profile})" for failure in summary.failed)
    print(f"{'failing seeds':26} {failed or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
