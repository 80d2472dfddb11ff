"""What a person and what a script get to see."""

import io
import json

import pytest

from penstock import console


def test_bytes_become_text_or_are_named_base64() -> None:
    shown = json.loads(console.to_json({"key": b"a", "payload": b"\xff\x00", "tags": [b"t"]}))
    assert shown == {"key": "a", "payload_base64": "/wA=", "tags": ["t"]}


def test_progress_stays_silent_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with console.progress("work", total=10) as advance:
        advance(5)
        advance(10, 10)
    assert stderr.getvalue() == ""


def test_preview_is_one_short_line() -> None:
    assert console.preview(b"one\ntwo") == "one↵ two"
    assert console.preview(b"x" * 100, length_max=10) == "x" * 9 + "…"
    assert console.preview(b"\xff\xfe") == "2 bytes: ff fe"


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "–"), (5, "5 ms"), (1500, "1.5 s"), (90_000, "1.5 min"), (86_400_000, "1.0 d")],
)
def test_duration_picks_a_unit(ms: float | None, text: str) -> None:
    assert console.duration(ms) == text


def test_sizes_and_times_are_readable() -> None:
    assert console.size(512) == "512 B"
    assert console.size(3 << 20) == "3.0 MiB"
    assert console.when(0) == "–"
    assert console.when(1_700_000_000_000) == "2023-11-14 22:13:20Z"


def test_a_table_prints_values_as_they_are_not_as_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.console().print(console.table("name", ">count", rows=[["[bold]x[/bold]", 12345]]))
    printed = capsys.readouterr().out
    assert "[bold]x[/bold]" in printed
    assert "12\u202f345" in printed
