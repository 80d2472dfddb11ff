"""Files of sinks: where they are, and when they are durable.

The stores behind sinks write files and rename them, but leave it to the kernel when they reach
the disk. A cursor that moves on must not be ahead of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import msgspec

from penstock.errors import Corruption, InvalidArgument
from penstock.sinks.protocol import SinkMark

MARK_VERSION: Final = 2
_MARK: Final = "penstock-mark-"
_CLIENT: Final = frozenset({"allow_http", "timeout", "connect_timeout", "proxy_url"})


def local_path(uri: str) -> Path | None:
    """The folder that a table's address names, or None when it is not on this machine."""
    parsed = urlparse(uri)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return None if "://" in uri else Path(uri)


def object_store(url: str, options: Mapping[str, str], *, field: str) -> Any:
    """A place in an object store, by the same options for whatever is kept there."""
    from obstore.store import from_url

    lowered = {name.lower(): value for name, value in options.items()}
    client: dict[str, Any] = {
        name: value.lower() == "true" if name == "allow_http" else value
        for name in _CLIENT
        if (value := lowered.pop(name, lowered.pop(f"aws_{name}", None))) is not None
    }
    try:
        return from_url(url, config=lowered, client_options=client)  # type: ignore[call-overload]
    except Exception as error:  # obstore has a class for each thing that may be wrong
        raise InvalidArgument(f"{url} cannot be used as a store: {error}", field=field) from error


class Marks:
    """Small objects beside the data of a sink, in the same folder or object store: the mark that
    each driver of each pipeline has left (`SinkMark`).

    A folder that is exchanged in the very moment between the driver's look at its mark and the
    renaming of the next one is not noticed: files cannot be compared and written in one step."""

    def __init__(self, path: str, *, storage: Mapping[str, str] | None = None) -> None:
        self._path, self._folder = path, local_path(path)
        self._objects: Any = None
        self._swept = False  # of the marks of earlier drivers
        if self._folder is None:
            self._objects = object_store(path, storage or {}, field="path")

    def write(self, pipeline: str, mark: SinkMark) -> None:
        name, data = f"{_MARK}{pipeline}-{mark.claim:08d}.json", encoded_mark(mark)
        if self._folder is None:
            self._objects.put(name, data)
        else:
            new = self._folder / f".{name}.new"
            new.write_bytes(data)
            sync([new])
            new.replace(self._folder / name)
            sync([self._folder])
        if not self._swept:
            claims = self._claims(pipeline)
            self._remove([held for claim, held in claims.items() if claim < mark.claim])
            self._swept = True

    def read(self, pipeline: str) -> SinkMark | None:
        """The mark of the greatest claim; None if there is none, or it is gone."""
        claims = self._claims(pipeline)
        if not claims:
            return None
        name = claims[max(claims)]
        try:
            if self._folder is None:
                data = bytes(self._objects.get(name).bytes())
            else:
                data = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        return mark_of(data, where=f"{self._path}/{name}")

    def clear(self) -> None:
        """Forget all pipelines: the sink is empty."""
        self._remove(self._names())

    def _claims(self, pipeline: str) -> dict[int, str]:
        """The names of a pipeline's marks by the claims of its drivers."""
        own = re.compile(rf"{re.escape(f'{_MARK}{pipeline}')}-(\d+)\.json")
        found = ((own.fullmatch(name), name) for name in self._names())
        return {int(match[1]): name for match, name in found if match}

    def _names(self) -> list[str]:
        if self._folder is None:
            listed = self._objects.list_with_delimiter("")["objects"]
            names = [one["path"].rsplit("/")[-1] for one in listed]
        else:
            try:
                names = [file.name for file in self._folder.iterdir()]
            except FileNotFoundError:  # the whole sink was removed
                return []
        return [name for name in names if name.startswith(_MARK)]

    def _remove(self, names: list[str]) -> None:
        if self._folder is not None:
            for name in names:
                (self._folder / name).unlink(missing_ok=True)
        elif names:
            self._objects.delete(names)


def encoded_mark(mark: SinkMark) -> bytes:
    """The same mark always gives the same bytes."""
    return msgspec.json.encode({"version": MARK_VERSION} | msgspec.structs.asdict(mark))


def mark_of(data: bytes, *, where: str) -> SinkMark:
    try:
        version = msgspec.json.decode(data)["version"]
        if version == MARK_VERSION:
            return msgspec.json.decode(data, type=SinkMark)
    except (msgspec.DecodeError, TypeError, KeyError) as error:
        raise Corruption(f"{where} is not a pipeline's mark: {error}") from error
    raise Corruption(f"{where} is a mark of version {version}, not {MARK_VERSION}")


def sync(paths: Iterable[Path]) -> None:
    """Make files and folders durable; a file that is gone again needs none."""
    for path in paths:
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class NewFiles:
    """The files below a folder that appeared since the last look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = self._walk()

    def sync(self) -> None:
        seen = self._walk()
        fresh: list[Path] = []
        changed: set[Path] = set()
        for folder, names in seen.items():
            before = self._seen.get(folder)
            if before is None:
                changed.add(Path(folder).parent)
            new = names - (before or set())
            if new:
                changed.add(Path(folder))
                fresh += [Path(folder, name) for name in sorted(new)]
        sync([*fresh, *sorted(changed)])
        self._seen = seen

    def _walk(self) -> dict[str, set[str]]:
        """The names of files by folder; texts, because there may be thousands."""
        return {folder: set(names) for folder, _, names in os.walk(self.folder)}
