"""`penstock pipeline status`."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.spark.delivery.delivering import (
    FileSink,
    FillingJobs,
    Triggers,
    delivery_of,
    eventually,
    filled_delivery,
)

from penstock.cli.command import Exit, Invocation, execute
from penstock.cli.pipeline import look, status
from penstock.spark.fold.state import DriverClaim
from penstock.spark.store import StoreAddress

ARGUMENTS: dict[str, Any] = {"config": Path("pipeline.toml"), "watch": False, "rounds": None}


def shown(folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[Exit, str]:
    code = execute(status, Invocation(**options), {**ARGUMENTS, "state": str(folder)})
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_running_pipeline_is_shown_with_its_troubles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = StoreAddress(url=str(tmp_path))
    claim = DriverClaim(place)
    triggers = Triggers(tmp_path)
    triggers.commit(("a", 1), log_time_ms=1)
    broken = FileSink(tmp_path, name="broken")
    broken.failures = 1 << 30
    delivery = delivery_of(
        triggers, FileSink(tmp_path), broken, folder=tmp_path, name="vectors",
        describe=lambda: {"paused": True},
    )  # fmt: skip
    delivery.start()
    eventually(lambda: look(place)["sinks"][1]["breaker"]["state"] == "open")
    eventually(lambda: look(place)["sinks"][0]["lag"]["rows"] == 0)
    code, text = shown(tmp_path, capsys)
    _, printed = shown(tmp_path, capsys, json=True)
    delivery.stop()
    claim.close()
    assert code is Exit.OK
    for part in ("vectors running", "waiting", "probe in", "switched off", "reading pauses", "█"):
        assert part in text, text
    found = json.loads(printed)
    assert (found["alive"], found["stale"]) == (True, False)
    assert [sink["lag"]["rows"] for sink in found["sinks"]] == [0, 1, 0]


def test_a_sink_that_is_filled_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, jobs = StoreAddress(url=str(tmp_path)), FillingJobs()
    claim = DriverClaim(place)
    jobs.well.set()
    delivery = filled_delivery(tmp_path, jobs)
    delivery.start()
    eventually(lambda: look(place)["sinks"][1]["state"] == "filling")
    code, text = shown(tmp_path, capsys)
    jobs.done.set()
    delivery.stop()
    claim.close()
    assert code is Exit.OK
    said = "new: all up to trigger 2 is read from the log, 3 of 8 tasks are done"
    assert "filling" in text and said in text, text


def test_a_stopped_pipeline_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    delivery = delivery_of(Triggers(tmp_path), FileSink(tmp_path), folder=tmp_path)
    delivery.start()
    delivery.stop()
    code, text = shown(tmp_path, capsys)
    assert code is Exit.OK
    assert "stopped" in text


def test_a_pipeline_that_died_is_told_from_one_that_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    delivery = delivery_of(Triggers(tmp_path), FileSink(tmp_path), folder=tmp_path)
    delivery.start()
    left = (tmp_path / "status.json").read_bytes()
    delivery.stop()
    (tmp_path / "status.json").write_bytes(left)  # as a process leaves it that was killed
    code, text = shown(tmp_path, capsys)
    assert code is Exit.UNAVAILABLE
    assert "DEAD" in text


def test_a_folder_without_a_pipeline_is_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(tmp_path, capsys)[0] is Exit.NOT_FOUND
    assert shown(tmp_path / "none", capsys)[0] is Exit.NOT_FOUND


def test_the_folder_is_found_through_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "pipeline.toml"
    config.write_text(f'name = "v"\ntopics = ["v"]\nstate = "{tmp_path / "state"}"\n')
    arguments = {**ARGUMENTS, "config": config, "state": None}
    assert execute(status, Invocation(), arguments) is Exit.NOT_FOUND
    assert str(tmp_path / "state") in capsys.readouterr().err
