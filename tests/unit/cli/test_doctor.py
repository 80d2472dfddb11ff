import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import doctor
from penstock.cli.app import app


def test_a_sound_machine_is_ok(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["doctor", "--data", str(tmp_path / "new"), "--json"])
    document = json.loads(shown.stdout)
    names = {check["name"] for check in document["checks"]}
    assert {"python", "packages", "fsync", "disk space", "clock", "data folder"} <= names
    assert document["ok"] is (shown.exit_code == 0)


def test_a_port_in_use_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.check_port("native", port).status == "warn"
    assert doctor.check_port("native", port).status == "ok"


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    assert doctor.check_fsync(tmp_path).status == "ok"
    assert doctor.check_fsync(tmp_path / "missing").status == "fail"


def test_little_space_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_BYTES_MIN", 1 << 60)
    assert doctor.check_space(tmp_path).status == "fail"
