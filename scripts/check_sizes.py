"""Keep modules, classes and functions small enough to read.

Fails on anything over its limit, prints a warning from the softer limit on. Generated code is
not read by people and is left out.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Limit:
    warn: int
    fail: int


LIMITS = {
    "module": Limit(warn=400, fail=500),
    "class": Limit(warn=250, fail=400),
    "function": Limit(warn=60, fail=80),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A module, class or function, and how many lines it takes."""

    path: Path
    line: int
    kind: str
    name: str
    lines: int

    @property
    def limit(self) -> Limit:
        return LIMITS[self.kind]

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.kind} {self.name} has {self.lines} lines"
            f" (warns over {self.limit.warn}, fails over {self.limit.fail})"
        )


def pieces(path: Path, source: str) -> Iterator[Piece]:
    yield Piece(path, 1, "module", path.stem, len(source.splitlines()))
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.ClassDef):
            kind = "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "function"
        else:
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        yield Piece(path, node.lineno, kind, node.name, lines)


def sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if "_generated" not in path.relative_to(root).parts:
            yield path


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else ROOT / "src"
    found = [piece for path in sources(root) for piece in pieces(path, path.read_text("utf-8"))]
    if not found:
        print(f"sizes: no module under {root}", file=sys.stderr)
        return 1
    failures = [piece for piece in found if piece.lines > piece.limit.fail]
    warnings = [piece for piece in found if piece.limit.warn < piece.lines <= piece.limit.fail]
    for piece in warnings:
        print(f"warning: {piece}")
    for piece in failures:
        print(f"error: {piece}")
    modules = sum(piece.kind == "module" for piece in found)
    print(f"sizes: {modules} modules, {len(warnings)} warnings, {len(failures)} errors")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
