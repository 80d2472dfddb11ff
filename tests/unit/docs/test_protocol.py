"""docs/protocol.md names every call with its arguments, every frame type and every bound."""

import re
from pathlib import Path

import msgspec
import pytest

import penstock.node.session.session
from penstock.node.calls.table import METHODS
from penstock.wire.frame import FrameType
from penstock.wire.messages import CALLS

TEXT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
ROWS = {
    name: row
    for row in re.findall(r"^\| `\w+`.*\|$", TEXT, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row.split("|")[1])
}


def test_every_call_is_listed() -> None:
    assert penstock.node.session.session is not None  # it registers the calls
    assert ROWS.keys() == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_call_is_listed_with_its_arguments(name: str) -> None:
    fields = {field.name for field in msgspec.structs.fields(METHODS[name].arguments)}
    assert {field for field in fields if field not in ROWS[name]} == set()
    assert ("audited" in ROWS[name]) is CALLS[name].audited
    assert ("destructive" in ROWS[name].split("|")[3]) is CALLS[name].confirmed


@pytest.mark.parametrize("type", FrameType)
def test_every_frame_type_is_listed(type: FrameType) -> None:
    assert f"| {int(type)} {type.name} |" in TEXT
