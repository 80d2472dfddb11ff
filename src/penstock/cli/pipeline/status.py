"""`penstock pipeline status`: what a pipeline does, from the status file in its state folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.command import Answer, Exit, Invocation, Rounds, Watch, command, group, looked
from penstock.console import Columns, cell, duration, listing, size, table, when
from penstock.errors import NotFound

app = group()
Status = dict[str, Any]
WATCH_S: Final = 1.0  # between two looks
STALE_S: Final = 10.0  # a living process that has not written for so long is stuck
STYLES: Final = {
    "idle": "green", "writing": "green", "opening": "yellow", "waiting": "red", "hanging": "red",
    "halted": "bold red", "stopped": "dim",
}  # fmt: skip
BAR: Final = 12
PARTITION: Final[Columns] = {
    "topic": "topic",
    **{f">{name}": name for name in ("partition", "sequence", "read", "duplicates", "released",
                                     "pending", "quarantined")},
}  # fmt: skip


@command(app, "status", connects=False)
async def status(
    cli: Invocation,
    config: Annotated[
        Path, typer.Option("--config", "-c", help="The pipeline's TOML file.")
    ] = Path("pipeline.toml"),
    state: Annotated[
        Path | None, typer.Option(help="The state folder, instead of the file's.")
    ] = None,
    watch: Watch = False,
    rounds: Rounds = None,
) -> Answer | None:
    """Show how far the sinks of a pipeline are, and what holds them up."""
    folder = state or state_folder(config)

    async def answer() -> Answer:
        found = look(folder)
        code = Exit.OK if found["alive"] or found["state"] == "stopped" else Exit.UNAVAILABLE
        return Answer(found, view_of, code)

    return await looked(cli, answer, watch=watch, interval_s=WATCH_S, rounds=rounds)


def state_folder(config: Path) -> Path:
    from penstock.spark.settings import PipelineSettings

    return PipelineSettings.load(config).state


def look(folder: Path) -> Status:
    """The status on file, with `alive` (a process runs the pipeline) and `age_s` (of the file)."""
    from penstock.spark.delivery.delivery import read_status
    from penstock.spark.fold.state_folder import running_pid

    if not folder.is_dir():
        raise NotFound(f"{folder} is not there: no pipeline ran yet", field="state")
    found = read_status(folder)
    pid = running_pid(folder)
    age_s = max(0.0, time.time() - found["updated_ms"] / 1000)
    return found | {
        "alive": pid is not None,
        "age_s": round(age_s, 3),
        "stale": pid is not None and age_s > STALE_S,
    }


def view_of(found: Status) -> RenderableType:
    parts: list[RenderableType] = [_headline(found), _flow(found), _sinks(found)]
    parts += [Text(line, style="red") for line in _source_problems(found["source"])]
    for sink in found["sinks"]:
        if sink["last_error"] and sink["state"] in ("waiting", "halted", "hanging"):
            error = sink["last_error"]
            line = f"{_name(sink)}, {when(error['time_ms'])}: {error['message']}"
            parts.append(Text(line, style="red"))
    return Group(*parts)


def _headline(found: Status) -> Text:
    if not found["alive"]:
        state, style = ("stopped", "dim") if found["state"] == "stopped" else ("DEAD", "bold red")
    elif found["stale"]:
        state, style = "STUCK", "bold red"
    else:
        state, style = found["state"], "green"
    text = Text.assemble((f"{found['pipeline']} ", "bold"), (state, style))
    text.append(f"  pid {found['pid']} on {found['host']}, since {when(found['started_ms'])}")
    text.append(f", told {duration(found['age_s'] * 1000)} ago\n")
    return text


def _source_problems(source: Status) -> Iterator[str]:
    if source.get("paused"):
        yield "reading pauses: too much is not yet delivered"
    if source.get("waiting") and source.get("last_error"):
        yield f"source: {source['last_error']['message']}"


def _flow(found: Status) -> RenderableType:
    """The source, as far as it is folded, and what is kept for the sinks."""
    changes = found["changes"]
    kept = f"trigger {cell(changes['last'])}; {cell(changes['triggers'])} kept for the sinks, "
    return listing(found["partitions"], PARTITION, title=kept + size(changes["bytes"]))


def _sinks(found: Status) -> RenderableType:
    worst = max([sink["lag"]["seconds"] for sink in found["sinks"]] + [1.0])
    made = table(
        "sink", "state", "lag", ">behind", ">to go", ">p50", ">p99", ">rows/s", ">written",
        ">retries", ">dead", "breaker",
    )  # fmt: skip
    for sink in found["sinks"]:
        lag, seen = sink["lag"], sink["visible_s"]
        state = sink["state"] if found["alive"] else "stopped"
        made.add_row(
            _name(sink),
            Text(state, style=STYLES.get(state, "")),
            _bar(lag["seconds"] / worst if lag["rows"] else 0.0),
            duration(lag["seconds"] * 1000) if lag["rows"] else "–",
            *(cell(lag["rows"]), _seconds(seen.get("p50")), _seconds(seen.get("p99"))),
            *(cell(round(sink["rows_per_s"])), cell(sink["rows"]), cell(sink["retries"])),
            *(cell(sink["dead_letters"]), _breaker(sink["breaker"])),
        )
    return made


def _name(sink: Status) -> str:
    return str(sink["name"]).lstrip("_") if sink["internal"] else str(sink["name"])


def _bar(share: float) -> Text:
    full = min(BAR, round(share * BAR) or (1 if share > 0 else 0))
    return Text.assemble(("█" * full, "yellow"), ("░" * (BAR - full), "dim"))


def _seconds(value: float | None) -> str:
    return "–" if value is None else duration(value * 1000)


def _breaker(breaker: Status) -> Text:
    if breaker["state"] == "closed":
        return Text("closed", style="dim")
    wait = f", probe in {duration(breaker['retry_in_s'] * 1000)}" if breaker["retry_in_s"] else ""
    return Text(f"{breaker['state'].replace('_', ' ')}{wait}", style="red")
