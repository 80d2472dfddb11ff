"""What ended a query, found in the text that Spark makes of it."""

import pytest

from penstock.errors import Corruption, Fatal, InvalidArgument, Unavailable
from penstock.spark.fold.failures import cause_of

QUOTED = """[STREAM_FAILED] Query terminated with exception: An exception was thrown:
Traceback (most recent call last):
  File "access.py", line 1, in call
penstock.errors.NotFound: no topic vectors
During handling of the above exception, another exception occurred:
penstock.errors.{name}: {message}
 SQLSTATE: 39000"""


@pytest.mark.parametrize("kind", [Unavailable, Corruption, InvalidArgument])
def test_the_last_error_of_ours_is_the_cause(kind: type[Exception]) -> None:
    cause = cause_of(RuntimeError(QUOTED.format(name=kind.__name__, message="the node is away")))
    assert type(cause) is kind
    assert cause.message == "the node is away"


def test_an_error_of_ours_stays_as_it_is() -> None:
    error = Corruption("as raised", sequence=3)
    assert cause_of(error) is error


def test_an_error_of_others_is_fatal_and_named() -> None:
    cause = cause_of(RuntimeError("Query failed:\nTraceback\nKeyError: 'from'\n SQLSTATE"))
    assert type(cause) is Fatal
    assert cause.message == "KeyError: 'from'"
    assert not cause.retryable
    assert cause_of(RuntimeError("")).message == "RuntimeError"
    assert cause_of(RuntimeError("one\ntwo")).message == "one"


def test_a_python_process_that_starts_too_slowly_is_tried_again() -> None:
    text = "[STREAM_FAILED] terminated with exception: Python worker failed to connect back.\n at X"
    cause = cause_of(RuntimeError(text))
    assert type(cause) is Unavailable and cause.retryable


def test_a_name_that_is_no_error_is_passed_over() -> None:
    assert type(cause_of(RuntimeError("penstock.errors.Any: x"))) is Fatal
