"""How files with vectors are cut into units of work, always the same way for the same files.

A unit is a part of a file that one task reads in one go: row groups of a Parquet file, a file of a
Delta table at one version, a stretch of a file with JSON lines (the lines that *begin* in it).
Units are numbered over all files; a row is known by its unit and its place in it, which is what
makes an import that is run again a repetition.

A unit's rows are read as columns: ids, vectors, namespaces and metadata. Every row is checked
before one of its unit is sent: a unit goes as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

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
    try:
        metadata = pq.read_metadata(path)
    except pa.ArrowException as error:
        raise InvalidArgument(f"{path} is not a Parquet file: {error}", field="files") from error
    units: list[Unit] = []
    first = rows = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        if rows >= UNIT_ROWS or group == metadata.num_row_groups - 1:
            units.append(
                Unit(number=number + len(units), format="parquet", path=str(path.absolute()),
                     first=first, last=group, rows=rows)
            )  # fmt: skip
            first, rows = group + 1, 0
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
             last=min(size, start + UNIT_BYTES) - 1)
        for at, start in enumerate(starts)
    ]  # fmt: skip


_UNITS: Final = {"parquet": _parquet, "delta": _delta, "jsonl": _jsonl}


IDS: Final = ("vector_id", "id", "key")
VECTORS: Final = ("vector", "values", "embedding")


@dataclass(frozen=True, kw_only=True)
class Named:
    """Which columns of the files mean what; None: the usual names."""

    vector_id: str | None = None
    vector: str | None = None
    namespace: str | None = None
    metadata: str | None = None
    namespace_default: str = "default"


@dataclass(frozen=True)
class ImportedRows:
    """A unit's rows."""

    vector_ids: list[str]
    values: NDArray[np.float32]  # (rows, dimensions)
    namespaces: list[str]
    metadata: list[bytes]  # msgpack maps, empty: none

    def __len__(self) -> int:
        return len(self.vector_ids)


def read_rows(unit: Unit, named: Named, *, dimensions: int) -> ImportedRows:
    """All rows of a unit; `InvalidArgument` names the file, the row and the column."""
    columns = _json_columns(unit) if unit.format == "jsonl" else _arrow_columns(unit)
    ids_name = _column(columns, named.vector_id, IDS, unit)
    vector_name = _column(columns, named.vector, VECTORS, unit)
    ids = [_text(value, unit, row, ids_name) for row, value in enumerate(columns[ids_name])]
    values = _matrix(columns[vector_name], unit, name=vector_name, dimensions=dimensions)
    for name in filter(None, (named.namespace, named.metadata)):
        _column(columns, name, (), unit)
    absent, default = [None] * len(ids), named.namespace_default
    spaces = columns.get(named.namespace or "namespace", absent)
    described = columns.get(named.metadata or "metadata", absent)
    return ImportedRows(
        ids,
        values,
        [str(space) if space else default for space in spaces],
        [_metadata(value, unit, row) for row, value in enumerate(described)],
    )


def _arrow_columns(unit: Unit) -> dict[str, Any]:
    if unit.format == "parquet":
        groups = list(range(unit.first, unit.last + 1))
        table = pq.ParquetFile(unit.path).read_row_groups(groups)
    else:
        from deltalake import DeltaTable

        dataset = DeltaTable(unit.path, version=unit.version).to_pyarrow_dataset()
        fragment = list(dataset.get_fragments())[unit.first]
        table = fragment.to_table(schema=dataset.schema)
    return {name: _plain(table[name]) for name in table.column_names}


def _plain(column: Any) -> Any:
    """Vectors stay in Arrow; everything else is read value by value."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return column.combine_chunks()
    return column.to_pylist()


def _json_columns(unit: Unit) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for line in _lines(unit):
        try:
            rows.append(decode(line))
        except msgspec.DecodeError as error:
            raise _refused(f"not a JSON object: {error}", unit, len(rows), "line") from error
    names = {name for row in rows for name in row}
    return {name: [row.get(name) for row in rows] for name in sorted(names)}


def _lines(unit: Unit) -> Iterator[bytes]:
    """The lines that begin within the unit; empty ones are left out."""
    with Path(unit.path).open("rb") as file:
        file.seek(max(0, unit.first - 1))
        if unit.first:
            file.readline()  # the rest of a line that began before
        while file.tell() <= unit.last and (line := file.readline()):
            if line.strip():
                yield line


def _column(columns: dict[str, Any], given: str | None, usual: Sequence[str], unit: Unit) -> str:
    for name in (given,) if given else usual:
        if name in columns:
            return name
    wanted = given or " or ".join(usual)
    raise InvalidArgument(
        f"{unit.path} has no column {wanted}, only {', '.join(columns)}", field="columns"
    )


def _matrix(column: Any, unit: Unit, *, name: str, dimensions: int) -> NDArray[np.float32]:
    """One row per vector, all of them finite."""
    if isinstance(column, list):
        lengths = np.array([len(v) if isinstance(v, list) else -1 for v in column], np.int64)
    else:
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy().astype(np.int64)
    wrong = np.flatnonzero(lengths != dimensions)
    if len(wrong):
        row = int(wrong[0])
        told = f"{name} has {lengths[row]} components, the topic {dimensions}"
        raise _refused(told if lengths[row] >= 0 else f"{name} is no list", unit, row, name)
    flat = [x for v in column for x in v] if isinstance(column, list) else column.flatten()
    try:
        values = np.asarray(flat, np.float32).reshape(-1, dimensions)
    except (TypeError, ValueError) as error:
        raise _refused(f"{name} holds something that is no number", unit, None, name) from error
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise _refused(f"{name} holds a value that is not finite", unit, int(bad[0]), name)
    return values


def _text(value: Any, unit: Unit, row: int, name: str) -> str:
    if value is None or isinstance(value, bytes | float | dict | list) or value == "":
        raise _refused(f"{name} must be a text or an integer", unit, row, name)
    return str(value)


def _metadata(value: Any, unit: Unit, row: int) -> bytes:
    """Maps and structs, JSON text, or msgpack as it is."""
    if value is None:
        return b""
    try:
        if isinstance(value, bytes):
            msgspec.msgpack.decode(value, type=dict[str, Any])
            return value
        if isinstance(value, str):
            value = msgspec.json.decode(value, type=dict[str, Any])
        pairs = dict(value)
        return msgspec.msgpack.encode(pairs) if pairs else b""
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise _refused(f"metadata is not a map: {error}", unit, row, "metadata") from error


def _refused(what: str, unit: Unit, row: int | None, field: str) -> InvalidArgument:
    where = "" if row is None else f", row {row} of unit {unit.number}"
    return InvalidArgument(f"{unit.path}{where}: {what}", field=field, file=unit.path)
