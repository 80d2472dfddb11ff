"""Attack a node for a while: `python -m tests.hostile.command --minutes 10`, or `make hostile`."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop
from tests.hostile.run import long_form, play, short_form
from tests.hostile.site import PROFILES
from tests.hostile.stage import ATTACKS

MINUTES = 10.0
HOLD_S_MIN = 2.0
MEMORY = "/dev/shm"  # a disk that others use would be measured too
LAST = 5  # attackers go after those who are measured


def main() -> int:
    given = _arguments()
    chosen = [
        (profile, attack)
        for profile, attack in (short_form() if given.short else long_form())
        if (not given.only or attack.name in given.only)
        and (not given.profile or profile.name == given.profile)
    ]
    if not chosen:
        print(f"no such attack; there are {', '.join(ATTACKS)}", file=sys.stderr)
        return 2
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    random.Random(seed).shuffle(chosen)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(LAST)
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="penstock-hostile-", dir=place))
    minutes = (0.0 if given.short else MINUTES) if given.minutes is None else given.minutes
    seconds = max(HOLD_S_MIN, minutes * 60 / len(chosen))
    document = {"seed": seed} | uvloop.run(
        play(folder, chosen=chosen, seconds=seconds, say=_say, fresh=given.fresh)
    )
    if document["ok"]:
        shutil.rmtree(folder)
    else:
        document["folder"] = str(folder)
    print(json.dumps(document))
    return 0 if document["ok"] else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--minutes", type=float, help=f"together; default: {MINUTES:g}")
    parser.add_argument("--seed", type=int, help="the order; default: another one each time")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    parser.add_argument("--profile", choices=list(PROFILES))
    parser.add_argument("--short", action="store_true", help="most attacks, in one profile each")
    parser.add_argument("--fresh", action="store_true", help="a new node for each attack")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
