"""The commands against real nodes and real folders."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.app import app

PENSTOCK = [sys.executable, "-m", "penstock.cli"]
ANY_PORTS = ["--port", "0", "--grpc-port", "0", "--http-port", "0"]
ENV = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A long-running command, and the addresses that it announced."""
    command = [*PENSTOCK, *arguments, "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            said = process.communicate()[1]
            raise AssertionError(f"exit code {process.returncode}: {said}")
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("node") / "data"
    with running("serve", "--data", str(folder), *ANY_PORTS) as (_, addresses):
        yield addresses


class Cli:
    """Runs commands on one node, in this process."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, *arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, ["--url", self.url, *arguments], input=input)

    def json(self, *arguments: str, code: int = 0, input: str | None = None) -> Any:
        shown = self.run(*arguments, "--json", input=input)
        assert shown.exit_code == code, shown.output
        return json.loads(shown.stdout)


@pytest.fixture
def cli(node: dict[str, str]) -> Cli:
    return Cli(node["native"])


@pytest.fixture
def topic(cli: Cli, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).replace("[", "-").replace("]", "")
    cli.json("topic", "create", name)
    return name


def test_a_topic_from_creation_to_deletion(cli: Cli) -> None:
    made = cli.json("topic", "create", "life", "--mode", "max", "--set", "max_retries=7")
    assert (made["mode"], made["max_retries"]) == ("max", 7)
    assert cli.json("topic", "update", "life", "--set", "paused=true")["paused"] is True
    assert cli.json("topic", "show", "life")["paused"] is True
    assert "life" in [config["name"] for config in cli.json("topic", "list")["topics"]]
    assert "life" in cli.run("topic", "list").stdout
    assert cli.json("topic", "delete", "life", code=4)["error"]["field"] == "force"
    assert cli.json("topic", "delete", "life", "--force") == {"deleted": "life"}
    assert cli.json("topic", "show", "life", code=3)["error"]["code"] == "not_found"


def test_a_wrong_attribute_is_named(cli: Cli, topic: str) -> None:
    assert cli.json("topic", "create", "bad name", code=4)["error"]["field"] == "name"
    assert cli.json("topic", "update", topic, "--set", "k=0", code=4)["error"]["field"] == "k"
    assert cli.json("topic", "update", topic, code=4)["error"]["field"] == "set"


def test_messages_leave_by_priority(cli: Cli, topic: str, tmp_path: Path) -> None:
    cli.json("put", topic, "later", "--priority", "9")
    cli.json("put", topic, "first", "-p", "1", "--key", "k", "--header", "h=1")
    file = tmp_path / "payload"
    file.write_bytes(b"\xff\x00")
    cli.json("put", topic, "--file", str(file), "--priority", "5")
    assert [m["priority"] for m in cli.json("peek", topic)["messages"]] == [1, 5, 9]
    first, second, third = cli.json("pop", topic, "--count", "3")["messages"]
    assert (first["payload"], first["key"], first["headers"]) == ("first", "k", {"h": "1"})
    assert (second["payload_base64"], third["payload"]) == ("/wA=", "later")
    assert cli.json("pop", topic, code=3)["error"]["topic"] == topic


def test_lines_of_stdin_become_messages(cli: Cli, topic: str) -> None:
    assert cli.json("put", topic, "--lines", input="a\nb\nc\n")["count"] == 3
    assert cli.json("put", topic, "x", "--count", "2500")["count"] == 2500
    assert cli.json("stats", topic)["topics"][0]["ready"] == 2503
    assert cli.run("pop", topic, "--raw", "-n", "3").stdout == "a\nb\nc\n"


def test_a_delayed_message_is_not_ready_yet(cli: Cli, topic: str) -> None:
    cli.json("put", topic, "soon", "--delay", "0.3")
    cli.json("pop", topic, code=3)
    assert cli.json("pop", topic, "--wait", "60")["messages"][0]["payload"] == "soon"


def test_a_lease_is_settled_by_its_token(cli: Cli, topic: str) -> None:
    cli.json("put", topic, "work")
    token = cli.json("pop", topic, "--no-ack")["messages"][0]["lease_token"]
    cli.json("pop", topic, code=3)
    cli.json("nack", topic, token, "--delay", "0")
    again = cli.json("pop", topic, "--no-ack", "--wait", "60")["messages"][0]
    assert again["attempts"] == 1
    assert cli.json("ack", topic, again["lease_token"]) == {"acked": 1}
    assert cli.json("ack", topic, again["lease_token"], code=7)["error"]["code"] == "lease_lost"


def test_dead_letters_are_listed_replayed_and_deleted(cli: Cli, topic: str) -> None:
    for text in ("one", "two"):
        cli.json("put", topic, text)
        token = cli.json("pop", topic, "--no-ack")["messages"][0]["lease_token"]
        cli.json("nack", topic, token, "--reject", "--reason", "broken")
    dead = cli.json("dlq", "list", topic)["messages"]
    assert sorted(m["payload"] for m in dead) == ["one", "two"]
    assert cli.json("dlq", "replay", topic, dead[0]["message_id"]) == {"replayed": 1}
    assert cli.json("pop", topic, "--wait", "60")["messages"][0]["payload"] == dead[0]["payload"]
    assert cli.json("dlq", "delete", topic, "--all", code=4)["error"]["field"] == "force"
    assert cli.json("dlq", "delete", topic, "--all", "--force") == {"deleted": 1}
    assert cli.json("dlq", "replay", topic, code=4)["error"]["field"] == "message_ids"


def test_purge_drops_what_is_ready(cli: Cli, topic: str) -> None:
    cli.json("put", topic, "x", "--count", "10")
    assert cli.json("topic", "purge", topic, "--force") == {"purged": 10}
    cli.json("pop", topic, code=3)


def test_tail_prints_the_log(cli: Cli, topic: str) -> None:
    cli.json("put", topic, "a", "--priority", "3")
    cli.json("put", topic, "b")
    cli.json("pop", topic)
    shown = cli.run("tail", topic, "--no-follow", "--json")
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(row["payload"], row["kind"]) for row in rows] == [("a", "enq"), ("b", "enq")]
    every = cli.run("tail", topic, "--no-follow", "--all", "--json")
    kinds = {json.loads(line)["kind"] for line in every.stdout.splitlines()}
    assert {"enq", "lease", "ack"} <= kinds
    assert len(cli.run("tail", topic, "--from", "1", "--count", "1").stdout.splitlines()) == 1
    assert cli.run("tail", topic, "--partition", "9").exit_code == 3


def test_stats_watch_shows_rates(cli: Cli, topic: str) -> None:
    cli.json("put", topic, "x")
    shown = cli.run("stats", topic, "--watch", "--rounds", "2", "--interval", "0.1", "--json")
    last = json.loads(shown.stdout.splitlines()[-1])
    assert last["rates"][topic]["enqueued"] == 0
    assert topic in cli.run("stats", topic, "--partitions").stdout


def test_keys_on_a_node(cli: Cli) -> None:
    made = cli.json("key", "create", "deploy")
    assert made["key"].startswith("pk_")
    with_key = ["--api-key", made["key"]]
    assert cli.run(*with_key, "topic", "list").exit_code == 0
    assert made["key"] not in cli.run("key", "list", "--json").stdout
    assert cli.json("key", "revoke", made["id"], code=4)["error"]["field"] == "force"
    assert cli.json("key", "revoke", made["id"], "--force") == {"revoked": made["id"]}
    assert cli.run(*with_key, "topic", "list").exit_code == 6


def test_a_gateway_of_its_own(node: dict[str, str], cli: Cli) -> None:
    ports = ["--grpc-port", "0", "--http-port", "0"]
    with running("gateway", "--url", node["native"], *ports) as (process, addresses):
        body = json.dumps({"topic": "through"}).encode()
        request = urllib.request.Request(addresses["http"] + "/v1/heaps", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status in (200, 201)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert cli.json("topic", "show", "through")["name"] == "through"


def test_a_folder_at_rest_needs_no_node(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with running("serve", "--data", str(folder), *ANY_PORTS) as (process, addresses):
        at_node, at_folder = Cli(addresses["native"]), Cli(str(folder))
        at_node.json("topic", "create", "jobs", "--partitions", "2")
        at_node.json("put", "jobs", "x" * 300, "--count", "1500")
        assert at_folder.json("key", "list", code=5)["error"]["code"] == "unavailable"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    made = at_folder.json("key", "create", "first")
    assert [key["id"] for key in at_folder.json("key", "list")["keys"]] == [made["id"]]
    assert at_folder.json("stats")["topics"][0]["ready"] == 1500
    report = at_folder.json("fsck", str(folder))
    assert (report["ok"], report["partitions"], report["messages"]) == (True, 2, 1500)
    assert report["first_bad"] is None
    check = at_folder.json("doctor", "--data", str(folder))["checks"][-1]
    assert check == {"name": "data folder", "status": "ok", "detail": "1500 messages verified"}
    victim = max(folder.rglob("*.seg"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content.rstrip(b"\0")) // 2] ^= 1
    victim.write_bytes(content)
    bad = at_folder.json("fsck", str(folder), code=1)
    assert bad["ok"] is False
    assert bad["first_bad"]["file"].endswith(victim.name)
    assert "damaged" in at_folder.run("fsck", str(folder)).stdout
    assert at_folder.json("doctor", "--data", str(folder), code=1)["ok"] is False


def test_serve_refuses_an_open_door(tmp_path: Path) -> None:
    arguments = ["serve", "--data", str(tmp_path), "--host", "0.0.0.0", "--json"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 4
    assert json.loads(shown.stdout)["error"]["field"] == "tls.cert"
    assert CliRunner().invoke(app, ["fsck", str(tmp_path / "none")]).exit_code == 3


def test_the_demo_of_the_queue_holds_what_it_claims(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    command = [*PENSTOCK, "demo", "--act", "queue", "--json", "--data", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=ENV)
    document = json.loads(done.stdout)
    failed = [claim for claim in document["claims"] if not claim["holds"]]
    assert (done.returncode, failed, document["ok"]) == (0, [], True)
    assert len(document["claims"]) >= 12
    assert Cli("").json("fsck", str(folder / "queue"))["ok"] is True
    assert Cli("").json("demo", "--data", str(folder), code=4)["error"]["field"] == "data"


def test_the_benchmark_measures_a_real_server(tmp_path: Path) -> None:
    stages = [word for stage in ("enqueue", "pop") for word in ("--only", stage)]
    arguments = ["--quick", "--runs", "1", "--folder", str(tmp_path), "--save", str(tmp_path)]
    command = [*PENSTOCK, "bench", "queue", "--json", *arguments, *stages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=ENV)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["enqueue_batch100_per_s"] > 1000
    assert document["server_cpu_us_per_pop_ack"] > 0
    assert document["machine"]["cores"] >= 1
    (saved,) = tmp_path.glob("queue-*.json")
    assert json.loads(saved.read_text()) == document
