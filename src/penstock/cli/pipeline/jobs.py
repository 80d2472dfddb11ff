"""`penstock pipeline import | replay | materialise | compact | reindex | audit | search`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer

from penstock.cli.command import Answer, Exit, Force, Invocation, command, group, time_of
from penstock.console import Columns, cell, listing, progress
from penstock.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from penstock.sinks.index import Index
    from penstock.spark.settings import PipelineSettings
    from penstock.spark.source.options import Connecting

app = group()

Config = Annotated[Path, typer.Option("--config", help="The pipeline's TOML file.")]
Master = Annotated[str | None, typer.Option(help="Of a Spark cluster; without: this machine.")]
SinkName = Annotated[str | None, typer.Option("--sink", help="One of the pipeline's sinks.")]
Time = Annotated[str | None, typer.Option(metavar="TIME", help="ISO 8601, UTC unless it says.")]


NEIGHBOUR: Final[Columns] = {
    "namespace": "namespace", "vector": "vector_id",
    ">distance": lambda one: f"{one['distance']:.6g}", ">revision": "revision",
    "metadata": "metadata",
}  # fmt: skip


@command(app, "audit", connects=False)
def audit(
    cli: Invocation,
    config: Config = Path("pipeline.toml"),
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for sinks that lag behind.")
    ] = 0.0,
    master: Master = None,
) -> Answer:
    """Prove that the log is whole and that every sink holds what it adds up to."""
    from penstock.spark.jobs.audit import Audit

    settings = _settings(config, master)
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
    import os
    import time

    from penstock.model.delta import PriorityClass
    from penstock.spark.java import cache_folder
    from penstock.spark.jobs.import_units import Named, plan
    from penstock.spark.jobs.imports import ImportOptions, import_files

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
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make.")],
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
    from penstock.spark.attachment import node_of
    from penstock.spark.jobs.materialisation import materialise as run
    from penstock.spark.jobs.stores import propagation_of

    settings = None if config is None else _settings(config, master)
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
            options=None if settings is None else propagation_of(settings),
            overwrite=overwrite,
        )
    return Answer(document, f"{cell(document['vectors'])} vectors in {output}")


@command(app, "compact", connects=False)
def compact(
    cli: Invocation, config: Config = Path("pipeline.toml"), sink: SinkName = None
) -> Answer:
    """Keep the newest row of each vector in the lake, in few files."""
    from penstock.spark.jobs.stores import compact as run

    document = run(_settings(config), sink)
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
    config: Config = Path("pipeline.toml"),
    source: Annotated[
        Literal["log", "lake"], typer.Option("--from", help="Where states come from.")
    ] = "log",
    force: Force = False,
    master: Master = None,
) -> Answer:
    """Empty an index or a cache and fill it anew. The pipeline must not run meanwhile."""
    from penstock.spark.jobs.refill import reindex as run
    from penstock.spark.jobs.stores import sink_settings

    settings = _settings(config, master)
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
    from penstock.spark.jobs.refill import ReplayWindow
    from penstock.spark.jobs.refill import replay as run

    assert config is not None
    settings = _settings(config, master)
    window = ReplayWindow(
        from_ms=_ms(from_, field="from"),
        to_ms=_ms(to, field="to"),
    )
    with _spark("replay", settings) as spark:
        document = run(spark, settings, sink or (), window=window)
    lines = [f"{name}: {rows}" for name, rows in document["sinks"].items()]
    return Answer(document, "\n".join(lines))


def _replay_queue(cli: Invocation, queue: str, topic: str | None) -> Answer:
    import asyncio

    from penstock.client.network.endpoints import Remote
    from penstock.spark.jobs.letters import replay_letters

    node = _node(cli)
    remote = Remote(cli.url, api_key=cli.api_key, tls=cli.ca, client="penstock-replay")
    with progress(f"replay {queue}", unit="letters") as advance:
        document = asyncio.run(
            replay_letters(node.access(), remote, queue, topic=topic, progress=advance)
        )
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
        str | None, typer.Option(help="The index's path. [default: as the config says]")
    ] = None,
    config: Annotated[Path, typer.Option("--config", "-c", help="The pipeline's TOML file.")] = (
        Path("pipeline.toml")
    ),
    limit: Annotated[int, typer.Option("--limit", "-k", help="How many neighbours.")] = 10,
    namespace: Annotated[str | None, typer.Option(help="Only vectors of this namespace.")] = None,
    metric: Annotated[str, typer.Option(help="cosine, l2 or dot.")] = "cosine",
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare with every vector, trained index or not.")
    ] = False,
) -> Answer:
    """Find the vectors nearest to one."""
    if (vector is None) == (like is None):
        raise InvalidArgument("give a vector, or --like with an id", field="vector")
    from penstock import open_index

    with open_index(index or index_path(config)) as opened:
        asked = parsed(vector) if vector is not None else _known(opened, like or "", namespace)
        found = opened.search(
            asked,
            limit,
            namespace=namespace,
            metric=metric,  # type: ignore[arg-type]
            exact=exact,
        )
    names = ("namespace", "vector_id", "distance", "revision", "metadata")
    rows = [{name: getattr(one, name) for name in names} for one in found]
    return Answer({"neighbours": rows}, lambda _: listing(rows, NEIGHBOUR))


def index_path(config: Path) -> str:
    """Where the only index sink of a pipeline writes to."""
    sinks = _settings(config).sinks
    paths = [str(sink.options.get("path")) for sink in sinks if sink.kind == "index"]
    if len(paths) != 1:
        raise NotFound(f"{config} has {len(paths)} index sinks: say which with --index")
    return paths[0]


def parsed(text: str) -> list[float]:
    """Numbers as a JSON list, or with commas or spaces between them."""
    if text == "-":
        text = sys.stdin.read()
    text = text.strip()
    try:
        if text.startswith("["):
            return msgspec.json.decode(text, type=list[float])
        return [float(number) for number in text.replace(",", " ").split()]
    except (ValueError, msgspec.DecodeError) as error:
        raise InvalidArgument(f"not a vector: {error}", field="vector") from error


def _known(index: Index, vector_id: str, namespace: str | None) -> Any:
    found = index.get(vector_id, namespace=namespace or "default")
    if found is None:
        raise NotFound(f"the index has no vector {vector_id}", vector_id=vector_id)
    return found.values


def _ms(text: str | None, *, field: str) -> int | None:
    found = time_of(text, field=field)
    return None if found is None else round(found.timestamp() * 1000)


def _settings(config: Path, master: str | None = None) -> PipelineSettings:
    from penstock.spark.settings import PipelineSettings

    return PipelineSettings.load(config, overrides={"master": master})


def _node(cli: Invocation) -> Connecting:
    from penstock.spark.source.options import Connecting

    return Connecting(url=cli.url, api_key=cli.api_key, tls=None if cli.ca is None else str(cli.ca))


@contextmanager
def _spark(
    job: str, settings: PipelineSettings | None = None, *, master: str | None = None
) -> Iterator[Any]:
    from penstock.spark.session import spark_session

    if settings is None:
        session = spark_session(f"penstock-{job}", master=master)
    else:
        session = spark_session(
            f"penstock-{job}-{settings.name}",
            master=master or settings.master,
            cores=settings.cores,
            conf=settings.spark,
        )
    try:
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
