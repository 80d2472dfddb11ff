"""How files with vectors are cut into units of work, always the same way for the same files.

A unit is a part of a file that one task reads in one go: row groups of a Parquet file, a file of a
Delta table at one version, a stretch of a file with JSON lines (the lines that *begin* in it).
Units are numbered over all files; a row is known by its unit and its place in it, which is what
makes an import that is run again a repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import xxhash

from penstock.errors import InvalidArgument, NotFound

Format = Literal["parquet", "delta", "jsonl"]
FORMATS: Final[tuple[str, ...]] = get_args(Format)
UNIT_ROWS: Final = 100_000  # of a Parquet unit, unless a row group is larger
UNIT_BYTES: Final = 32 << 20  # of a JSON unit
UNITS_MAX: Final = 1 << 16
_SUFFIXES: Final[dict[str, Format]] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Part of a file. `first` to `last`: row groups, bytes, or the number of the table's file."""

    number: int
    format: Format
    path: str
    first: int
    last: int
    rows: int | None = None  # if the file says so
    bytes: int = 0
    version: int | None = None  # of a Delta table


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    units: tuple[Unit, ...]
    fingerprint: str  # of the files: their names, sizes and times

    @property
    def rows(self) -> int | None:
        """All rows, if every file tells."""
        known = [unit.rows for unit in self.units if unit.rows is not None]
        return sum(known) if len(known) == len(self.units) else None

    @property
    def bytes(self) -> int:
        return sum(unit.bytes for unit in self.units)


def plan(paths: Sequence[Path], *, format: Format | None = None) -> ImportPlan:
    """Cut files, folders of files and Delta tables into units."""
    content = xxhash.xxh3_128()
    units: list[Unit] = []
    for path, kind in _files(paths, format):
        found = _UNITS[kind](path, len(units))
        units += found
        stat = path.stat()
        version = found[0].version if found else None
        seen = f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{version}\0"
        content.update(seen.encode())
    if not units:
        raise InvalidArgument("there is nothing to import", field="files")
    if len(units) > UNITS_MAX:
        raise InvalidArgument(
            f"the files make {len(units)} units, at most {UNITS_MAX}: import them in parts",
            field="files",
            limit=UNITS_MAX,
        )
    return ImportPlan(units=tuple(units), fingerprint=content.hexdigest())


def _files(paths: Sequence[Path], format: Format | None) -> Iterator[tuple[Path, Format]]:
    for path in paths:
        if not path.exists():
            raise NotFound(f"no file {path}", file=str(path))
        if path.is_file():
            yield path, format or _format_of(path)
        elif format == "delta" or (format is None and (path / "_delta_log").is_dir()):
            yield path, "delta"
        else:
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in _SUFFIXES)
            yield from ((file, format or _format_of(file)) for file in inside)


def _format_of(path: Path) -> Format:
    found = _SUFFIXES.get(path.suffix)
    if found is None:
        raise InvalidArgument(
            f"{path}: the name does not say what it is; give --format {'|'.join(FORMATS)}",
            field="format",
        )
    return found


def _parquet(path: Path, number: int) -> list[Unit]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
    except pa.ArrowException as error:
        raise InvalidArgument(f"{path} is not a Parquet file: {error}", field="files") from error
    units: list[Unit] = []
    first = rows = size = 0
    for group in range(metadata.num_row_groups):
        here = metadata.row_group(group)
        rows, size = rows + here.num_rows, size + here.total_byte_size
        if rows >= UNIT_ROWS or group == metadata.num_row_groups - 1:
            units.append(
                Unit(number=number + len(units), format="parquet", path=str(path.absolute()),
                     first=first, last=group, rows=rows, bytes=size)
            )  # fmt: skip
            first, rows, size = group + 1, 0, 0
    return units


def _delta(path: Path, number: int) -> list[Unit]:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        table = DeltaTable(str(path))
        fragments = list(table.to_pyarrow_dataset().get_fragments())
    except DeltaError as error:
        raise InvalidArgument(
            f"{path} cannot be read as a Delta table: {error}", field="files"
        ) from error
    return [
        Unit(number=number + at, format="delta", path=str(path.absolute()), first=at, last=at,
             rows=fragment.count_rows(), version=table.version())
        for at, fragment in enumerate(fragments)
    ]  # fmt: skip


def _jsonl(path: Path, number: int) -> list[Unit]:
    size = path.stat().st_size
    starts = range(0, size, UNIT_BYTES)
    return [
        Unit(number=number + at, format="jsonl", path=str(path.absolute()), first=start,
             last=min(size, start + UNIT_BYTES) - 1, bytes=min(size, start + UNIT_BYTES) - start)
        for at, start in enumerate(starts)
    ]  # fmt: skip


_UNITS: Final = {"parquet": _parquet, "delta": _delta, "jsonl": _jsonl}
