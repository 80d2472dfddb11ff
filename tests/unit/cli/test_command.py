"""The one way in and out of every command."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from penstock import errors
from penstock.cli.command import (
    Answer,
    Exit,
    Invocation,
    command,
    exit_of,
    group,
    pairs_of,
    time_of,
    values_of,
)
from penstock.errors import FailedPrecondition, InvalidArgument, NotFound


def run(body: Any, *arguments: str, connects: bool = True) -> Any:
    app = group("test")
    command(app, "go", connects=connects)(body)
    command(app, "other", connects=False)(lambda cli: None)
    return CliRunner().invoke(app, ["go", *arguments])


def test_the_document_and_the_view_are_never_mixed() -> None:
    def body(cli: Invocation, name: Annotated[str, typer.Argument()]) -> Answer:
        return Answer(document={"name": name}, view=f"hello {name}")

    assert json.loads(run(body, "ada", "--json").stdout) == {"name": "ada"}
    assert run(body, "ada").stdout == "hello ada\n"


def test_a_coroutine_is_awaited_and_its_code_returned() -> None:
    async def body(cli: Invocation) -> Answer:
        return Answer(document={}, code=Exit.FAILED)

    assert run(body).exit_code == 1


def test_an_error_is_one_document_on_stdout_or_one_line_on_stderr() -> None:
    def body(cli: Invocation) -> Answer:
        raise NotFound("no such topic", topic="jobs")

    shown = run(body, "--json")
    document = json.loads(shown.stdout)
    assert (shown.exit_code, document["exit_code"]) == (3, 3)
    assert document["error"]["topic"] == "jobs"
    plain = run(body)
    assert (plain.stdout, plain.stderr) == ("", "error: no such topic\n")


def test_a_bug_is_told_apart_from_a_failed_check() -> None:
    def body(cli: Invocation) -> Answer:
        raise ZeroDivisionError

    shown = run(body)
    assert shown.exit_code == 70
    assert "ZeroDivisionError" in shown.stderr


def test_a_command_that_cancels_itself_does_not_end_in_silence() -> None:
    async def body(cli: Invocation) -> Answer:
        raise asyncio.CancelledError

    shown = run(body)
    assert shown.exit_code == 70
    assert "CancelledError" in shown.stderr


def test_a_command_s_own_options_reach_it() -> None:
    def body(cli: Invocation) -> Answer:
        return Answer(document={"url": cli.url, "key": cli.api_key})

    shown = run(body, "--json", "--url", "penstock://h:1", "--api-key", "pk_a_b")
    assert json.loads(shown.stdout) == {"url": "penstock://h:1", "key": "pk_a_b"}
    assert run(body, "--url", "x", connects=False).exit_code == Exit.USAGE


def test_a_destructive_command_needs_force_without_a_terminal() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        Invocation(json=True).confirm("Delete all?", force=False)
    assert caught.value.details["field"] == "force"
    Invocation(json=True).confirm("Delete all?", force=True)


def test_a_url_is_told_from_a_folder(tmp_path: Path) -> None:
    assert Invocation(url="penstock://127.0.0.1:7440").folder is None
    assert Invocation(url=str(tmp_path)).folder == tmp_path
    with pytest.raises(NotFound):
        _ = Invocation(url=str(tmp_path / "missing")).folder


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound("x"), Exit.NOT_FOUND),
        (errors.InvalidArgument("x", field="f"), Exit.CALLER),
        (errors.FailedPrecondition("x"), Exit.CALLER),
        (errors.Unauthenticated("x"), Exit.UNAUTHENTICATED),
        (errors.Unavailable("x"), Exit.UNAVAILABLE),
        (errors.DiskFull("x"), Exit.UNAVAILABLE),
        (errors.LeaseLost("x"), Exit.CONFLICT),
        (errors.Corruption("x"), Exit.FAILED),
        (errors.PenstockError("x"), Exit.INTERNAL),
    ],
)
def test_exit_code_follows_the_kind_of_error(error: errors.PenstockError, code: Exit) -> None:
    assert exit_of(error) is code


def test_no_error_of_the_tree_is_left_without_a_code() -> None:
    for kind in errors.BY_CODE.values():
        if kind is not errors.PenstockError:
            error = errors.from_wire({"code": kind.code, "message": "x"})
            assert exit_of(error) not in (Exit.OK, Exit.INTERNAL)


def test_values_are_read_as_json_where_they_are_json() -> None:
    read = values_of(["k=5", "paused=true", "mode=max", "name=a=b"], option="set")
    assert read == {"k": 5, "paused": True, "mode": "max", "name": "a=b"}


def test_pairs_stay_text() -> None:
    assert pairs_of(["n=5"], option="header") == {"n": "5"}
    assert pairs_of(None, option="header") == {}


@pytest.mark.parametrize("text", ["novalue", "=5", ""])
def test_a_pair_without_a_name_or_sign_names_the_option(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pairs_of([text], option="header")
    assert caught.value.field == "header"


def test_times_are_utc_unless_they_say_otherwise() -> None:
    first = datetime(2026, 1, 1, tzinfo=UTC)
    assert time_of("2026-01-01T00:00:00", field="at") == first
    assert time_of("2026-01-01T01:00:00+01:00", field="at") == first
    assert time_of(None, field="at") is None
    with pytest.raises(InvalidArgument, match="ISO 8601"):
        time_of("yesterday", field="at")
