"""`penstock pipeline search`: ask a pipeline's index for the nearest vectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.output import Columns, listing
from penstock.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from penstock.sinks.index import Index

app = group()
NEIGHBOUR: Final[Columns] = {
    "namespace": "namespace", "vector": "vector_id",
    ">distance": lambda one: f"{one['distance']:.6g}", ">revision": "revision",
    "metadata": "metadata",
}  # fmt: skip


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
    from penstock.spark.settings import PipelineSettings

    paths = [
        str(sink.options.get("path"))
        for sink in PipelineSettings.load(config).sinks
        if sink.kind == "index"
    ]
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
