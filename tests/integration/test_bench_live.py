"""A stage of the live path's benchmark, quickly, on a real node."""

from pathlib import Path

from penstock.cli.bench.live_runner import measure_live


async def test_a_sink_in_the_node_is_measured_from_the_commit(tmp_path: Path) -> None:
    document = await measure_live(("sink",), runs=1, quick=True, folder=tmp_path)
    for stage in ("commit_to_sink", "order", "route"):
        quantiles = [document[f"{stage}_us_{part}"] for part in ("p50", "p95", "p99")]
        assert 0 < quantiles[0] <= quantiles[1] <= quantiles[2]
    assert set(document["targets"]) == {"commit_to_sink_us_p50", "commit_to_sink_us_p99"}
    assert document["references"]["commit_to_sink_us_p95"] == 780
