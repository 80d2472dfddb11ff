"""A pipeline's metrics, as Prometheus reads them."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.spark.delivery.delivering import (
    QUICK,
    FileSink,
    FillingJobs,
    Triggers,
    delivery_of,
    eventually,
    filled_delivery,
)

from penstock.errors import InvalidArgument, Unavailable
from penstock.spark.delivery.delivery import PipelineDelivery

ROOT = Path(__file__).parents[4]


@pytest.fixture
def delivery(tmp_path: Path) -> PipelineDelivery:
    """One that has delivered a trigger and knows of another."""
    triggers = Triggers(tmp_path)
    made = delivery_of(
        triggers, FileSink(tmp_path), folder=tmp_path, name="tests", metrics="127.0.0.1:0"
    )
    triggers.commit(("a", 1), ("b", 1), quarantine=["x"])
    made.start()
    assert made.drain(20)
    return made


def samples(text: str) -> dict[tuple[str, str], float]:
    """By metric and the label that tells series apart here."""
    return {
        (s.name, s.labels.get("sink", s.labels.get("topic", ""))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if "le" not in s.labels
    }


def test_a_scrape_shows_what_the_status_says(delivery: PipelineDelivery) -> None:
    url = f"http://127.0.0.1:{delivery.metrics.port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        found = samples(answer.read().decode())
    delivery.stop()
    assert found["penstock_pipeline_sink_rows_total", "file"] == 2
    assert found["penstock_pipeline_sink_rows_total", "_quarantine"] == 1
    assert found["penstock_pipeline_sink_lag_rows", "file"] == 0
    assert found["penstock_pipeline_sink_up", "file"] == 1
    assert found["penstock_pipeline_sink_breaker", "file"] == 0
    assert found["penstock_pipeline_sink_visible_seconds_count", "file"] == 2
    assert found["penstock_pipeline_sequence", "vectors"] == 100
    assert found["penstock_pipeline_read_deltas_total", "vectors"] == 2
    assert found["penstock_pipeline_trigger", ""] == 0


def test_a_sink_that_is_filled_is_up_and_says_how_far_it_is(tmp_path: Path) -> None:
    """Before, it counted as halted, and a try that failed could not be told from one that went
    on."""
    jobs = FillingJobs()
    patience = msgspec.structs.replace(
        QUICK, backoff_s_base=0.5, backoff_s_cap=0.5, breaker_open_s=0.5
    )
    delivery = filled_delivery(tmp_path, jobs, options=patience)

    def shown() -> tuple[str, float]:
        up = samples(delivery.metrics.text().decode())["penstock_pipeline_sink_up", "new"]
        return delivery.status()["sinks"][1]["state"], up

    delivery.start()
    eventually(lambda: shown() == ("waiting", 0))
    jobs.well.set()
    eventually(lambda: shown() == ("filling", 1))
    progress = {"trigger": 2, "from": "log", "tasks": 8, "done": 3, "writing": False}
    assert delivery.status()["sinks"][1]["filling"] == progress
    jobs.done.set()
    assert delivery.drain(20)
    eventually(lambda: shown() == ("idle", 1))
    assert delivery.status()["sinks"][1]["filling"] is None
    delivery.stop()
    assert shown() == ("stopped", 0)


def test_a_page_whose_name_points_here_is_told_nothing(delivery: PipelineDelivery) -> None:
    """Before, the metrics were sent, whatever name the request was addressed to."""
    url = f"http://127.0.0.1:{delivery.metrics.port}/metrics"
    foreign = urllib.request.Request(url, headers={"host": "rebound.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(foreign, timeout=60)
    assert refused.value.code == 421
    assert json.loads(refused.value.read())["code"] == "misdirected"
    own = urllib.request.Request(url, headers={"host": "localhost:9100"})
    assert urllib.request.urlopen(own, timeout=60).status == 200
    delivery.stop()


def test_the_port_is_free_again_afterwards(delivery: PipelineDelivery) -> None:
    port = delivery.metrics.port
    delivery.stop()
    delivery.metrics.serve(f"127.0.0.1:{port}")
    with pytest.raises(Unavailable, match=str(port)):
        delivery.metrics.serve(f"127.0.0.1:{port}")
    delivery.metrics.close()


@pytest.mark.parametrize("address", ["here", "127.0.0.1:", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(delivery: PipelineDelivery, address: str) -> None:
    delivery.stop()
    with pytest.raises(InvalidArgument, match="host:port"):
        delivery.metrics.serve(address)


def test_every_metric_is_documented(delivery: PipelineDelivery) -> None:
    delivery.stop()
    page = (ROOT / "docs" / "metrics.md").read_text()
    families = text_string_to_metric_families(delivery.metrics.text().decode())
    names = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families
    }
    assert len(names) > 20
    assert {name for name in names if f"`{name}`" not in page} == set()
