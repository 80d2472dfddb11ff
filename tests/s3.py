"""A real S3 server in a process of its own: moto's, which keeps everything in memory.

It answers one request at a time, because moto looks whether an object is there and then writes it:
two conditional puts at once could both win, which S3's cannot.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

STARTED_S_MAX = 120.0
PROGRAM = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
app = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=False)
"""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """A server of its own process, empty; how to reach it, as the options of a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, server)
        yield {
            "aws_endpoint": url,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "aws_region": "us-east-1",
            "allow_http": "true",
        }
    finally:
        server.kill()
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTED_S_MAX
    while True:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
        except OSError:
            assert server.poll() is None, "the S3 server ended"
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.1)
        else:
            return


def make_bucket(options: dict[str, str]) -> str:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(f"{options['aws_endpoint']}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    return name
