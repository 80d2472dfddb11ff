"""Named points at which a test may kill the process, to prove what survives.

`PENSTOCK_CRASH="name:nth"` arms one point: the process kills itself with SIGKILL on the nth pass,
as a power cut would, with no handler and no buffered write getting a chance. What is done for every
message looks at `armed` before it names a point, so that a point costs nothing there.
"""

from __future__ import annotations

import os
import signal

armed = False  # whether any point is
_name, _left = "", 0


def arm(text: str) -> None:
    """Arm the point that `name:nth` names; the environment does so when this is imported."""
    global armed, _name, _left
    _name, _, nth = text.partition(":")
    armed = bool(_name)
    _left = int(nth or 1)


arm(os.environ.get("PENSTOCK_CRASH", ""))


def crash_point(name: str) -> None:
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def crash_armed(name: str) -> bool:
    """Whether the next pass of this point dies: lets a caller leave half of its work behind."""
    return name == _name and _left == 1
