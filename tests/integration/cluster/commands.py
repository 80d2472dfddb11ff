"""`penstock` as a person types it, against nodes of a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from penstock.testing.process import clean_environment

COMMAND_S_MAX = 90


class Ran(NamedTuple):
    code: int
    out: str
    shown: str  # on the terminal that errors and progress go to

    @property
    def document(self) -> Any:
        return json.loads(self.out)


async def penstock(*arguments: str, url: str) -> Ran:
    return await asyncio.to_thread(_run, arguments, url)


def _run(arguments: tuple[str, ...], url: str) -> Ran:
    """The command with a terminal as its stderr: a bar is only drawn on one."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=_read, args=(ours, shown))
    reader.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", "--url", url, *arguments],
            stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL, text=True,
            env=clean_environment() | {"TERM": "xterm", "COLUMNS": "120"},
            timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return Ran(done.returncode, done.stdout, b"".join(shown).decode(errors="replace"))


def _read(terminal: int, into: list[bytes]) -> None:
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # nobody writes there any more
            return
        if not data:
            return
        into.append(data)
