"""The documentation holds together: links resolve, code is code, the README's example runs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its blocks of code, in which brackets mean other things."""
    text = FENCE.sub("", page.read_text())
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def python_blocks(page: Path) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language == "python"]


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str) -> None:
    page = ROOT / name
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name} links to {link}"


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_python(name: str) -> None:
    for code in python_blocks(ROOT / name):
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(prose(page)))
        waiting += [(page.parent / link).resolve() for link in links if link and ":" not in link]
    assert [str(p.relative_to(ROOT)) for p in PAGES if p not in reached] == []


def test_the_map_of_the_code_names_files_that_are_there() -> None:
    named = re.findall(
        r"`([\w/-]+(?:/|\.py|\.proto))`", (ROOT / "docs" / "code-map.md").read_text()
    )
    assert len(named) > 50
    roots = (ROOT, ROOT / "src" / "penstock")
    assert [n for n in named if not any((root / n).exists() for root in roots)] == []


def test_the_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", text, re.DOTALL)
    assert found is not None
    code, shown = found.groups()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.stderr == ""
    assert ran.stdout == re.sub(r"^    ", "", shown, flags=re.MULTILINE)
    assert (tmp_path / "penstock-data").is_dir()
