"""What every test shares, and which tests run beside each other."""

import logging
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from penstock.testing import process

# A slow machine must not fail a property test; the pytest timeout bounds it instead.
settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")

# What takes minutes comes first: at the end nobody waits long for the other.
FIRST = (
    "spark", "chaos", "hostile", "simulation", "model", "integration", "conformance", "property",
)  # fmt: skip
SPARK = "tests/spark/"
# Of the tests there, those that need no session: their Spark is in another process.
OWN_SPARK = {f"{SPARK}test_{name}.py" for name in ("chaos", "demo", "source_cluster")}


def pytest_configure(config: pytest.Config) -> None:
    """Runs beside each other look for free ports in different places."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    count = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    process.PORTS = process.PORTS[int(worker) :: int(count)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (_rank(item.nodeid), group_of(item.nodeid) != SPARK))


def _rank(nodeid: str) -> int:
    folder = nodeid.split("/")[1]
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


def group_of(nodeid: str) -> str:
    """What stays together, for its fixtures: a module, and all that shares the Spark session."""
    file = nodeid.partition("::")[0]
    return SPARK if file.startswith(SPARK) and file not in OWN_SPARK else file


class Together(LoadFileScheduling):
    """Deals out groups; xdist's own marks for them do nothing with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What is missing here must be installed: a test that skips itself has failed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that a test runs configures the logs: not for the tests after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = [h for h in root.handlers if h in handlers] or handlers
    root.setLevel(level)
    logging.captureWarnings(False)
