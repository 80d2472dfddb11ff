"""The demo's second act, with less data: node, Redis, Spark and audit in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)  # about a minute on a quiet machine
def test_the_demo_of_the_pipeline_holds_what_it_claims(tmp_path: Path) -> None:
    picture = tmp_path / "picture.html"
    command = [
        sys.executable, "-m", "penstock.cli", "demo", "--act", "pipeline", "--quick", "--json",
        "--data", str(tmp_path / "kept"), "--picture", str(picture),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    failed = [claim for claim in document["claims"] if not claim["holds"]]
    assert not failed, "\n".join(map(str, failed))
    assert (done.returncode, document["ok"]) == (0, True)
    assert len(document["claims"]) >= 16
    assert set(document["figures"]["audit"].values()) == {"equal"}
    text = picture.read_text()
    assert text.count("<svg") == 4 and "Wedding in Zero Gravity" in text
