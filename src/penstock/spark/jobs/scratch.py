"""A job's own folder for files that tasks and driver hand each other."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, which driver and executors share; gone when the job ends."""
    own = folder / f".job-{uuid.uuid4().hex}"
    own.mkdir(parents=True)
    try:
        yield own
    finally:
        shutil.rmtree(own)
