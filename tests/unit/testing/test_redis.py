"""The Redis server of tests and demonstrations."""

from __future__ import annotations

from pathlib import Path

import redis

from penstock.testing.redis import redis_process


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    with redis_process(tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", b"1")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("a") == b"1"
