"""How far a sink has come, on disk.

A cursor says: *everything up to here is durably in the sink*. It is saved after the write it
speaks of, so a cursor that is behind the truth is harmless (the sink is given work again, and
takes it once), while a cursor ahead of the truth would lose rows. From that follow the rules:

- A cursor only grows, per lane. Saving is one atomic, synced replacement of the file.
- `position[lane]` is the last trigger of which the sink holds that lane's rows. An ordered sink
  has one lane: all.
- `attempt` is the range of triggers that an ordered sink is about to get in one write. It is saved
  *before* that write and gone after it. So after a crash it is known what may have been under way,
  and exactly this range is written again, never a longer one that begins with it: a sink that
  recognises a repeated write by its trigger numbers can rely on that.
- A sink that keeps a cursor of its own knows best what it holds. It may be ahead of the file by the
  attempt; that one is offered again all the same, as the rows it may have rejected are not yet
  dead letters. It may be behind `position`, as it does not hear of triggers without a row for it;
  only if it is behind what it had `told` when the file was saved, rows have gone from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import storage_errors, write_whole
from penstock.spark.fold.changes import LANES

VERSION: Final = 1
NONE: Final = -1  # before the first trigger


class SinkCursor(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    position: tuple[int, ...]  # per lane; one entry for an ordered sink
    started: int = NONE + 1  # the first trigger this sink was ever given
    attempt: tuple[int, int] | None = None
    told: int | None = None  # the sink's own cursor, if it keeps one, when this was saved

    @classmethod
    def before(cls, trigger: int, *, lanes: int) -> SinkCursor:
        """The cursor of a sink whose first trigger will be `trigger`."""
        return cls(position=(trigger - 1,) * lanes, started=trigger)

    @property
    def through(self) -> int:
        """The last trigger that is complete in every lane."""
        return min(self.position)

    def advanced(self, lanes: dict[int, int], *, told: int | None = None) -> SinkCursor:
        """The cursor with some lanes moved on; an attempt is over with that."""
        moved = list(self.position)
        for lane, trigger in lanes.items():
            assert trigger >= moved[lane], (lane, trigger, self)
            moved[lane] = trigger
        known = self.told if told is None else told
        return replace(self, position=tuple(moved), told=known, attempt=None)

    def attempting(self, first: int, last: int) -> SinkCursor:
        assert self.through < first <= last, (first, last, self)
        return replace(self, attempt=(first, last))

    def reconciled(self, held: int | None) -> SinkCursor:
        """The cursor of a sink that says itself what it holds: everything up to `held`.

        It may be ahead (the process died before the cursor was saved) or behind (it was emptied,
        or restored from a copy). None from a sink that has told before means that it is empty;
        from any other that it does not know.
        """
        if held is None:
            if self.told is None:
                return self
            held = NONE
        assert len(self.position) == 1, "a sink with lanes has no single cursor"
        if self.told is not None and held < self.told:
            return replace(self, position=(held,), told=held, attempt=None)
        if self.attempt is not None and self.attempt[1] == held:
            return replace(self, told=held)
        position = max(held, self.through)
        attempt = self.attempt if self.attempt and self.attempt[0] > position else None
        return replace(self, position=(position,), told=held, attempt=attempt)

    def in_lanes(self, lanes: int) -> SinkCursor:
        """The same progress for another number of lanes: a sink became ordered, or ceased to be."""
        if len(self.position) == lanes:
            return self
        return replace(self, position=(self.through,) * lanes, attempt=None)


class CursorFile:
    """One sink's cursor at `<state>/sinks/<name>.json`."""

    def __init__(self, state: Path, sink: str) -> None:
        self.path = state / "sinks" / f"{sink}.json"
        self.saved: SinkCursor | None = None  # what the disk holds

    def load(self) -> SinkCursor | None:
        try:
            cursor = msgspec.json.decode(self.path.read_bytes(), type=SinkCursor)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise Corruption(f"{self.path} is not a cursor: {error}") from error
        if cursor.version != VERSION:
            raise Corruption(
                f"{self.path} has version {cursor.version}, this release reads {VERSION}"
            )
        if len(cursor.position) not in (1, LANES):
            raise Corruption(f"{self.path} has {len(cursor.position)} lanes, not 1 or {LANES}")
        self.saved = cursor
        return cursor

    def save(self, cursor: SinkCursor) -> None:
        """Durable on return."""
        document = {"sink": self.path.stem, **msgspec.structs.asdict(cursor)}
        with storage_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            crash_point("delivery.cursor.before")
            write_whole(self.path, [msgspec.json.encode(document)])
        crash_point("delivery.cursor.after")
        self.saved = cursor
