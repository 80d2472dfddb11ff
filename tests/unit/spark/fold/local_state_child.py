"""A worker's step in a process of its own: `ROOT FIRST END [hang | die]`.

It hangs in the middle of its step, or is killed right behind it.
"""

import os
import signal
import sys
from pathlib import Path

from tests.unit.propagation.world import run
from tests.unit.spark.fold.test_local_state import KEY, OPTIONS, fold_in, log_of

from penstock.spark.fold.local_state import local_state


def main(root: str, first: str, end: str, *then: str) -> None:
    with local_state(KEY, OPTIONS, cache={}, root=Path(root)) as local:
        fold = fold_in(local)
        run(fold, log_of(), [int(first), int(end)])
        if then == ("hang",):
            sys.stdout.write("changed\n")
            sys.stdout.flush()
            signal.pause()
        local.settle(fold)
    if then == ("die",):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
