"""What every test shares."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A slow machine must not fail a property test; the pytest timeout bounds it instead.
settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that a test runs configures the logs: not for the tests after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = [h for h in root.handlers if h in handlers] or handlers
    root.setLevel(level)
    logging.captureWarnings(False)
