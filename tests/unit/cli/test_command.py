"""The one way in and out of every command."""

import asyncio
import json
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.command import Answer, Invocation, command, folder_of, group
from penstock.cli.exits import Exit
from penstock.errors import FailedPrecondition, NotFound


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


def test_a_url_is_told_from_a_folder() -> None:
    assert folder_of("penstock://127.0.0.1:7440") is None
    assert str(folder_of("./data")) == "data"
