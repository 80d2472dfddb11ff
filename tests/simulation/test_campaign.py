"""Many seeds in processes of their own: nothing that one run does may cost the others."""

import json
import os
import signal
from multiprocessing import active_children
from pathlib import Path

import msgspec
import pytest

from verification.simulation import campaign
from verification.simulation.campaign import Summary, Worker, results, runs_of
from verification.simulation.command import main


def test_a_process_that_dies_names_its_seed() -> None:
    """The others are run all the same, by another process."""
    found = {}
    for result in results(runs_of(0, 4, "calm"), 1):
        found[result.seed] = result
        if result.seed == 0:
            (worker,) = active_children()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
    assert sorted(found) == [0, 1, 2, 3]
    assert [seed for seed, result in found.items() if not result.ok] == [1]
    assert found[1].verdict.problems == ["exceptions: the process ended with code -9"]


def test_a_run_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "RUN_SECONDS_MAX", -1)
    worker = Worker()
    try:
        worker.begin((3, "calm"))
        assert worker.overdue
        result = worker.result()
    finally:
        worker.stop()
    assert (result.seed, result.profile, result.ok) == (3, "calm", False)
    assert not worker.alive


def test_a_campaign_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is stored is not run again, and counts."""
    one = Summary(start=10, runs=2, faults={"crash": 5}, violations={"stuck": 0}, heal_ms_max=9)
    (tmp_path / "calm-0000010-2.json").write_bytes(msgspec.json.encode(one))
    arguments = ["--folder", str(tmp_path), "--part", "2", "--profile", "calm", "--json"]
    assert main([*arguments, "--start", "10", "--seeds", "3"]) == 0
    total = json.loads(capsys.readouterr().out)
    assert (total["start"], total["runs"], total["failed"]) == (10, 3, [])
    assert total["by_profile"] == {"calm": 1}
    assert total["faults"]["crash"] == 5
    assert (tmp_path / "calm-0000012-1.json").exists()
