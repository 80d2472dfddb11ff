"""Damaged copies that are kept beside the new ones, until those count.

The others are asked for all that a damaged replica held. Until the new copy is whole nobody knows
that they have it, so the old one is not deleted: one rename takes it out of the way.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

from penstock.errors import Corruption
from penstock.log.files import storage_errors, sync_folder
from penstock.log.replica import NAME, ReplicaFile, read_replica

SUFFIX: Final = ".rot"


def set_aside(folder: Path) -> Path:
    """Keep a partition's folder under another name, and begin one with a new replica in it.

    What was promised stays promised, if it can be read. A crash in between leaves no folder, and
    whoever opens that is a new replica too.
    """
    with storage_errors(folder):
        promised = _promised(folder)
        kept = next(path for path in _names(folder) if not path.exists())
        folder.rename(kept)
        sync_folder(folder.parent)
        ReplicaFile(folder).promise(promised)
        return kept


def asides(folder: Path) -> list[Path]:
    """What was set aside of a partition's folder."""
    return sorted(folder.parent.glob(f"{folder.name}{SUFFIX}*"))


def remove_asides(folder: Path) -> None:
    for path in asides(folder):
        shutil.rmtree(path)


def _names(folder: Path) -> Iterator[Path]:
    """A copy that is damaged too, before it counts, gets a name of its own."""
    yield folder.with_name(folder.name + SUFFIX)
    for number in count(2):
        yield folder.with_name(f"{folder.name}{SUFFIX}{number}")


def _promised(folder: Path) -> int:
    path = folder / NAME
    if not path.exists():
        return 0
    try:
        return read_replica(path)[0].promised
    except Corruption:
        return 0  # a replica with another uuid has no vote until it is given one
