"""Rows per trigger: adapted by time, told through a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.spark.fold.trigger_rate import TriggerRate
from penstock.spark.settings import PipelineSettings


def rate(folder: Path, **rows: int) -> TriggerRate:
    bounds = {"min": 100, "max": 10_000, "initial": 1000} | rows
    tree = {"name": "p", "topics": ["t"], "state": str(folder), "rows_per_trigger": bounds}
    return TriggerRate(folder / "rate.json", PipelineSettings.of(tree | {"target_trigger_s": 2.0}))


def on_file(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "rate.json").read_text())
    return found


@pytest.mark.parametrize(("seconds", "rows"), [(2.0, 750), (1.6, 950), (1.0, 1000), (0.5, 1050)])
def test_a_full_trigger_moves_the_rate_by_its_time(
    tmp_path: Path, seconds: float, rows: int
) -> None:
    made = rate(tmp_path)
    made.observe(1000, seconds)
    assert made.rows == rows
    assert on_file(tmp_path) == {"version": 1, "rows": rows, "rate": rows}


def test_a_trigger_that_found_little_says_nothing(tmp_path: Path) -> None:
    made = rate(tmp_path)
    made.observe(499, 60.0)
    made.observe(10, 0.01)
    assert made.rows == 1000


def test_a_pause_keeps_the_rate(tmp_path: Path) -> None:
    made = rate(tmp_path)
    made.pause()
    assert on_file(tmp_path) == {"version": 1, "rows": 0, "rate": 1000}
    made.resume()
    assert on_file(tmp_path)["rows"] == 1000


def test_the_next_run_begins_where_the_last_one_was(tmp_path: Path) -> None:
    made = rate(tmp_path)
    made.observe(1000, 9.0)
    assert rate(tmp_path).rows == 750
    assert rate(tmp_path, min=800).rows == 800  # within the bounds it is given now


@pytest.mark.parametrize("content", ["", "[]", '{"rows": 1}'])
def test_a_file_that_says_nothing_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "rate.json").write_text(content)
    assert rate(tmp_path).rows == 1000
