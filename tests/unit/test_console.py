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
