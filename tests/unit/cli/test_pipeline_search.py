"""`penstock pipeline search`."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.sinks.changes import State, states, work
from tests.s3 import make_bucket, s3_server

from penstock.cli.command import Exit, Invocation, execute
from penstock.cli.pipeline import search
from penstock.cli.question import condition, parsed
from penstock.errors import InvalidArgument
from penstock.sinks.index import IndexSink

Ask = Callable[..., tuple[Exit, Any]]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    sink = IndexSink("index", path=str(tmp_path / "index"))
    sink.open()
    east = State(vector_id="east", revision=1, values=(1, 0, 0, 0), metadata={"a": 1})
    sink.write(work(0, states(east, State(vector_id="north", revision=2, values=(0, 1, 0, 0)))))
    sink.close()
    config = tmp_path / "pipeline.toml"
    config.write_text(
        f'name = "p"\ntopics = ["v"]\nstate = "{tmp_path}"\n'
        f'[[sink]]\nkind = "index"\npath = "{tmp_path / "index"}"\n'
    )

    def asked(as_json: bool = True, **arguments: Any) -> tuple[Exit, Any]:
        code = execute(search, Invocation(json=as_json), {"config": config, **arguments})
        out = capsys.readouterr().out
        return code, json.loads(out) if as_json else out

    return asked


def test_the_nearest_come_first(ask: Ask) -> None:
    code, found = ask(vector="[0.9, 0.1, 0, 0]")
    assert code is Exit.OK
    first, second = found["neighbours"]
    assert (first["vector_id"], first["metadata"], second["vector_id"]) == (
        "east", {"a": 1}, "north",
    )  # fmt: skip


def test_near_a_vector_that_is_there(ask: Ask) -> None:
    _, found = ask(like="north", limit=1)
    assert [one["vector_id"] for one in found["neighbours"]] == ["north"]
    code, found = ask(like="south")
    assert (code, found["error"]["code"]) == (Exit.NOT_FOUND, "not_found")


def test_a_person_gets_a_table(ask: Ask) -> None:
    code, text = ask(as_json=False, vector="1,0,0,0")
    assert code is Exit.OK
    assert "east" in text
    assert "distance" in text


def test_an_index_in_an_object_store_is_reached_as_its_sink_says(ask: Ask, tmp_path: Path) -> None:
    with s3_server() as options:
        path = f"s3://{make_bucket(options)}/index"
        sink = IndexSink("far", path=path, storage_options=options)
        sink.open()
        sink.write(work(0, states(State(vector_id="far", revision=1, values=(1, 0, 0, 0)))))
        sink.close()
        table = ", ".join(f'{name} = "{text}"' for name, text in options.items())
        with (tmp_path / "pipeline.toml").open("a") as config:
            config.write(f'[[sink]]\nkind = "index"\nname = "far"\npath = "{path}"\n')
            config.write(f"storage_options = {{ {table} }}\n")

        _, far = ask(vector="[1, 0, 0, 0]", index=path)
        _, near = ask(like="north", limit=1, index=str(tmp_path / "index"))
        code, neither = ask(vector="[1, 0, 0, 0]")

    assert [one["vector_id"] for one in far["neighbours"]] == ["far"]
    assert [one["vector_id"] for one in near["neighbours"]] == ["north"]
    assert (code, "say which with --index" in str(neither)) == (Exit.NOT_FOUND, True)


def test_one_question_at_a_time(ask: Ask) -> None:
    for wrong in ({}, {"vector": "1,0,0,0", "like": "east"}):
        code, found = ask(**wrong)
        assert (code, found["error"]["field"]) == (Exit.CALLER, "vector")


def test_numbers_are_read_in_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("[1, 2.5]") == parsed("1,2.5") == parsed(" 1 2.5 ") == [1.0, 2.5]
    monkeypatch.setattr("sys.stdin", io.StringIO("[3]\n"))
    assert parsed("-") == [3.0]
    for text in ("[1, ", "one, two", '["a"]'):
        with pytest.raises(InvalidArgument):
            parsed(text)


def test_conditions_choose_among_the_metadata(ask: Ask) -> None:
    for where in (["a=1"], ["a>0", "a<=1.5"], ['{"$or": [{"a": 1}, {"b": 2}]}']):
        _, found = ask(vector="0,1,0,0", where=where)
        assert [one["vector_id"] for one in found["neighbours"]] == ["east"]
    _, found = ask(vector="1,0,0,0", where=["a!=1"])
    assert [one["vector_id"] for one in found["neighbours"]] == ["north"]


@pytest.mark.parametrize(
    ("where", "field"),
    [
        ("a", "where"),
        ("=1", "where"),
        ("{", "where"),
        ("a=[1]", "where.a"),
        ('{"a": {"$x": 1}}', "where.a"),
    ],
)
def test_a_condition_that_says_nothing_is_refused(where: str, field: str, ask: Ask) -> None:
    code, found = ask(vector="1,0,0,0", where=[where])
    assert (code, found["error"]["field"]) == (Exit.CALLER, field)


def test_a_value_is_what_json_says_or_text() -> None:
    assert condition(None) is None
    assert condition(["lang=de"]) == {"lang": {"$eq": "de"}}
    assert condition(["a.b >= 5", 'c="5"', "d!=null", "e=x=y"]) == {
        "$and": [
            {"a.b": {"$gte": 5}}, {"c": {"$eq": "5"}}, {"d": {"$ne": None}}, {"e": {"$eq": "x=y"}},
        ]
    }  # fmt: skip
