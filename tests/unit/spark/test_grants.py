"""The wait for a cluster's first executor, with a stand-in for the cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from penstock.errors import Unavailable
from penstock.spark.grants import UNKNOWN, await_executors, spare_of
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings

WORKER = {"host": "10.0.0.1", "port": 7078, "state": "ALIVE",
          "cores": 4, "coresfree": 1, "memory": 1024, "memoryfree": 600}  # fmt: skip
FREE = "10.0.0.1:7078 1 of 4 cores and 600 of 1024 MiB"


class Cluster:
    """Stands for a session, its context, and what the context says of its executors."""

    def __init__(self, master: str, *, executors: int = 0, **settings: str) -> None:
        self.master, self.executors = master, executors
        self.settings = {name.replace("_", "."): text for name, text in settings.items()}
        self.sparkContext = self._jsc = self

    def getConf(self) -> dict[str, str]:
        return self.settings

    def sc(self) -> Cluster:
        return self

    def getExecutorMemoryStatus(self) -> Cluster:
        return self

    def size(self) -> int:
        return self.executors + 1


def waited(cluster: Any) -> str:
    with pytest.raises(Unavailable) as refused:
        await_executors(cluster, timeout_s=0.1)
    return refused.value.message


@pytest.fixture
def page() -> Iterator[tuple[int, dict[str, Any]]]:
    """A master's page: its port, and what it says."""
    said: dict[str, Any] = {"status": "ALIVE", "url": "spark://other:7077", "workers": [WORKER]}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, said
        server.shutdown()
        thread.join()


def test_what_there_is_says_the_page_of_the_master(page: tuple[int, dict[str, Any]]) -> None:
    port, said = page
    settings = {"spark_master_ui_port": str(port), "spark_executor_memory": "20g"}
    cluster = Cluster("spark://127.0.0.1:1,127.0.0.1:7077", **settings)

    told = waited(cluster)
    assert "spark.executor.memory: 20g" in told and f"its workers have free: {FREE}" in told
    said["status"] = "STANDBY"
    assert UNKNOWN in waited(cluster)


def test_where_it_cannot_be_known_that_is_said() -> None:
    assert UNKNOWN in waited(Cluster("k8s://https://kubernetes.default.svc"))
    told = waited(Cluster("spark://127.0.0.1:7077", spark_master_ui_port="1"))
    assert UNKNOWN in told and "spark.master.ui.port" in told


def test_workers_that_died_are_left_out_and_many_are_counted() -> None:
    assert spare_of({"workers": [WORKER | {"state": "DEAD"}]}) == "it has no workers"
    assert spare_of({"workers": [WORKER] * 10}).endswith(f"{FREE}, and 2 more")


def test_a_session_that_is_lent_is_waited_for() -> None:
    tree = {"name": "p", "topics": ["v"], "state": "state", "executors_s": 1.0}
    lent: Any = Cluster("yarn")

    with pytest.raises(Unavailable, match="yarn has granted no executor in 1 s"):
        Pipeline(PipelineSettings.of(tree), session=lent)._spark()

    lent.executors = 1
    assert Pipeline(PipelineSettings.of(tree), session=lent)._spark() is lent
