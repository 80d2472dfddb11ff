"""`penstock doctor`: is this machine, and this folder, fit to run a node?

`penstock fsck` proves, without a node, that a data folder holds what was written; the doctor does
that too.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Exit, Invocation, command, group
from penstock.console import cell, progress, size
from penstock.errors import NotFound, PenstockError

if TYPE_CHECKING:
    from penstock.log.verify import Report

app = group()

DISK_BYTES_WARN: Final = 2 << 30
DISK_BYTES_MIN: Final = 256 << 20
FSYNC_MS_WARN: Final = 20.0
CLOCK_START_MIN: Final = 1_735_689_600  # 2025: an older wall clock was never set
PORTS: Final = {"native": 7440, "grpc": 7441, "http": 7442}
NEEDED: Final = ("numpy", "msgspec", "crc32c", "xxhash", "zstandard", "lz4", "uvloop")
OPTIONAL: Final = {"grpcio": "gRPC gateway", "uvicorn": "HTTP gateway"}


@command(app, "fsck", connects=False)
def fsck(
    cli: Invocation, folder: Annotated[Path, typer.Argument(help="The data folder.")]
) -> Answer:
    """Verify a folder at rest: gapless, CRC, hash chain. Exit code 1 on damage."""
    if not folder.is_dir():
        raise NotFound(f"no data folder at {folder}", folder=str(folder))
    report = verify(folder)
    return Answer(report.to_dict(), report_view, Exit.OK if report.ok else Exit.FAILED)


def verify(folder: Path) -> Report:
    from penstock.log.verify import verify_folder

    with progress(f"fsck {folder}", total=1, unit="bytes") as advance:
        return verify_folder(folder, progress=advance)


def report_view(document: dict[str, Any]) -> str:
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


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warn or fail
    detail: str


@command(app, "doctor", connects=False)
def doctor(
    cli: Invocation,
    data: Annotated[Path, typer.Option(help="The data folder.")] = Path("penstock-data"),
) -> Answer:
    """Check this machine and the data folder: python, packages, disk, fsync, ports and clock."""
    checks = list(examine(data))
    healthy = all(check.status != "fail" for check in checks)
    document = {"ok": healthy, "checks": [asdict(check) for check in checks]}
    return Answer(document, lambda _: view_of(checks), Exit.OK if healthy else Exit.FAILED)


def examine(data: Path) -> Iterator[Check]:
    yield Check("python", "ok", sys.version.split()[0])
    yield from check_packages()
    # Where the data folder is, or would be made.
    probe = next(p for p in (data.absolute(), *data.absolute().parents) if p.is_dir())
    yield check_space(probe)
    yield check_fsync(probe)
    yield check_clock()
    yield from (check_port(name, port) for name, port in PORTS.items())
    yield check_folder(data)


def check_packages() -> Iterator[Check]:
    missing = [name for name in NEEDED if _version(name) is None]
    detail = f"missing: {', '.join(missing)}" if missing else f"{len(NEEDED)} native packages"
    yield Check("packages", "fail" if missing else "ok", detail)
    absent = {purpose for name, purpose in OPTIONAL.items() if _version(name) is None}
    yield Check(
        "extras", "warn" if absent else "ok",
        f"not installed: {', '.join(sorted(absent))}" if absent else "gateway is installed",
    )  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    status = "fail" if free < DISK_BYTES_MIN else "warn" if free < DISK_BYTES_WARN else "ok"
    return Check("disk space", status, f"{size(free)} free at {folder}")


def check_fsync(folder: Path) -> Check:
    """How long an acknowledgement waits for the disk at least."""
    from penstock.log.files import measure_sync

    try:
        took = measure_sync(folder)
    except OSError as error:
        return Check("fsync", "fail", f"cannot write in {folder}: {error.strerror}")
    slow = took.median_ms > FSYNC_MS_WARN
    return Check("fsync", "warn" if slow else "ok", str(took))


def check_clock() -> Check:
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(0.05)
    drift_ms = abs((time.time() - wall) - (time.monotonic() - monotonic)) * 1000
    if wall < CLOCK_START_MIN:
        return Check("clock", "fail", "the wall clock was never set")
    return Check("clock", "warn" if drift_ms > 5 else "ok", f"drift {drift_ms:.2f} ms in 50 ms")


def check_port(name: str, port: int) -> Check:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    return Check(
        f"{name} port", "warn" if taken else "ok", f"{port} {'in use' if taken else 'free'}"
    )


def check_folder(data: Path) -> Check:
    """A folder at rest is verified as `fsck` does; one that a node holds is left alone."""
    if not data.is_dir():
        return Check("data folder", "ok", f"{data} is not there yet; serve creates it")
    try:
        report = verify(data)
    except PenstockError as error:
        return Check("data folder", "warn" if error.retryable else "fail", error.message)
    if report.ok:
        return Check("data folder", "ok", f"{report.messages} messages verified")
    return Check("data folder", "fail", f"damaged: {report.first_bad}")


def view_of(checks: list[Check]) -> Any:
    from rich.table import Table

    marks = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}
    made = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        made.add_row(marks[check.status], check.name, check.detail)
    return made
