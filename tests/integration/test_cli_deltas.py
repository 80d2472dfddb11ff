"""`penstock deltas` against a real folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app


class Cli:
    """Runs commands on one folder, in this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.url = str(folder)

    def text(self, *arguments: str, code: int = 0, input: str | None = None) -> str:
        shown = CliRunner().invoke(app, ["--url", self.url, *arguments], input=input)
        assert shown.exit_code == code, shown.output
        return shown.stdout

    def json(self, *arguments: str, code: int = 0, input: str | None = None) -> Any:
        return json.loads(self.text(*arguments, "--json", code=code, input=input))


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    made = Cli(tmp_path / "data")
    made.json("topic", "create", "v", "--kind", "delta", "--dimensions", "3", "--partitions", "2")
    return made


def test_a_delta_topic_shows_what_it_is(cli: Cli) -> None:
    config = cli.json("topic", "show", "v")
    assert (config["kind"], config["dimensions"]) == ("delta", 3)
    assert "delta" in cli.text("topic", "list")
    refused = cli.json("topic", "create", "w", "--kind", "delta", code=4)
    assert refused["error"]["field"] == "dimensions"


def test_a_vector_is_written_and_shown(cli: Cli) -> None:
    written = cli.json(
        "deltas", "put", "v", "a", "--values", "1,2,3", "--metadata", '{"k": 1}', "--origin", "me"
    )
    assert written["deltas"][0]["clock"] == {"me": 1}
    cli.json("deltas", "put", "v", "a", "--op", "sparse", "--set", "2=9", "--set", "0=0.5")
    found = cli.json("deltas", "get", "v", "a")
    assert (found["values"], found["metadata"], found["revision"]) == ([0.5, 2.0, 9.0], {"k": 1}, 2)
    assert "[0.5, 2, 9]" in cli.text("deltas", "get", "v", "a")
    cli.text("deltas", "put", "v", "a", "--op", "delete")
    assert cli.json("deltas", "get", "v", "a", code=3)["error"]["vector_id"] == "a"
    history = cli.json("deltas", "history", "v", "a")["deltas"]
    assert [delta["op"] for delta in history] == ["create", "sparse", "delete"]
    assert "sparse" in cli.text("deltas", "history", "v", "a")


def test_a_vector_as_of_a_time(cli: Cli) -> None:
    cli.json("deltas", "put", "v", "a", "--values", "1,2,3")
    assert cli.json("deltas", "get", "v", "a", "--at", "2999-01-01")["values"] == [1, 2, 3]
    cli.json("deltas", "get", "v", "a", "--at", "2001-01-01T00:00:00+00:00", code=3)
    assert cli.json("deltas", "get", "v", "a", "--at", "soon", code=4)["error"]["field"] == "at"


def test_lines_are_written_in_order_for_each_vector(cli: Cli) -> None:
    lines = [{"vector_id": f"v{i}", "values": [i, 0, 0]} for i in range(5)]
    lines += [{"vector_id": f"v{i}", "op": "offset", "values": [1, 1, 1]} for i in range(5)]
    written = cli.json("deltas", "put", "v", input="\n".join(map(json.dumps, lines)))
    assert written["count"] == 10
    for i in range(5):
        assert cli.json("deltas", "get", "v", f"v{i}")["values"] == [i + 1, 1, 1]


def test_a_bad_line_is_refused_before_any_is_written(cli: Cli) -> None:
    good = json.dumps({"vector_id": "a", "values": [1, 2, 3]})
    for bad, field in (("{", "stdin"), ("[]", "stdin"), ('{"op": "create"}', "vector_id"),
                       ('{"vector_id": "a", "op": "melt"}', "op"),
                       ('{"vector_id": "a", "size": 1}', "size")):  # fmt: skip
        refused = cli.json("deltas", "put", "v", input=f"{good}\n{bad}\n", code=4)
        assert refused["error"]["field"] == field
    assert cli.json("deltas", "history", "v", "a")["deltas"] == []


def test_tail_prints_deltas_in_causal_order(cli: Cli) -> None:
    cli.json("deltas", "put", "v", "a", "--values", "1,2,3")
    cli.json("deltas", "put", "v", "a", "--op", "scale", "--values", "2")
    cli.json("deltas", "put", "v", "b", "--values", "1,2,3", "--namespace", "n")
    lines = cli.text("deltas", "tail", "v", "--from", "1", "--vector", "a", "-n", "2", "--json")
    assert [json.loads(line)["op"] for line in lines.splitlines()] == ["create", "scale"]
    shown = cli.text("deltas", "tail", "v", "--from", "1", "--namespace", "n", "-n", "1")
    assert "create" in shown and "n/b" in shown and "values=[1, 2, 3]" in shown


def test_tail_goes_on_where_its_cursor_stands(cli: Cli) -> None:
    lines = "\n".join(f'{{"vector_id": "v{n}", "values": [1, 2, {n}]}}' for n in range(4))
    cli.json("deltas", "put", "v", input=lines)
    reader = ("deltas", "tail", "v", "--from", "1", "--cursor", "reader", "--json")
    first = [json.loads(line) for line in cli.text(*reader, "-n", "4").splitlines()]
    assert len({one["vector_id"] for one in first}) == 4
    cursors = cli.json("deltas", "cursors", "v")["cursors"]
    assert {one["name"] for one in cursors} == {"reader"}
    cli.json("deltas", "put", "v", "late", "--values", "0,0,1")
    again = [json.loads(line)["vector_id"] for line in cli.text(*reader, "-n", "2").splitlines()]
    # The last one before was not known to be handled. Partitions come in any order.
    assert sorted(again) == sorted([first[-1]["vector_id"], "late"])
    assert cli.json("deltas", "cursors", "v", "--delete", "reader")["cursors"] == []


def test_who_is_sent_something_is_shown(cli: Cli) -> None:
    cli.json("deltas", "put", "v", "a", "--values", "0,0,1")
    found = cli.json("deltas", "live", "v")["topics"]
    assert [one["topic"] for one in found] == ["v"]
    assert "partition" in cli.text("deltas", "live")
