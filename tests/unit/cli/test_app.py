"""The command tree as a whole."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from penstock import __version__
from penstock.cli.app import COMMANDS as DESCRIBED
from penstock.cli.app import app, load

COMMANDS = [
    "serve", "gateway", "put", "pop", "ack", "nack", "peek", "tail", "stats", "fsck", "doctor",
    "demo", "completion", "version", "topic create", "topic list", "topic show", "topic update",
    "topic delete", "topic purge", "dlq list", "dlq replay", "dlq delete", "key create",
    "key list", "key revoke", "bench queue",
]  # fmt: skip

HEAVY = (
    "asyncio", "numpy", "pyarrow", "pyspark", "grpc", "rich.console", "penstock.client",
    "penstock.node", "penstock.bench", "penstock.demo",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"])
    assert shown.exit_code == 0
    assert "--json" in shown.stdout


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_command_says_itself_what_the_list_of_commands_says(name: str) -> None:
    _, description = DESCRIBED[name]
    assert load(name).help.startswith(description.removesuffix("."))


def test_version() -> None:
    shown = CliRunner().invoke(app, ["version", "--json"])
    assert json.loads(shown.stdout) == {"version": __version__}
    assert CliRunner().invoke(app, ["--json", "version"]).stdout == shown.stdout


def test_a_wrong_command_line_is_exit_code_2() -> None:
    assert CliRunner().invoke(app, ["topic", "paint"]).exit_code == 2
    assert CliRunner().invoke(app, ["put"]).exit_code == 2


def test_no_node_is_exit_code_5() -> None:
    shown = CliRunner().invoke(app, ["topic", "list", "--url", "penstock://127.0.0.1:1", "--json"])
    assert shown.exit_code == 5
    assert json.loads(shown.stdout)["error"]["code"] == "unavailable"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from penstock.cli.app import app; app(['--help'], standalone_mode=False);"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "Penstock: a durable priority queue" in done.stdout


def test_the_shell_gets_completions() -> None:
    env = {
        **os.environ, "_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock dl",
        "COMP_CWORD": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli"], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout.strip() == "dlq"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    shown = CliRunner().invoke(app, ["completion", shell])
    assert shown.exit_code == 0
    assert "_PENSTOCK_COMPLETE" in shown.stdout
