"""Every stage of the live path's benchmark, quickly, on a real node."""

import math
from pathlib import Path

import pytest

from penstock.bench.runner import measure
from penstock.bench.subjects import SUBJECTS

LIVE = SUBJECTS["live"]


@pytest.mark.parametrize("stage", LIVE.names)
async def test_a_stage_measures_what_it_says(stage: str, tmp_path: Path) -> None:
    document = await measure(LIVE, (stage,), runs=1, quick=True, folder=tmp_path)
    assert document["missing"] == []
    metrics = [metric for metric in LIVE.metrics if metric.stage == stage]
    assert {metric.name for metric in metrics} == document["runs"][stage][0].keys()
    assert all(math.isfinite(document[metric.name]) for metric in metrics)
    assert set(document["targets"]) == {m.name for m in metrics if m.target is not None}
    assert document["ok"] == all(metric.met(document[metric.name]) for metric in metrics)
    names = [metric.name for metric in metrics if "_us_" in metric.name or "_ms_" in metric.name]
    for p50 in (name for name in names if name.endswith("_p50")):
        quantiles = [document[p50.replace("_p50", part)] for part in ("_p50", "_p95", "_p99")]
        assert 0 < quantiles[0] <= quantiles[1] <= quantiles[2]
