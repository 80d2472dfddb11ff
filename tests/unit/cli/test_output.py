"""What a person and what a script get to see."""

import pytest

from penstock.cli import output
from penstock.console import console


def test_preview_is_one_short_line() -> None:
    assert output.preview(b"one\ntwo") == "one↵ two"
    assert output.preview(b"x" * 100, length_max=10) == "x" * 9 + "…"
    assert output.preview(b"\xff\xfe") == "2 bytes: ff fe"


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "–"), (5, "5 ms"), (1500, "1.5 s"), (90_000, "1.5 min"), (86_400_000, "1.0 d")],
)
def test_duration_picks_a_unit(ms: float | None, text: str) -> None:
    assert output.duration(ms) == text


def test_sizes_and_times_are_readable() -> None:
    assert output.size(512) == "512 B"
    assert output.size(3 << 20) == "3.0 MiB"
    assert output.when(0) == "–"
    assert output.when(1_700_000_000_000) == "2023-11-14 22:13:20Z"


def test_a_table_prints_values_as_they_are_not_as_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console().print(output.table("name", ">count", rows=[["[bold]x[/bold]", 12345]]))
    printed = capsys.readouterr().out
    assert "[bold]x[/bold]" in printed
    assert "12\u202f345" in printed
