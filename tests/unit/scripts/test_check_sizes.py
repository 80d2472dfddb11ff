"""The size check warns of what is too long and of nothing else."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_sizes.py"


@pytest.mark.parametrize(("lines", "warned"), [(600, False), (601, True)])
def test_a_module_that_is_too_long_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: int, warned: bool
) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * lines)
    check: dict[str, Any] = runpy.run_path(str(SCRIPT))
    assert check["main"]([str(tmp_path)]) == 0
    assert ("long.py" in capsys.readouterr().out) is warned


def test_generated_code_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "_generated").mkdir()
    (tmp_path / "_generated" / "long.py").write_text("x = 1\n" * 601)
    (tmp_path / "short.py").write_text("x = 1\n")
    assert runpy.run_path(str(SCRIPT))["main"]([str(tmp_path)]) == 0
    assert "long.py" not in capsys.readouterr().out


def test_an_empty_tree_is_an_error(tmp_path: Path) -> None:
    assert runpy.run_path(str(SCRIPT))["main"]([str(tmp_path)]) == 1
