"""docs/errors.md has every error that there is, with what the table in the code says of it."""

import re
from pathlib import Path

import pytest

from penstock.errors import BY_CODE, STATUS_TABLE, PenstockError

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \| (\d+) \| (\d+) \| (yes|no) \|", re.MULTILINE)


def documented() -> dict[str, tuple[str, ...]]:
    return {code: tuple(rest) for code, *rest in ROW.findall(PAGE.read_text())}


def test_every_code_is_listed_once() -> None:
    assert documented().keys() == BY_CODE.keys()
    assert len(ROW.findall(PAGE.read_text())) == len(BY_CODE)


@pytest.mark.parametrize("error", BY_CODE.values(), ids=lambda error: error.code)
def test_an_error_is_what_the_page_says(error: type[PenstockError]) -> None:
    grpc, http = STATUS_TABLE[error.status]
    retryable = "yes" if error.retryable else "no"
    expected = (error.__name__, error.status, str(grpc), str(http), retryable)
    assert documented()[error.code] == expected
