"""The Spark pipeline of the demo: its configuration, and its process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.errors import Unavailable
from penstock.testing.process import clean_environment

STOP_S_MAX: Final = 180.0
LINES_SHOWN: Final = 15

NAME: Final = "cinema"
EDITS: Final = "edits"  # people's changes: the pipeline's first topic
STILLS: Final = "stills"  # a model's, in bulk
SLOW: Final = "partner"
FAILING: Final = "shop"

CONFIG: Final = """\
# Edits are read first in every trigger: what people do never waits for what a model does.
name = "{name}"
url = "{url}"
topics = ["{edits}", "{stills}"]
state = "{folder}/state"
cores = 2
trigger_interval_s = 0.5
drain_s = 20.0
# Small triggers, and little patience: so that there is something to watch.
rows_per_trigger = {{ min = 1000, max = {rows}, initial = {rows} }}
delivery = {{ backoff_s_cap = 1.0, breaker_failures = 5, breaker_open_s = 4.0, status_s = 0.5 }}
propagation = {{ pending_ms = 15000 }}
# For a Java that does not live long: less compiling halves what its start costs.
spark = {{ "spark.driver.extraJavaOptions" = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" }}

[[sink]]
kind = "lake"
path = "{folder}/lake"

[[sink]]
kind = "index"
path = "{folder}/index"

[[sink]]
kind = "cache"
url = "{redis}"

[[sink]]
kind = "penstock.demo.archive.sinks:Partner"
name = "{slow}"
path = "{folder}/partner.sqlite"
rows_per_s = {slow_rows}

[[sink]]
kind = "penstock.demo.archive.sinks:Shop"
name = "{failing}"
path = "{folder}/shop.sqlite"
outage = "{folder}/outage"
"""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is written, and how long the bulk of it takes its writers."""

    vectors: int
    deltas: int
    bulk_s: float
    rows_per_trigger: int  # few, so that bulk work takes many triggers
    slow_rows_per_s: int

    @classmethod
    def of(cls, *, quick: bool) -> Scale:
        if quick:
            return cls(
                vectors=2_000, deltas=16_000, bulk_s=3.0, rows_per_trigger=1_200,
                slow_rows_per_s=100,
            )  # fmt: skip
        return cls(
            vectors=20_000, deltas=120_000, bulk_s=5.0, rows_per_trigger=6_000,
            slow_rows_per_s=1_000,
        )  # fmt: skip


@dataclass(kw_only=True)
class PipelineProcess:
    """`penstock pipeline run`, with everything it keeps under one folder."""

    folder: Path
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)

    @property
    def config(self) -> Path:
        return self.folder / "pipeline.toml"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def outage(self) -> Path:
        """While this file exists, the shop fails."""
        return self.folder / "outage"

    @property
    def log_path(self) -> Path:
        return self.folder / "pipeline.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def configure(
        self, *, url: str, redis: str, rows_per_trigger: int, slow_rows_per_s: int
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = CONFIG.format(
            name=NAME, url=url, redis=redis, folder=self.folder.absolute(), edits=EDITS,
            stills=STILLS, slow=SLOW, failing=FAILING, slow_rows=slow_rows_per_s,
            rows=rows_per_trigger,
        )  # fmt: skip
        self.config.write_text(text)

    async def start(self) -> None:
        """Start it; Spark takes a while until `status` says something."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock.cli", "pipeline", "run", "--config",
                str(self.config),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=clean_environment(), start_new_session=True,
            )  # fmt: skip

    def status(self) -> dict[str, Any] | None:
        """What the pipeline last said of itself; None while it has said nothing."""
        try:
            found: dict[str, Any] = json.loads((self.state / "status.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return found

    def check(self) -> None:
        """Raise if the process has ended."""
        if self._process is not None and self._process.returncode is not None:
            code = self._process.returncode
            raise Unavailable(f"the pipeline ended with {code}:\n{self.last_words()}")

    def last_words(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LINES_SHOWN:])

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        return await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """`kill -9`, of Spark's own processes too."""
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            if number is signal.SIGTERM:
                process.terminate()  # the driver ends the others
            try:
                async with asyncio.timeout(STOP_S_MAX if number is signal.SIGTERM else 0):
                    await process.wait()
            except TimeoutError:
                pass
        _kill_group(process.pid)
        return await process.wait()


def _kill_group(pid: int) -> None:
    """End what is left of the session that the process led: Java and Python workers."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
