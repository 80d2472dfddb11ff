"""A server that is somebody else's program, in a process of its own, and ports for it."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from penstock.errors import Unavailable
from penstock.testing import leash

START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 10.0
POLL_S: Final = 0.02
PORTS: Final = range(20_000, 32_000)  # below the ephemeral ones, which any client may be given
PORT_TRIES: Final = 100


class ProgramProcess(ABC):
    """One server with its data and its log in a folder. It may be started again after it ended."""

    what: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def answers(self) -> bool:
        """Whether the server can be used."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.what}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        leash.hold(self.pid)
        if wait:
            self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        while not self.answers():
            code = self._process.poll() if self._process else None
            if code is not None:
                log = self.folder / f"{self.what}.log"
                raise Unavailable(f"{self.what} ended with {code}, see {log}")
            if time.monotonic() > deadline:
                self.kill()
                raise Unavailable(f"{self.what} did not answer within {START_S_MAX:.0f} s")
            time.sleep(POLL_S)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Keep its connections, answer nothing: from when this returns."""
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGSTOP)
            while process.poll() is None and not _is_stopped(process.pid):
                time.sleep(POLL_S)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORTS, PORT_TRIES):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise Unavailable(f"no {count} free ports in {PORTS.start} to {PORTS.stop}")


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process have been stopped by a signal."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
