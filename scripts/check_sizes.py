"""Warn of modules that have grown longer than one idea usually takes.

It is a smoke alarm, not an architect: a long module may be right, and a class is not cut in two to
silence it. Generated code is not read by people and is left out.
"""

import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
LINES_MAX = 600


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else SOURCE
    modules = [path for path in sorted(root.rglob("*.py")) if "_generated" not in path.parts]
    if not modules:
        print(f"sizes: no module under {root}", file=sys.stderr)
        return 1
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in modules}
    long = {path: count for path, count in lines.items() if count > LINES_MAX}
    for path, count in long.items():
        print(f"warning: {path.relative_to(root)} has {count} lines, over {LINES_MAX}")
    print(f"sizes: {len(lines)} modules, {sum(lines.values())} lines, {len(long)} warnings")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
