"""`penstock pipeline`: run the pipeline from delta topics to sinks, see how it is, and its jobs.

What a pipeline does is told by the status file in its state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.command import (
    Answer,
    Exit,
    Force,
    Invocation,
    Rounds,
    Watch,
    Where,
    command,
    group,
    looked,
    time_of,
)
from penstock.cli.node import LogLevel
from penstock.cli.question import condition, parsed
from penstock.console import (
    Columns,
    cell,
    duration,
    listing,
    progress,
    say,
    size,
    table,
    to_json,
    when,
)
from penstock.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from penstock.sinks.index import Index
    from penstock.spark.pipeline import Pipeline
    from penstock.spark.settings import PipelineSettings
    from penstock.spark.source.options import Connecting
    from penstock.spark.store import StoreAddress

app = group()

Config = Annotated[Path, typer.Option("--config", "-c", help="The pipeline's TOML file.")]
Status = dict[str, Any]
WATCH_S: Final = 1.0  # between two looks
STALE_S: Final = 10.0  # a living process that has not written for so long is stuck
STYLES: Final = {
    "idle": "green", "writing": "green", "opening": "yellow", "filling": "yellow",
    "waiting": "red", "hanging": "red", "halted": "bold red", "stopped": "dim",
}  # fmt: skip
BAR: Final = 12
PARTITION: Final[Columns] = {
    "topic": "topic",
    **{f">{name}": name for name in ("partition", "sequence", "read", "duplicates", "released",
                                     "pending", "quarantined")},
}  # fmt: skip
JobConfig = Annotated[Path, typer.Option("--config", help="The pipeline's TOML file.")]
Master = Annotated[str | None, typer.Option(help="Of a Spark cluster; without: this machine.")]
SinkName = Annotated[str | None, typer.Option("--sink", help="One of the pipeline's sinks.")]
Time = Annotated[str | None, typer.Option(metavar="TIME", help="ISO 8601, UTC unless it says.")]
NEIGHBOUR: Final[Columns] = {
    "namespace": "namespace", "vector": "vector_id",
    ">distance": lambda one: f"{one['distance']:.6g}", ">revision": "revision",
    "metadata": "metadata",
}  # fmt: skip


@command(app, "run", connects=False)
def run(
    cli: Invocation,
    config: Config = Path("pipeline.toml"),
    url: Annotated[str | None, typer.Option(help="The node's url, instead of the file's.")] = None,
    state: Annotated[str | None, typer.Option(help="The state's folder or URL, likewise.")] = None,
    master: Annotated[
        str | None, typer.Option(help="A Spark cluster's master. [default: this machine]")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Cores to use. [default: all]")] = None,
    available_now: Annotated[
        bool, typer.Option(help="Stop when all that is in the log now has reached the sinks.")
    ] = False,
    metrics: Annotated[
        str | None, typer.Option(help="Serve Prometheus metrics.", metavar="HOST:PORT")
    ] = None,
    log_level: LogLevel = None,
) -> Answer:
    """Run the pipeline until SIGTERM or Ctrl-C; said again, it does not wait for the sinks."""
    from penstock.node.observe.logs import configure
    from penstock.spark.pipeline import Pipeline

    settings = _settings(config, url=url, state=state, master=master, cores=cores)
    configure(log_level or "info")
    pipeline = Pipeline(settings, metrics=metrics)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: pipeline.request_stop())
    pipeline.start(available_now=available_now)
    _announce(pipeline, as_json=cli.json)
    pipeline.wait()
    found = look(settings.store)
    return Answer(found, view_of, Exit.FAILED if pipeline.delivery.halted else Exit.OK)


def _announce(pipeline: Pipeline, *, as_json: bool) -> None:
    started = {"pipeline": pipeline.settings.name, "state": str(pipeline.settings.state)}
    if as_json:
        print(to_json({"started": started}, indent=None), file=sys.stderr, flush=True)
    else:
        say(f"pipeline {started['pipeline']} runs, its state is in {started['state']}")


@command(app, "status", connects=False)
async def status(
    cli: Invocation,
    config: Config = Path("pipeline.toml"),
    state: Annotated[
        str | None, typer.Option(help="The state's folder or URL, instead of the file's.")
    ] = None,
    watch: Watch = False,
    rounds: Rounds = None,
) -> Answer | None:
    """Show how far the sinks of a pipeline are, and what holds them up."""
    from penstock.spark.store import StoreAddress

    place = StoreAddress(url=state) if state else _settings(config).store

    async def answer() -> Answer:
        found = look(place)
        code = Exit.OK if found["alive"] or found["state"] == "stopped" else Exit.UNAVAILABLE
        return Answer(found, view_of, code)

    return await looked(cli, answer, watch=watch, interval_s=WATCH_S, rounds=rounds)


def look(state: StoreAddress) -> Status:
    """The status on file, with `alive` (a process runs the pipeline) and `age_s` (of the file)."""
    from penstock.spark.delivery.delivery import read_status
    from penstock.spark.fold.state import running_pid

    folder = state.folder
    if folder is not None and not folder.is_dir():
        raise NotFound(f"{folder} is not there: no pipeline ran yet", field="state")
    found = read_status(state.open())
    age_s = max(0.0, time.time() - found["updated_ms"] / 1000)
    if folder is not None:
        alive = running_pid(folder) is not None
    else:  # it may run on any machine: one that tells of itself lives
        alive = found["state"] != "stopped" and age_s <= STALE_S
    return found | {"alive": alive, "age_s": round(age_s, 3), "stale": alive and age_s > STALE_S}


def view_of(found: Status) -> RenderableType:
    parts: list[RenderableType] = [_headline(found), _flow(found), _sinks(found)]
    parts += [Text(line, style="red") for line in _source_problems(found["source"])]
    parts += [Text(line, style="yellow") for line in _fillings(found)]
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


def _fillings(found: Status) -> Iterator[str]:
    """How far the sinks are that are being filled."""
    for sink in found["sinks"]:
        filling = sink["filling"]
        if found["alive"] and filling is not None:
            doing = (
                "is being written" if filling["writing"] else f"is read from the {filling['from']}"
            )
            line = f"{_name(sink)}: all up to trigger {cell(filling['trigger'])} {doing}"
            tasks = f", {cell(filling['done'])} of {cell(filling['tasks'])} tasks are done"
            yield line + (tasks if filling["tasks"] else "")


def _flow(found: Status) -> RenderableType:
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


@command(app, "audit", connects=False)
def audit(
    cli: Invocation,
    config: JobConfig = Path("pipeline.toml"),
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for sinks that lag behind.")
    ] = 0.0,
    master: Master = None,
) -> Answer:
    """Prove that the log is whole and that every sink holds what it adds up to."""
    from penstock.spark.jobs.audit import Audit

    settings = _settings(config, master=master)
    with _spark("audit", settings) as spark:
        document = Audit(spark, settings, wait_s=wait).run()
    return Answer(document, _audit_view, Exit.OK if document["ok"] else Exit.FAILED)


@command(app, "import")
def import_(
    cli: Invocation,
    files: Annotated[list[Path], typer.Argument(help="Files, folders of them, Delta tables.")],
    topic: Annotated[str, typer.Option(help="The delta topic to fill.")],
    format: Annotated[
        Literal["parquet", "delta", "jsonl"] | None, typer.Option(help="If the names do not say.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Of rows that name none.")] = "default",
    id_column: Annotated[str | None, typer.Option(help="vector_id, id or key.")] = None,
    vector_column: Annotated[str | None, typer.Option(help="vector, values or embedding.")] = None,
    namespace_column: Annotated[str | None, typer.Option(help="namespace.")] = None,
    metadata_column: Annotated[str | None, typer.Option(help="metadata.")] = None,
    priority: Annotated[
        Literal["critical", "high", "normal", "low"], typer.Option(help="Class of the deltas.")
    ] = "low",
    again: Annotated[bool, typer.Option(help="Even if these files were imported before.")] = False,
    master: Master = None,
) -> Answer:
    """Vectors from Parquet, Delta or JSON lines into a topic. Run again, it goes on or does
    nothing."""
    from penstock.model.delta import PriorityClass
    from penstock.spark.jobs.imports import ImportOptions, Named, import_files, plan
    from penstock.spark.session import cache_folder

    now_ms = time.time_ns() // 1_000_000
    named = Named(
        vector_id=id_column,
        vector=vector_column,
        namespace=namespace_column,
        metadata=metadata_column,
        namespace_default=namespace,
    )
    options = ImportOptions(
        topic=topic,
        named=named,
        priority=PriorityClass[priority.upper()],
        journal=cache_folder(os.environ) / "imports",
        salt=str(now_ms) if again else "",
    )
    planned = plan(files, format=format)
    with (
        _spark("import", master=master) as spark,
        progress("import", total=planned.rows or len(planned.units), unit="rows") as advance,
    ):
        document = import_files(
            spark, _node(cli), planned, options, now_ms=now_ms, progress=advance
        )
    view = f"{cell(document['rows'])} rows in {topic}, {cell(document['sent'])} sent now"
    return Answer(document, view)


@command(app, "materialise")
def materialise(
    cli: Invocation,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The folder to make, or a place such as s3://….")
    ],
    config: Annotated[Path | None, typer.Option(help="A pipeline's TOML file.")] = None,
    topic: Annotated[
        list[str] | None, typer.Option(help="Topics, if there is no --config.")
    ] = None,
    at: Time = None,
    format: Annotated[Literal["parquet", "delta"], typer.Option(help="What to write.")] = "parquet",
    overwrite: Annotated[bool, typer.Option(help="Replace the folder.")] = False,
    master: Master = None,
) -> Answer:
    """The vectors as they were at a time, folded from the log, as Parquet or a Delta table."""
    from penstock.spark.delivery.attachment import node_of
    from penstock.spark.jobs.materialise import materialise as run

    settings = None if config is None else _settings(config, master=master)
    topics = list(topic or (settings.topics if settings else ()))
    if not topics:
        raise InvalidArgument("give --config or --topic", field="topic")
    node = _node(cli) if settings is None else node_of(settings)
    at_ms = _ms(at, field="at")
    with _spark("materialise", settings, master=master) as spark:
        document = run(
            spark,
            node,
            topics,
            output,
            at_ms=at_ms,
            format=format,
            overwrite=overwrite,
            pipeline=settings,
        )
    return Answer(document, f"{cell(document['vectors'])} vectors in {output}")


@command(app, "compact", connects=False)
def compact(
    cli: Invocation,
    config: JobConfig = Path("pipeline.toml"),
    sink: SinkName = None,
    master: Master = None,
) -> Answer:
    """Keep the newest row of each vector in the lake, in few files."""
    from penstock.spark.jobs.compaction import compact as run

    settings = _settings(config, master=master)
    with _spark("compact", settings) as spark:
        document = run(spark, settings, sink)
    lines = [
        f"{name}: {cell(found['vectors']['rows_before'])} rows of vectors became"
        f" {cell(found['vectors']['rows'])}"
        for name, found in document["lakes"].items()
    ]
    return Answer(document, "\n".join(lines))


@command(app, "reindex", connects=False)
def reindex(
    cli: Invocation,
    sink: Annotated[str, typer.Option(help="The sink to empty and fill.")],
    config: JobConfig = Path("pipeline.toml"),
    source: Annotated[
        Literal["log", "lake"] | None,
        typer.Option(
            "--from",
            help="Where states come from. [default: the log, or a lake where it does not reach]",
        ),
    ] = None,
    force: Force = False,
    master: Master = None,
) -> Answer:
    """Empty an index or a cache and fill it anew. The pipeline must not run meanwhile."""
    from penstock.spark.jobs.filling import reindex as run
    from penstock.spark.jobs.stores import sink_settings

    settings = _settings(config, master=master)
    sink_settings(settings, sink)
    cli.confirm(f"{sink} is emptied and filled anew.", force=force)
    with _spark("reindex", settings) as spark, progress("reindex", unit="states") as advance:
        document = run(spark, settings, sink, origin=source, progress=advance)
    return Answer(document, f"{sink}: {cell(document['states'])} states")


@command(app, "replay")
def replay(
    cli: Invocation,
    config: Annotated[Path | None, typer.Option(help="The pipeline's TOML file.")] = None,
    sink: Annotated[list[str] | None, typer.Option(help="Sinks; without: all of them.")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Log time, ISO 8601.")
    ] = None,
    to: Time = None,
    queue: Annotated[
        str | None, typer.Option(help="A quarantine or DLQ topic to send back instead.")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Where to, if letters do not say.")] = None,
    master: Master = None,
) -> Answer:
    """Part of the log into sinks once more; or set-aside deltas back into their topic."""
    if (config is None) == (queue is None):
        raise InvalidArgument("give --config or --queue, one of them", field="config")
    if queue is not None:
        return _replay_queue(cli, queue, topic)
    from penstock.spark.jobs.filling import ReplayWindow
    from penstock.spark.jobs.filling import replay as run

    assert config is not None
    settings = _settings(config, master=master)
    window = ReplayWindow(from_ms=_ms(from_, field="from"), to_ms=_ms(to, field="to"))
    with _spark("replay", settings) as spark:
        document = run(spark, settings, sink or (), window=window)
    lines = [f"{name}: {rows}" for name, rows in document["sinks"].items()]
    return Answer(document, "\n".join(lines))


def _replay_queue(cli: Invocation, queue: str, topic: str | None) -> Answer:
    from penstock.spark.jobs.letters import replay_letters

    access = _node(cli).access()
    with progress(f"replay {queue}", unit="letters") as advance:
        document = replay_letters(access, queue, topic=topic, progress=advance)
    return Answer(document, f"{cell(document['replayed'])} letters of {queue}")


@command(app, "search", connects=False)
def search(
    cli: Invocation,
    vector: Annotated[
        str | None,
        typer.Argument(help="The numbers as JSON or with commas; `-` reads them from stdin."),
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="Search near the vector with this id instead.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="The index's path. [default: the config's only one]")
    ] = None,
    config: Annotated[Path, typer.Option("--config", "-c", help="The pipeline's TOML file.")] = (
        Path("pipeline.toml")
    ),
    limit: Annotated[int, typer.Option("--limit", "-k", help="How many neighbours.")] = 10,
    namespace: Annotated[str | None, typer.Option(help="Only vectors of this namespace.")] = None,
    metric: Annotated[str, typer.Option(help="cosine, l2 or dot.")] = "cosine",
    where: Where = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare with every vector, trained index or not.")
    ] = False,
) -> Answer:
    """Find the vectors nearest to one."""
    if (vector is None) == (like is None):
        raise InvalidArgument("give a vector, or --like with an id", field="vector")
    from penstock import open_index

    path, storage = index_of(config, index)
    with open_index(path, storage_options=storage) as opened:
        asked = parsed(vector) if vector is not None else _known(opened, like or "", namespace)
        found = opened.search(
            asked,
            limit,
            namespace=namespace,
            metric=metric,  # type: ignore[arg-type]
            where=condition(where),
            exact=exact,
        )
    names = ("namespace", "vector_id", "distance", "revision", "metadata")
    rows = [{name: getattr(one, name) for name in names} for one in found]
    return Answer({"neighbours": rows}, lambda _: listing(rows, NEIGHBOUR))


def index_of(config: Path, path: str | None) -> tuple[str, dict[str, str] | None]:
    """Where an index is, and how its store is reached. One that the config does not have is reached
    as the environment says."""
    if path is not None and not config.is_file():
        return path, None
    found = [sink.options for sink in _settings(config).sinks if sink.kind == "index"]
    if path is not None:
        named = [one for one in found if str(one.get("path")).rstrip("/") == path.rstrip("/")]
        found = named or [{"path": path}]
    if len(found) != 1:
        raise NotFound(f"{config} has {len(found)} index sinks: say which with --index")
    return str(found[0].get("path")), found[0].get("storage_options")


def _known(index: Index, vector_id: str, namespace: str | None) -> Any:
    found = index.get(vector_id, namespace=namespace or "default")
    if found is None:
        raise NotFound(f"the index has no vector {vector_id}", vector_id=vector_id)
    return found.values


def _ms(text: str | None, *, field: str) -> int | None:
    found = time_of(text, field=field)
    return None if found is None else round(found.timestamp() * 1000)


def _settings(config: Path, **overrides: Any) -> PipelineSettings:
    from penstock.spark.settings import PipelineSettings

    return PipelineSettings.load(config, overrides=overrides)


def _node(cli: Invocation) -> Connecting:
    from penstock.spark.source.options import Connecting

    return Connecting(url=cli.url, api_key=cli.api_key, tls=None if cli.ca is None else str(cli.ca))


@contextmanager
def _spark(
    job: str, settings: PipelineSettings | None = None, *, master: str | None = None
) -> Iterator[Any]:
    from penstock.spark.grants import await_executors
    from penstock.spark.session import spark_session
    from penstock.spark.settings import EXECUTORS_S

    name, told, timeout_s = f"penstock-{job}", dict[str, Any](master=master), EXECUTORS_S
    if settings is not None:
        name, timeout_s = f"{name}-{settings.name}", settings.executors_s
        told = {"master": settings.master, "cores": settings.cores, "conf": settings.spark}
    session = spark_session(name, **told)
    try:
        await_executors(session, timeout_s=timeout_s)
        yield session
    finally:
        session.stop()


def _audit_view(document: dict[str, Any]) -> str:
    partitions = document["partitions"]
    messages = sum(partition["messages"] for partition in partitions)
    head = "[green]ok[/green]" if document["ok"] else "[red]not proved[/red]"
    lines = [f"{head}: {len(partitions)} partitions, {cell(messages)} deltas in the log"]
    for partition in partitions:
        if not partition["ok"]:
            place = f"{partition['topic']}/{partition['partition']}"
            lines.append(f"  [red]{place}[/red]: {partition['damage']['reason']}")
    for name, sink in document["sinks"].items():
        lines.append(f"  {name}: {sink['verdict']}{_why(sink)}")
    return "\n".join(lines)


def _why(sink: dict[str, Any]) -> str:
    if "reason" in sink:
        return f" ({sink['reason']})"
    found = [f"{sink['lag']['triggers']} triggers behind"] if "lag" in sink else []
    for part in ("vectors", "history", "messages"):
        for kind, count in sink.get(part, {}).get("differences", {}).items():
            found.append(f"{part}: {count} × {kind}")
        found += [f"e.g. {place}" for place in sink.get(part, {}).get("first_differences", [])[:1]]
    return f" ({'; '.join(found)})" if found else ""
