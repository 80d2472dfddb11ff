"""The acknowledged floor: what a log must still hold when it is opened again.

Two slots in two disk sectors are written in turn, so a torn write spoils the older promise at
most. The floor only ever rises; a floor that is behind the log is normal, a log that is behind
its floor has rot.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Final

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import Handle, sync_folder
from penstock.log.layout import FLOOR_SIZE, FloorSlot

SLOT_STRIDE: Final = 512
FILE_BYTES: Final = 2 * SLOT_STRIDE


class Floor:
    """The floor file of one partition; `raise_to` may be called from any thread."""

    def __init__(self, path: Path, *, accept_rot: bool = False) -> None:
        self.path = path
        self._lock = Lock()
        self.slot = _load(path, accept_rot=accept_rot)
        self._handle = Handle(path, os.O_RDWR | os.O_CREAT)
        if self.slot.generation == 0:
            os.ftruncate(self._handle.fd, FILE_BYTES)
            self.write(self.slot)
            sync_folder(path.parent)

    def raise_to(self, *, sequence: int = 0, first: int = 0, tail: int = 0) -> None:
        """Persist the greater of the old and the given values, if that changes anything."""
        with self._lock:
            old = self.slot
            new = FloorSlot(
                old.generation,
                max(old.sequence, sequence),
                max(old.first, first),
                max(old.tail, tail),
            )
            if new != old:
                self.write(new)

    def write(self, slot: FloorSlot) -> None:
        """Persist exactly this; only a repair may lower a value."""
        slot = slot._replace(generation=self.slot.generation + 1)
        crash_point("log.floor.before")
        self._handle.write([slot.encode()], slot.generation % 2 * SLOT_STRIDE)
        crash_point("log.floor.written")
        os.fdatasync(self._handle.fd)
        self.slot = slot


def read_slots(data: bytes) -> list[FloorSlot]:
    """The valid slots in a floor file's bytes, best first."""
    found = []
    for at in (0, SLOT_STRIDE):
        try:
            found.append(FloorSlot.decode(data[at : at + FLOOR_SIZE]))
        except Corruption:
            continue  # never written, or torn: the other slot holds
    return sorted(found, reverse=True)


def _load(path: Path, *, accept_rot: bool) -> FloorSlot:
    slots = read_slots(path.read_bytes()) if path.exists() else []
    if slots:
        return slots[0]
    if any(path.parent.glob("*.seg")) and not accept_rot:
        raise Corruption(f"{path} has no valid slot", file=str(path), reason="no valid floor")
    return FloorSlot(0, 0, 0, 0)
