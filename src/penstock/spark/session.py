"""A Spark session as Penstock needs it: every setting in one place.

Settings that a caller passes, and those of `spark-submit`, win over these. On a cluster the
executors need the same Python packages; `docs/spark.md` says how they get there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from penstock.spark import java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STATE: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_ARROW_ROWS_MAX: Final = 50_000  # of a batch that Spark sends to Python
_SHUFFLE_PARTITIONS: Final = 8  # local mode: a few log partitions, not Spark's 200

SETTINGS: Final[dict[str, str]] = {
    # A reader that takes filters is refused by Spark unless this is on.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ARROW_ROWS_MAX),
    "spark.sql.streaming.stateStore.providerClass": _STATE,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
LOCAL_SETTINGS: Final[dict[str, str]] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(_SHUFFLE_PARTITIONS),
}


def spark_session(
    name: str,
    *,
    master: str | None = None,
    cores: int | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session with the data source registered; the running one if there is one already.

    Without a `master` it runs on this machine alone, with `cores` threads (as many as it has).
    """
    prepare_environment()
    from pyspark.sql import SparkSession

    submitted = _submitted()
    chosen = master or submitted.get("spark.master") or f"local[{cores or '*'}]"
    settings = _settings(chosen, cores) | submitted | dict(conf or {})
    builder = SparkSession.builder.appName(name).master(chosen)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    return session


def register(session: SparkSession) -> None:
    """Make `format("penstock")` known to a session that was not made here."""
    from penstock.spark.source.source import PenstockSource

    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    session.dataSource.register(PenstockSource)


def prepare_environment() -> None:
    """What the JVM and the Python workers inherit from this process."""
    os.environ["JAVA_HOME"] = str(java.resolve())
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
    """What `spark-submit` was told, if it started this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())
