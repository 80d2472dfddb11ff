"""The size check must fail on what is too long and on nothing else."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_sizes.py"


def check(root: Path) -> int:
    return int(runpy.run_path(str(SCRIPT))["main"]([str(root)]))


def function_of(lines: int) -> str:
    return "def f():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("source", "result"),
    [
        (function_of(80), 0),
        (function_of(81), 1),
        ("class C:\n" + "    x = 1\n" * 399, 0),
        ("class C:\n" + "    x = 1\n" * 400, 1),
        ("x = 1\n" * 500, 0),
        ("x = 1\n" * 501, 1),
    ],
)
def test_limits(tmp_path: Path, source: str, result: int) -> None:
    (tmp_path / "module.py").write_text(source)
    assert check(tmp_path) == result


def test_names_the_offender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "module.py").write_text("\n" + function_of(90))
    check(tmp_path)
    assert "module.py:2: function f has 90 lines" in capsys.readouterr().out


def test_warns_before_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "module.py").write_text(function_of(61))
    assert check(tmp_path) == 0
    assert "warning:" in capsys.readouterr().out


def test_skips_generated_code(tmp_path: Path) -> None:
    (tmp_path / "_generated").mkdir()
    (tmp_path / "_generated" / "big.py").write_text("x = 1\n" * 900)
    (tmp_path / "module.py").write_text("x = 1\n")
    assert check(tmp_path) == 0


def test_an_empty_tree_is_an_error(tmp_path: Path) -> None:
    assert check(tmp_path) == 1
