"""The audit trail: one JSON line for every administrative act, durable before the act is answered.

A line says who (a key's id), what, on which subject, with which outcome, for which request, and
when. A thread of its own writes: the event loop never waits for the disk, and lines that come
together share one fsync. Files are rotated by size: `audit.jsonl`, then `.1` (newest) to `.n`.

A line that found no space stays in memory and goes out first as soon as there is some; its call
fails with `DiskFull`, since nothing durable says that it was made. Any other failure ends the
trail, and with it every further administrative act.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from penstock.cluster.reserve import NO_SPACE, Reserve
from penstock.config import AuditOptions
from penstock.errors import Backpressure, DiskFull, PenstockError, StorageFailed
from penstock.log.files import sync_folder

ANONYMOUS: Final = "anonymous"
OK: Final = "ok"
WAITING_MAX: Final = 10_000  # lines in memory; past it administrative acts are refused
RESERVE_BYTES: Final = 64 << 10


class AuditLog:
    """Making one opens the file, which blocks shortly."""

    def __init__(
        self,
        path: Path,
        options: AuditOptions,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._path, self._options, self._now_ms = path, options, now_ms
        self._reserve = Reserve(path.with_name(path.name + ".reserve"), RESERVE_BYTES)
        self._waiting: deque[bytes] = deque()  # loop appends, thread takes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")
        # below: the thread's alone, once open
        self._file = -1
        self._size = 0
        self._failure: StorageFailed | None = None
        try:
            self._open_file()
            self._end_torn_line()
            self._reserve.hold()
        except OSError as error:
            raise StorageFailed(f"cannot open the audit log {path}: {error}") from error

    async def record(
        self,
        act: str,
        *,
        subject: str,
        who: str | None = None,
        outcome: str = OK,
        request_id: str = "",
    ) -> None:
        """Return when the line is durable."""
        if len(self._waiting) >= WAITING_MAX:
            raise Backpressure("the audit log is behind", retry_after_s=1.0)
        moment = datetime.fromtimestamp(self._now_ms() / 1000, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),  # UTC
            "who": who or ANONYMOUS,
            "act": act,
            "subject": subject,
            "outcome": outcome,  # "ok", or the error's code
        }
        if request_id:
            line["request_id"] = request_id
        self._waiting.append(msgspec.json.encode(line, enc_hook=str) + b"\n")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._drain)

    @asynccontextmanager
    async def act(
        self, act: str, *, subject: str, who: str | None = None, request_id: str = ""
    ) -> AsyncIterator[None]:
        """Record what the block does, however it ends."""
        outcome = "cancelled"
        try:
            yield
            outcome = OK
        except Exception as error:
            outcome = error.code if isinstance(error, PenstockError) else PenstockError.code
            raise
        finally:
            await self.record(act, subject=subject, who=who, outcome=outcome, request_id=request_id)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._drain)
        finally:
            await loop.run_in_executor(self._thread, self._close_file)
            self._thread.shutdown(wait=False)

    # --- the writer thread ---

    def _drain(self) -> None:
        """Make every waiting line durable, those of other callers too: each caller runs this after
        it queued its line, so whoever finds nothing left was served by one before it."""
        if self._failure:
            raise self._failure
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not lines:
            return
        try:
            data = b"".join(lines)
            self._reserve.write(lambda: self._append(data))
            self._reserve.hold()
        except OSError as error:
            self._waiting.extendleft(reversed(lines))
            if error.errno in NO_SPACE:
                raise DiskFull("no space for the audit log") from error
            self._failure = StorageFailed(f"cannot write the audit log: {error}")
            raise self._failure from error

    def _append(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._options.file_bytes_max:
            self._rotate()
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # nobody was told of what is behind
            raise
        self._size += len(data)

    def _rotate(self) -> None:
        self._close_file()
        self._numbered(self._options.files_max).unlink(missing_ok=True)
        for number in reversed(range(self._options.files_max)):
            if self._numbered(number).exists():
                self._numbered(number).replace(self._numbered(number + 1))
        self._open_file()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

    def _open_file(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size
        sync_folder(self._path.parent)

    def _end_torn_line(self) -> None:
        """A crash may have left half a line. It stays, as evidence, but on a line of its own."""
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._append(b"\n")

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
