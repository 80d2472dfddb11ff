"""The jobs' commands: what they refuse before Spark is started, and what people read."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.pipeline import _audit_view

CONFIG = """
name = "p"
topics = ["vectors"]
state = "state"
[[sink]]
kind = "lake"
path = "lake"
"""


def run(*arguments: str) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, ["pipeline", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "field", "code"),
    [
        (("audit", "--config", "nowhere.toml"), "config", 4),
        (("materialise", "-o", "out"), "topic", 4),
        (("replay",), "config", 4),
        (("replay", "--config", "a.toml", "--queue", "b"), "config", 4),
        (("import", "nowhere.parquet", "--topic", "vectors"), None, 3),
    ],
)
def test_what_is_wrong_is_named_before_spark_starts(
    arguments: tuple[str, ...], field: str | None, code: int
) -> None:
    exit_code, document = run(*arguments)
    error = document["error"]
    assert isinstance(error, dict)
    assert (exit_code, error.get("field")) == (code, field)


def test_an_unknown_sink_and_an_unconfirmed_reindex_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "pipeline.toml"
    config.write_text(CONFIG)
    code, document = run("reindex", "--config", str(config), "--sink", "other")
    assert (code, "no sink other" in str(document)) == (3, True)
    code, document = run("reindex", "--config", str(config), "--sink", "lake")
    assert (code, "--force" in str(document)) == (4, True)


def test_an_audit_reads_as_a_list_of_verdicts() -> None:
    place = {"kind": "values", "vector_id": "v7"}
    part = {"differences": {"values": 1}, "first_differences": [place]}
    sinks = {
        "lake": {"verdict": "equal"},
        "index": {"verdict": "different", "vectors": part},
        "cache": {"verdict": "lagging", "lag": {"triggers": 3, "sequences": 9}},
        "own": {"verdict": "unproven", "reason": "no scan"},
    }
    partition = {"topic": "vectors", "partition": 1, "ok": False, "messages": 5,
                 "damage": {"reason": "CRC mismatch"}}  # fmt: skip
    text = _audit_view({"ok": False, "partitions": [partition], "sinks": sinks})
    for words in ("vectors/1", "CRC mismatch", "vectors: 1 × values", "v7", "3 triggers behind"):
        assert words in text
