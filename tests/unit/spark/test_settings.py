"""pipeline.toml: what is read, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.spark.settings import PipelineSettings, RowsPerTrigger

FILE = """
name = "vectors"
topics = ["urgent", "bulk"]
state = "state"
rows_per_trigger = { max = 5000, initial = 2000 }

[[sink]]
kind = "lake"
path = "lake"

[[sink]]
kind = "cache"
name = "hot"
route = "namespace=products"
url = "redis://127.0.0.1"
"""


def of(**fields: Any) -> PipelineSettings:
    return PipelineSettings.of({"name": "p", "topics": ["t"], "state": "s", **fields})


def test_a_file_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pipeline.toml"
    file.write_text(FILE)
    settings = PipelineSettings.load(file)
    assert settings.topics == ("urgent", "bulk")
    assert settings.state == str(tmp_path / "state")
    assert settings.rows_per_trigger == RowsPerTrigger(min=1000, max=5000, initial=2000)
    lake, cache = settings.sinks
    assert (lake.name, lake.route, lake.options) == ("lake", (), {"path": "lake"})
    assert cache.route == ("namespace=products",)
    assert (cache.kind, cache.name) == ("cache", "hot")
    assert cache.options == {"url": "redis://127.0.0.1"}


def test_overrides_win_over_the_file_unless_they_are_none(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(FILE)
    settings = PipelineSettings.load(file, overrides={"url": "penstock://h:1", "name": None})
    assert settings.url == "penstock://h:1"
    assert settings.name == "vectors"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "With Space"}, "name"),
        ({"topics": []}, "topics"),
        ({"topics": ["a", "a"]}, "topics"),
        ({"topics": ["a/b"]}, "topics"),
        ({"topics": "a"}, "topics"),
        ({"stat": "x"}, "stat"),
        ({"sinks": []}, "sinks"),
        ({"sink": {"kind": "lake"}}, "sink"),
        ({"trigger_interval_s": -1.0}, "trigger_interval_s"),
        ({"target_trigger_s": 0.0}, "target_trigger_s"),
        ({"snapshot_deltas": 0}, "snapshot_deltas"),
        ({"changes_bytes_max": 1}, "changes_bytes_max"),
        ({"tasks": 0}, "tasks"),
        ({"rows_per_trigger": {"min": 10, "max": 5}}, "rows_per_trigger.max"),
        ({"rows_per_trigger": {"initial": 5}}, "rows_per_trigger.initial"),
        ({"rows_per_trigger": {"low": 5}}, "low"),
        ({"api_key": "k", "api_key_file": "f"}, "api_key_file"),
        ({"sink": [{"name": "x"}]}, "sink[0].kind"),
        ({"sink": [{"kind": "lake"}, {"kind": "lake"}]}, "sink[1].name"),
        ({"sink": [{"kind": "lake", "name": "A!"}]}, "sink[0].name"),
        ({"sink": [{"kind": "lake", "route": [1]}]}, "sink[0].route"),
        ({"sink": [{"kind": "lake", "name": 1}]}, "sink[0].name"),
        ({"sink": [{"kind": "lake", "backfill": "everything"}]}, "sink[0].backfill"),
    ],
)
def test_what_will_not_do_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        of(**fields)
    assert caught.value.field == field


def test_a_required_key_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidArgument) as caught:
        PipelineSettings.of({"name": "p", "topics": ["t"]})
    assert caught.value.field == "state"


def test_a_sink_of_a_users_class_gets_a_name_that_files_can_have() -> None:
    (sink,) = of(sink=[{"kind": "mine.sinks:Webhook"}]).sinks
    assert sink.name == "sink-0"


@pytest.mark.parametrize("backfill", [None, "log", "lake", "none"])
def test_a_backfill_that_was_not_said_is_none_of_those_that_can_be(backfill: str | None) -> None:
    said = {} if backfill is None else {"backfill": backfill}
    (sink,) = of(sink=[{"kind": "cache", **said}]).sinks
    assert sink.backfill == backfill


@pytest.mark.parametrize("text", ["name = ", "\xff"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match="not TOML"):
        PipelineSettings.load(file)
    with pytest.raises(InvalidArgument, match="cannot read"):
        PipelineSettings.load(tmp_path / "gone.toml")
