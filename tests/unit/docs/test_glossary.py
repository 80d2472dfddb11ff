"""One word, one thing: the glossary has each word once, and knows the classes that users meet."""

import ast
import re
from collections import Counter
from pathlib import Path

import penstock

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "penstock"
TEXT = (ROOT / "docs" / "glossary.md").read_text()
ROWS = re.findall(r"^\| (\*\*.+)$", TEXT, re.MULTILINE)
NAMED = set(re.findall(r"`([A-Z]\w+?)(?:\.\w+)?`", "\n".join(ROWS)))


def classes() -> dict[str, list[str]]:
    """The modules that define a class of a name, for all that were written by hand. The SDK without
    `async` has the names of the SDK, so that whoever changes over changes an import."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "_generated" in path.parts or path == PACKAGE / "sync.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    return found


def test_each_word_stands_once() -> None:
    words = Counter(word for row in ROWS for word in re.findall(r"\*\*(.+?)\*\*", row))
    assert len(words) > 100
    assert [word for word, count in words.items() if count > 1] == []


def test_every_class_that_users_meet_has_its_word() -> None:
    """Errors have a page of their own, which is compared with their tree."""
    public = {
        name
        for name in penstock.__all__
        if isinstance(what := getattr(penstock, name), type) and not issubclass(what, Exception)
    }
    assert len(public) > 20
    assert sorted(public - NAMED) == []


def test_every_class_that_the_glossary_names_is_there_once() -> None:
    known = classes()
    assert {name: known.get(name, []) for name in NAMED if len(known.get(name, [])) != 1} == {}


def test_every_file_that_the_glossary_names_is_there() -> None:
    named = re.findall(r"`([a-z_]+/(?:[\w/]*(?:\.py|/))?)`", "\n".join(ROWS))
    assert len(named) > 40
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_no_name_stands_for_two_classes() -> None:
    assert {name: where for name, where in classes().items() if len(where) > 1} == {}
