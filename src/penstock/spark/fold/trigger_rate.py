"""How many rows a trigger takes: adapted after each, told to the source through `rate.json`.

Utilisation is a trigger's time over `target_trigger_s`. Only a trigger that took most of what it
might counts: one that found little to read says nothing of how much it could bear.

    {"version": 1, "rows": 120000, "rate": 120000}

`rows` is what the source reads before each trigger, 0 while reading pauses; `rate` is where the
next run begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from penstock.propagation.rate import AdaptiveRate
from penstock.spark.settings import PipelineSettings

VERSION: Final = 1
FULL_SHARE: Final = 0.5  # of the rate, from which on a trigger counts


class RateFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    rows: int
    rate: int


class TriggerRate:
    def __init__(self, path: Path, settings: PipelineSettings) -> None:
        self._path, self._target_s = path, settings.target_trigger_s
        bounds = settings.rows_per_trigger
        initial = min(max(_known(path) or bounds.initial, bounds.min), bounds.max)
        self._rate = AdaptiveRate(initial=initial, minimum=bounds.min, maximum=bounds.max)
        self.paused = False
        self._write()

    @property
    def rows(self) -> int:
        """Rows that the next trigger may take, when reading is not paused."""
        return int(self._rate.rate)

    def observe(self, rows: int, seconds: float) -> None:
        """A trigger took `rows` in `seconds`."""
        if rows < self.rows * FULL_SHARE:
            return
        self._rate.adjust(seconds / self._target_s)
        self._write()

    def pause(self) -> None:
        self.paused = True
        self._write()

    def resume(self) -> None:
        self.paused = False
        self._write()

    def _write(self) -> None:
        """Replaced in one step, without a sync: after a crash an older rate will do."""
        content = RateFile(rows=0 if self.paused else self.rows, rate=self.rows)
        new = self._path.with_name(f"{self._path.name}.tmp")
        new.write_bytes(msgspec.json.encode(content))
        new.rename(self._path)


def _known(path: Path) -> int | None:
    """The rate of the last run; None if there was none, or its file cannot be read any more."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RateFile).rate
    except (FileNotFoundError, msgspec.DecodeError):
        return None
