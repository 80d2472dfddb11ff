"""The end of the second act: the books are closed, and Spark audits them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from penstock.console import cell
from penstock.demo.archive import films
from penstock.demo.archive.pipeline import EDITS, STILLS
from penstock.demo.archive.watch import counts_of
from penstock.demo.chapters import Chapter
from penstock.testing.process import clean_environment

if TYPE_CHECKING:
    from penstock.demo.archive.cinema import Cinema
    from penstock.demo.archive.writers import Editors
    from penstock.demo.corpus import Corpus

AUDIT_S_MAX: Final = 600.0
QUARANTINE_S_MAX: Final = 180.0


async def count_everything(
    house: Cinema, corpus: Corpus, editors: Editors, chapter: Chapter, *, missing: bytes
) -> None:
    """The pipeline's own counts against what the writers know that they wrote."""
    facts = corpus.facts
    status = house.status
    released, duplicates = counts_of(status, "released"), counts_of(status, "duplicates")
    lookouts = sum(probe.lane == "LOW" for probe in house.prober.seen)
    expected = facts["deltas"] + lookouts
    edits = len(films.CATALOGUE) + editors.edits
    chapter.claim(
        "every delta was released once, whatever its order of arrival",
        released.get(STILLS) == expected and released.get(EDITS) == edits,
        f"{cell(released.get(STILLS, 0))} of {cell(expected)} and"
        f" {cell(released.get(EDITS, 0))} of {cell(edits)}",
    )
    chapter.claim(
        "every duplicate was recognised", duplicates.get(STILLS) == facts["duplicates"],
        f"{cell(duplicates.get(STILLS, 0))} of {cell(facts['duplicates'])}",
    )  # fmt: skip
    letter = await _quarantined(house)
    chapter.claim(
        "the change whose parent never came is in quarantine, with the id it asks for",
        letter is not None and letter == missing.hex(),
        f"missing {letter}" if letter else "the quarantine is empty",
    )
    chapter.headline["deltas in order, each once"] = cell(sum(released.values()))
    chapter.figures["released"] = sum(released.values())


async def _quarantined(house: Cinema) -> str | None:
    """The id that the first letter in quarantine misses; it may take its time to get there."""
    from penstock.errors import NotFound
    from penstock.sinks.topics import MISSING, quarantine_topic

    house.doing = "the orphan's time runs out"
    deadline = time.monotonic() + QUARANTINE_S_MAX
    while time.monotonic() < deadline:
        try:
            found = await house.client.call("peek", topic=quarantine_topic(EDITS), limit=1)
        except NotFound:
            found = {"messages": []}
        for message in found["messages"]:
            return str(message["headers"][MISSING])
        await asyncio.sleep(0.5)
    return None


async def audit_everything(house: Cinema, chapter: Chapter, *, stop: bool) -> None:
    """Prove on Spark, in a process that took no part, that every sink is the fold of the log."""
    if stop:
        house.screen.progress("the pipeline stops")
        code = await house.pipeline.stop()
        chapter.claim("SIGTERM ends the pipeline cleanly", code == 0, f"exit code {code}")
    began = time.monotonic()
    document = await _audit(house)
    took = time.monotonic() - began
    for partition in document.get("partitions", ()):
        chapter.note(
            f"  {partition['topic']}/{partition['partition']}: {cell(partition['messages'])}"
            f" messages, gapless, CRC and hash chain hold, chain {partition['chain']}"
        )
    sinks = document.get("sinks", {})
    verdicts = {name: sink["verdict"] for name, sink in sinks.items()}
    chapter.note("  " + ", ".join(f"{name}: {verdict}" for name, verdict in verdicts.items()))
    chapter.claim(
        "every partition is whole, and every sink equals the fold of the log, bit for bit",
        document.get("ok") is True and len(verdicts) == len(house.status["sinks"]) - 1,
        f"{len(verdicts)} sinks compared on Spark in {took:.0f} s"
        if "error" not in document
        else str(document["error"]),
    )
    chapter.headline["audit"] = "ok" if document.get("ok") else "failed"
    chapter.figures["audit"] = verdicts


async def _audit(house: Cinema) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", "pipeline", "audit", "--json",
        "--config", str(house.pipeline.config),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env=clean_environment(),
    )  # fmt: skip
    began = time.monotonic()
    reading = asyncio.create_task(process.communicate())
    try:
        while not reading.done():
            house.screen.progress(
                f"audit: Spark folds the log anew and compares, {time.monotonic() - began:.0f} s"
            )
            await asyncio.wait([reading], timeout=0.5)
            if time.monotonic() - began > AUDIT_S_MAX:
                return {"error": f"the audit did not end within {AUDIT_S_MAX:.0f} s"}
    finally:
        if process.returncode is None:
            process.kill()
        output, errors = await reading
    try:
        found: dict[str, Any] = json.loads(output)
    except json.JSONDecodeError:
        return {"error": errors.decode(errors="replace")[-500:]}
    return found
