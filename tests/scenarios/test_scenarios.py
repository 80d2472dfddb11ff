"""Each transcript of this folder says what really happens."""

from pathlib import Path

import pytest
from tests.scenarios.interpreter import play

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_happens_is_what_is_written(path: Path) -> None:
    text = path.read_text()
    assert play(text) == text


def test_there_are_enough() -> None:
    assert len(FILES) >= 20


def test_a_wrong_transcript_is_noticed() -> None:
    assert play("> nodes a\n  everything is lost\n") == "> nodes a\n  ok\n"
