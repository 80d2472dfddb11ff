"""The change log: one manifest per trigger, which is what commits the trigger.

    changes/000000000017.json     trigger 17: a part per partition, with its file and sections
    changes/data/*.arrow          the change files that manifests name

Spark's tasks write change files; the driver writes the manifest that names them, in one step that
a crash cannot split. From then on the trigger exists for the sinks, whatever happens to Spark.

- Triggers are numbered 0, 1, 2 … without a gap: Spark's batch ids.
- A manifest never changes. Spark runs a trigger again when it died before it had noted the commit:
  the same ranges give the same fold, the manifest that is there stays, and nothing happens.
- A trigger is deleted when every sink is past it, the oldest first. The newest one always stays,
  data and all: it is what a trigger that is run again is compared with.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from penstock.errors import Corruption, NotFound
from penstock.log.files import storage_errors, sync_folder, write_whole
from penstock.spark.fold.change_file import Part, Section, read_section

VERSION: Final = 1
_NAME: Final = re.compile(r"(\d{12})\.json")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed trigger."""

    version: int = VERSION
    trigger: int
    parts: tuple[Part, ...] = ()  # by topic and partition; an idle partition has none

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Deltas that were read for it."""
        return sum(part.counts.get("read", 0) for part in self.parts)


class ChangeLog:
    """The committed triggers of one pipeline. Any thread may call any method.

    One process writes (the pipeline's lock sees to that); `refresh` lets another one follow.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        with storage_errors(folder):
            self.data.mkdir(parents=True, exist_ok=True)
        self._changed = threading.Condition()
        self._sizes: dict[int, int] = {}  # bytes of each trigger present, in order of triggers
        self.refresh()

    @property
    def first(self) -> int | None:
        """The oldest trigger still there."""
        with self._changed:
            return next(iter(self._sizes), None)

    @property
    def last(self) -> int | None:
        """The newest committed trigger; None before the first."""
        with self._changed:
            return next(reversed(self._sizes), None)

    @property
    def bytes(self) -> int:
        """Size of the change files of all triggers present."""
        with self._changed:
            return sum(self._sizes.values())

    def bytes_after(self, trigger: int) -> int:
        """Size of what a sink whose cursor is at `trigger` still has before it."""
        with self._changed:
            return sum(size for number, size in self._sizes.items() if number > trigger)

    def refresh(self) -> None:
        """Look at the folder again."""
        found = sorted(int(m[1]) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name)))
        if found and found[-1] - found[0] + 1 != len(found):
            missing = next(n for n in range(found[0], found[-1]) if n not in set(found))
            raise Corruption(f"{self.folder}: the manifest of trigger {missing} is missing")
        with self._changed:
            known = self._sizes
            self._sizes = {n: known[n] if n in known else self.manifest(n).bytes for n in found}
            self._changed.notify_all()

    def manifest(self, trigger: int) -> Manifest:
        """One trigger; `NotFound` if it is not yet there or no longer."""
        path = self._path(trigger)
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise NotFound(f"trigger {trigger} is not in the change log", trigger=trigger) from None
        except msgspec.DecodeError as error:
            raise Corruption(f"{path} is not a manifest: {error}") from error
        if manifest.version != VERSION or manifest.trigger != trigger:
            raise Corruption(
                f"{path} is version {manifest.version} of trigger {manifest.trigger},"
                f" expected version {VERSION} of trigger {trigger}"
            )
        return manifest

    def after(self, trigger: int, *, limit: int) -> list[Manifest]:
        """Up to `limit` manifests behind `trigger` (-1: from the beginning), the oldest first.

        `NotFound` if the next one was deleted: whoever asks had not been counted in `prune`.
        """
        with self._changed:
            last = next(reversed(self._sizes), -1)
        wanted = range(trigger + 1, min(last, trigger + limit) + 1)
        return [self.manifest(number) for number in wanted]

    def wait(self, trigger: int, *, timeout_s: float) -> bool:
        """Wait for a trigger newer than `trigger`; False if none came, or on `wake`."""
        with self._changed:
            if next(reversed(self._sizes), -1) <= trigger:
                self._changed.wait(timeout_s)
            return next(reversed(self._sizes), -1) > trigger

    def wake(self) -> None:
        """Let everyone who waits look round, to stop for example."""
        with self._changed:
            self._changed.notify_all()

    def table(self, part: Part, section: Section) -> pa.Table:
        return read_section(self.data, part, section)

    def commit(self, trigger: int, parts: Iterable[Part]) -> bool:
        """Make `trigger` visible; False if it was already, with the same outcome."""
        ordered = tuple(sorted(parts, key=lambda part: (part.topic, part.partition)))
        last = self.last
        if last is not None and trigger <= last:
            self._reject_other_outcome(trigger, ordered)
            return False
        if trigger != (0 if last is None else last + 1):
            raise Corruption(
                f"{self.folder}: trigger {trigger} follows trigger {last}: the change log and"
                " Spark's checkpoint are not of one state folder"
            )
        manifest = Manifest(trigger=trigger, parts=ordered)
        with storage_errors(self.folder):
            write_whole(self._path(trigger), [msgspec.json.encode(manifest)])
        with self._changed:
            self._sizes[trigger] = manifest.bytes
            self._changed.notify_all()
        return True

    def _reject_other_outcome(self, trigger: int, parts: tuple[Part, ...]) -> None:
        first = self.first
        if first is not None and trigger < first:
            return  # every sink is past it; there is nothing left to compare with
        committed = self.manifest(trigger).parts
        same = len(committed) == len(parts) and all(map(Part.same_fold, committed, parts))
        if not same:
            raise Corruption(
                f"trigger {trigger} was run again and came out otherwise than its manifest says"
            )

    def prune(self, through: int) -> int:
        """Delete the triggers up to `through`, which every sink holds; how many went.

        The newest trigger stays. A sink that lags keeps all that is behind its cursor.
        """
        with self._changed:
            last = next(reversed(self._sizes), -1)
            gone = [number for number in self._sizes if number <= through and number != last]
        for number in gone:
            files = [part.file for part in self.manifest(number).parts if part.file]
            with storage_errors(self.folder):
                self._path(number).unlink()  # first: a manifest never names a file that is gone
                for name in files:
                    (self.data / name).unlink(missing_ok=True)
            with self._changed:
                del self._sizes[number]
        return len(gone)

    def sweep(self) -> int:
        """Delete files that no manifest names, left by tasks that died; how many went.

        Only while no trigger runs: a file that is about to be named looks just the same.
        """
        with self._changed:
            present = list(self._sizes)
        named = {part.file for number in present for part in self.manifest(number).parts}
        strays = [path for path in self.data.iterdir() if path.name not in named]
        with storage_errors(self.data):
            for path in strays:
                path.unlink()
            if strays:
                sync_folder(self.data)
        return len(strays)

    def _path(self, trigger: int) -> Path:
        return self.folder / f"{trigger:012d}.json"
