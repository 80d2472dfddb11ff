"""The Redis server of tests and demonstrations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import redis

from penstock.errors import FailedPrecondition
from penstock.testing.redis import RedisProcess, redis_program


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", b"1")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("a") == b"1"


def test_the_server_is_of_a_line_that_is_maintained(tmp_path: Path) -> None:
    """Before, a package brought a server of 2023, whose holes nobody closes any more."""
    server = RedisProcess(tmp_path, durable=False)
    with server as running, redis.Redis.from_url(running.url) as client:
        version = client.info("server")["redis_version"]
    assert int(version.split(".")[0]) >= 7


def test_a_missing_server_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(FailedPrecondition, match="apt-get install redis-server"):
        redis_program()
