"""The folder at rest: verified whole, and a copy with one flipped bit found out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.demo.claims import Chapter

if TYPE_CHECKING:
    from penstock.log.verify import Report


async def verify_folder_at_rest(data: Path, chapter: Chapter) -> None:
    from penstock.log.verify import verify_folder

    report = await asyncio.to_thread(verify_folder, data)
    chapter.figures["messages_in_the_log"] = report.messages
    chapter.claim(
        "fsck: gapless, every CRC and the hash chain hold", report.ok,
        f"{report.partitions} partitions, {report.messages} messages",
    )  # fmt: skip
    bad = (await asyncio.to_thread(_flip_and_verify, data)).first_bad
    chapter.claim(
        "fsck finds one flipped bit in a copy", bad is not None,
        f"at sequence {bad['sequence']} of partition {bad['partition']}" if bad else "not found",
    )  # fmt: skip


def _flip_and_verify(data: Path) -> Report:
    """Flip the lowest bit in the middle of the longest stretch of data, in a copy."""
    from penstock.log.verify import verify_folder

    with tempfile.TemporaryDirectory(prefix="penstock-flip-") as scratch:
        copy = Path(scratch) / "data"
        shutil.copytree(data, copy, ignore=shutil.ignore_patterns("LOCK"))
        victim = max(copy.rglob("*.seg"), key=lambda path: path.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(bytes(content).rstrip(b"\0")) // 2] ^= 1
        victim.write_bytes(content)
        return verify_folder(copy)
