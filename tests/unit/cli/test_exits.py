"""Every error has an exit code that a script can rely on."""

import pytest

from penstock import errors
from penstock.cli.exits import Exit, exit_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound("x"), Exit.NOT_FOUND),
        (errors.InvalidArgument("x", field="f"), Exit.CALLER),
        (errors.FailedPrecondition("x"), Exit.CALLER),
        (errors.Unauthenticated("x"), Exit.UNAUTHENTICATED),
        (errors.Unavailable("x"), Exit.UNAVAILABLE),
        (errors.DiskFull("x"), Exit.UNAVAILABLE),
        (errors.LeaseLost("x"), Exit.CONFLICT),
        (errors.Corruption("x"), Exit.FAILED),
        (errors.PenstockError("x"), Exit.INTERNAL),
    ],
)
def test_exit_code_follows_the_kind_of_error(error: errors.PenstockError, code: Exit) -> None:
    assert exit_of(error) is code


def test_no_error_of_the_tree_is_left_without_a_code() -> None:
    for kind in errors.BY_CODE.values():
        if kind is not errors.PenstockError:
            error = errors.from_wire({"code": kind.code, "message": "x"})
            assert exit_of(error) not in (Exit.OK, Exit.INTERNAL)
