"""What ended a trigger, and how many rows one takes."""

import pytest

from penstock.errors import Corruption, Fatal, InvalidArgument, Unavailable
from penstock.spark.executors import cause_of
from penstock.spark.fold.driver import TriggerRate, tasks_for
from penstock.spark.settings import PipelineSettings

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


def rate(*, known: int | None = None, **rows: int) -> TriggerRate:
    bounds = {"min": 100, "max": 10_000, "initial": 1000} | rows
    tree = {"name": "p", "topics": ["t"], "state": "state", "rows_per_trigger": bounds}
    return TriggerRate(PipelineSettings.of(tree | {"target_trigger_s": 2.0}), known=known)


@pytest.mark.parametrize(
    ("seconds", "rows"), [(2.0, 750), (1.6, 950), (1.0, 1000), (0.55, 1050), (0.4, 2000)]
)
def test_a_full_trigger_moves_the_rate_by_its_time(seconds: float, rows: int) -> None:
    made = rate()
    made.observe(1000, seconds)
    assert made.rows == rows


def test_a_trigger_that_found_little_says_nothing() -> None:
    made = rate()
    made.observe(499, 60.0)
    made.observe(10, 0.01)
    assert made.rows == 1000


def test_triggers_that_are_over_in_no_time_double_the_rate_up_to_its_bound() -> None:
    made = rate()
    for _ in range(5):
        made.observe(made.rows, 0.1)
    assert made.rows == 10_000


def test_the_next_run_begins_where_the_last_one_was() -> None:
    assert rate(known=750).rows == 750
    assert rate(known=750, min=800).rows == 800  # within the bounds it is given now


@pytest.mark.parametrize(
    ("cores", "master", "tasks"),
    [(1, "local[1]", 1), (2, "local[6]", 1), (16, "local[*]", 8), (16, "spark://db1:7077", 16)],
)
def test_the_fold_may_have_all_cores_of_a_cluster_and_half_of_this_machine(
    cores: int, master: str, tasks: int
) -> None:
    assert tasks_for(cores, master) == tasks
