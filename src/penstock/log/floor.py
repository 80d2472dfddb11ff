"""The acknowledged floor: what a log must still hold when it is opened again.

Two slots in two disk sectors are written in turn, so a torn write spoils the older promise at
most. A floor that is behind the log is normal, a log that is behind its floor has rot; so it only
ever rises, unless the log is cut, reset or repaired on purpose. Such a purpose is written here
first (`penstock.log.cutting`).
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
            self._write(self.slot)
            sync_folder(path.parent)

    def raise_to(self, *, sequence: int = 0, first: int = 0, tail: int = 0) -> None:
        """Persist the greater of the old and the given values, if that changes anything."""
        with self._lock:
            old = self.slot
            new = old._replace(
                sequence=max(old.sequence, sequence),
                first=max(old.first, first),
                tail=max(old.tail, tail),
            )
            if new.first != old.first:
                new = new._replace(chain=0, epoch=0)  # they belong to the old `first`
            if new != old:
                self._write(new)

    def change(self, slot: FloorSlot) -> None:
        """Persist exactly this; only a repair, a cut or a reset may lower a value."""
        with self._lock:
            self._write(slot)

    def settle(self, slot: FloorSlot) -> None:
        """As `change`, in both slots: nothing older can come back."""
        with self._lock:
            self._write(slot)
            self._write(slot)

    def _write(self, slot: FloorSlot) -> None:
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


def used_slots(data: bytes) -> int:
    """How many slots were ever written to, whole or not."""
    return sum(any(data[at : at + FLOOR_SIZE]) for at in (0, SLOT_STRIDE))


def _load(path: Path, *, accept_rot: bool) -> FloorSlot:
    slots = read_slots(path.read_bytes()) if path.exists() else []
    if slots:
        return slots[0]
    if any(path.parent.glob("*.seg")) and not accept_rot:
        raise Corruption(f"{path} has no valid slot", file=str(path), reason="no valid floor")
    return FloorSlot(0, 0, 0, 0)
