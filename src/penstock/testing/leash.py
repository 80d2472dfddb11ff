"""Processes that end when the one that started them does, however that ends.

    process = subprocess.Popen(...)
    leash.hold(process.pid)

A keeper, started with the first of them, is told of each and waits at a pipe. The pipe closes with
this process, `kill -9` included, and then the keeper kills whatever is left. It holds processes by
descriptors, which do not name another one that got the same number later. Not every platform has
those; where they are missing, nothing is held.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

_SIGNALS_MISSED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_pipe: int | None = None  # our end


def hold(pid: int) -> None:
    """Have a child of ours killed when we are gone."""
    global _pipe
    if not hasattr(os, "pidfd_open"):
        return
    if _pipe is None:
        _pipe = _start_keeper()
    os.write(_pipe, b"%d\n" % pid)


def _start_keeper() -> int:
    theirs, ours = os.pipe()
    null = os.devnull
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, theirs, 0),
            (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
        ],
        setsid=True,  # what is sent to all of our group is not meant for it
    )
    os.close(theirs)
    os.register_at_fork(after_in_child=_let_go)
    return ours


def _let_go() -> None:
    """A copy of us has children of its own, and must not keep the pipe open."""
    global _pipe
    if _pipe is not None:
        os.close(_pipe)
        _pipe = None


def keep() -> None:
    """The keeper: read numbers of processes until the pipe is closed, then kill them."""
    for number in _SIGNALS_MISSED:
        signal.signal(number, signal.SIG_IGN)
    held: list[int] = []
    for line in sys.stdin.buffer:
        held = [descriptor for descriptor in held if _send(descriptor, 0)]
        try:
            held.append(os.pidfd_open(int(line)))
        except ProcessLookupError:
            continue  # it has ended already
    for descriptor in held:
        _send(descriptor, signal.SIGKILL)


def _send(descriptor: int, number: int) -> bool:
    """Send a signal; if there is nobody any more, let go of the descriptor."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        os.close(descriptor)
        return False
    return True


if __name__ == "__main__":
    keep()
