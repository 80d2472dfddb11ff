"""Running work in executors: a job of tasks, the processes that they run in, and why one ended.

A task runs in a Python process that Spark takes from the executor's idle ones, the one that has
been idle longest. Processes keep what is costly to make: the state of a partition, an open table.
So each kind of work has processes of its own (`workers`): Spark keeps those apart that differ in an
environment variable.

What ended a job is told as the error that was raised where it happened (`cause_of`). An error of a
task reaches the driver as text: Spark's exception quotes the Python traceback. The last of
Penstock's errors in it is the cause.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock import errors
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from pyspark import SparkContext

T = TypeVar("T")
R = TypeVar("R")
WORKERS: Final = "PENSTOCK_WORKERS"
_wrapping: Final = threading.Lock()
_RAISED: Final = re.compile(r"penstock\.errors\.(\w+): ([^\n]*)")
# Spark gives a Python process ten seconds to start, which a busy machine may outlast.
_LATE: Final = "Python worker failed to connect back"
_NAMED: Final = re.compile(r"^[\w.]*(?:Error|Exception)\b: .*", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Who asks for a job: its pool of the fair scheduler, the group by which it can be cancelled,
    and what the Spark UI says of it."""

    pool: str
    group: str
    description: str
    workers: str  # which processes run its tasks


def run_job(
    context: SparkContext, job: Job, work: Callable[[T], R], items: Sequence[T], *, tasks: int
) -> list[R]:
    """`work` for each of the items, in so many tasks; the answers in the order of the items. Raises
    what ended the job. What this thread asks of Spark afterwards belongs to the same job."""
    context.setLocalProperty("spark.scheduler.pool", job.pool)
    context.setJobGroup(job.group, job.description, interruptOnCancel=True)
    if not items:
        return []
    answers: Any = context.parallelize(items, min(tasks, len(items))).map(partial(_worked, work))
    with _wrapping:  # the function is bound to the environment of this moment
        usual = context.environment
        context.environment = usual | {WORKERS: job.workers}
        try:
            assert answers._jrdd is not None
        finally:
            context.environment = usual
    with causes():
        return list(answers.collect())


def _worked(work: Callable[[T], R], item: T) -> R:
    """In the task. Spark collects garbage after each one, and looks through all that the process
    holds: tens of milliseconds where large libraries are imported. What the first task has made is
    there to stay, and is not looked at again."""
    answer = work(item)
    _keep_what_is_there(os.getpid())
    return answer


@lru_cache(maxsize=1)
def _keep_what_is_there(pid: int) -> None:
    """Once in each process; `gc` itself takes as long to say whether it was done."""
    gc.freeze()


@contextmanager
def causes() -> Iterator[None]:
    """Tell what ended a job in a line, not by Spark's quotations."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise cause_of(error) from error


def cause_of(error: BaseException) -> PenstockError:
    """The error that ended a job; `Fatal` if Spark gave up for reasons of its own."""
    if isinstance(error, PenstockError):
        return error
    text = str(error)
    for name, message in reversed(_RAISED.findall(text)):
        if (cause := error_named(name, message)) is not None:
            return cause
    if _LATE in text:
        return errors.Unavailable(_LATE)
    named = _NAMED.findall(text)
    return errors.Fatal(named[-1] if named else text.split("\n", 1)[0] or type(error).__name__)


def error_named(name: str, message: str) -> PenstockError | None:
    """The error of this class, None if it is none of Penstock's."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        return None
    more = {"field": "unknown"} if issubclass(kind, errors.InvalidArgument) else {}
    return kind(message, **more)
