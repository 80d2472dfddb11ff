"""Files of sinks: where they are, and when they are durable.

The stores behind sinks write files and rename them, but leave it to the kernel when they reach
the disk. A cursor that moves on must not be ahead of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import msgspec

from penstock.errors import Corruption, InvalidArgument

MARK_VERSION: Final = 1
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
    """Small objects beside the data of a sink, in the same folder or object store: how far each
    pipeline has filled it. One that was emptied or restored has lost or older ones."""

    def __init__(self, path: str, *, storage: Mapping[str, str] | None = None) -> None:
        self._path, self._folder = path, local_path(path)
        self._objects: Any = None
        if self._folder is None:
            self._objects = object_store(path, storage or {}, field="path")

    def write(self, pipeline: str, position: tuple[int, ...]) -> None:
        data = msgspec.json.encode({"version": MARK_VERSION, "position": position})
        name = _mark_name(pipeline)
        if self._folder is None:
            self._objects.put(name, data)
            return
        new = self._folder / f".{name}.new"
        new.write_bytes(data)
        sync([new])
        new.replace(self._folder / name)
        sync([self._folder])

    def read(self, pipeline: str) -> tuple[int, ...] | None:
        """The position of the last commit; None if there was none, or it is gone."""
        name = _mark_name(pipeline)
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
        if self._folder is not None:
            for file in self._folder.glob(f"{_MARK}*"):
                file.unlink(missing_ok=True)
            return
        names = [one["path"] for one in self._objects.list_with_delimiter("")["objects"]]
        self._objects.delete([name for name in names if name.rsplit("/")[-1].startswith(_MARK)])


def mark_of(data: bytes, *, where: str) -> tuple[int, ...]:
    try:
        told = msgspec.json.decode(data)
        if told["version"] == MARK_VERSION:
            return tuple(int(number) for number in told["position"])
    except (msgspec.DecodeError, TypeError, KeyError, ValueError) as error:
        raise Corruption(f"{where} is not a pipeline's mark: {error}") from error
    raise Corruption(f"{where} is a mark of version {told['version']}, not {MARK_VERSION}")


def _mark_name(pipeline: str) -> str:
    return f"{_MARK}{pipeline}.json"


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
