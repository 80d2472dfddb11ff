"""`penstock fsck`: prove, without a node, that a data folder holds what was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.exits import Exit
from penstock.cli.output import cell, progress, size
from penstock.errors import NotFound

if TYPE_CHECKING:
    from penstock.log.verify import Report

app = group("Verification.")


@command(app, "fsck", connects=False)
def fsck(
    cli: Invocation, folder: Annotated[Path, typer.Argument(help="The data folder.")]
) -> Answer:
    """Verify a folder at rest: gapless, CRC, hash chain. Exit code 1 on damage."""
    if not folder.is_dir():
        raise NotFound(f"no data folder at {folder}", folder=str(folder))
    report = verify(folder)
    document = report.to_dict()
    code = Exit.OK if report.ok else Exit.FAILED
    return Answer(document=document, view=lambda: view_of(document), code=code)


def verify(folder: Path) -> Report:
    from penstock.log.verify import verify_folder

    with progress(f"fsck {folder}", total=1, unit="bytes") as advance:
        return verify_folder(folder, progress=advance)


def view_of(document: dict[str, Any]) -> str:
    seen = (
        f"{cell(document['partitions'])} partitions, {cell(document['messages'])} messages,"
        f" {cell(document['batches'])} batches, {size(document['bytes'])}"
    )
    notes = "".join(f"\n  note: {note}" for note in document["notes"])
    bad = document["first_bad"]
    if bad is None:
        return f"[green]ok[/green]: {seen}{notes}"
    where = ", ".join(f"{name} {value}" for name, value in bad.items() if name != "reason")
    return f"[red]damaged[/red]: {bad['reason']}\n  {where}\n  {seen}{notes}"
