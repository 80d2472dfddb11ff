"""Attacks in short: what they are judged by, and that a run says so when a bar is missed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from tests.hostile.load import Health, Sample
from tests.hostile.run import Outcome, long_form, missed, short_form, verdict
from tests.hostile.site import kernel_count

ROW: dict[str, Any] = {
    "name": "attack", "healthy_ms_p99": 20.0, "growth_mb": 10.0, "refused_valid": 0,
    "held_after": 0, "problems": [], "verdict": "ok",
}  # fmt: skip


def test_a_row_names_the_bars_that_were_missed() -> None:
    assert missed(ROW) == []
    bad = {"healthy_ms_p99": 250.1, "growth_mb": 150.1, "refused_valid": 1, "held_after": 1}
    assert missed(ROW | bad) == ["healthy_ms_p99", "growth_mb", "refused_valid", "held_after"]
    assert missed(ROW | {"problems": ["a page has made a key"]}) == ["problems"]


def test_a_run_is_ok_only_if_all_of_it_is() -> None:
    good = Sample(1.0, "native_put", 3.0, "ok")
    assert verdict([Outcome(rows=[ROW], samples=[good], held_bytes=0)])["ok"]
    refused = Sample(1.0, "native_put", 3.0, "Backpressure")
    for bad in (
        Outcome(),
        Outcome(rows=[ROW | {"verdict": "failed"}]),
        Outcome(rows=[ROW], samples=[refused]),
        Outcome(rows=[ROW], epochs_moved=1),
        Outcome(rows=[ROW], held_bytes=1),
        Outcome(rows=[ROW], problems=["the node ended"]),
    ):
        assert not verdict([bad])["ok"]


def test_refused_requests_are_counted_and_named() -> None:
    samples = [Sample(float(i), "http_put", float(i), "ok") for i in range(99)]
    health = Health.of([*samples, Sample(99.0, "http_new", 5000.0, "RuntimeError: 429")])
    assert (health.requests, health.refused, health.ms_p99) == (100, 1, 5000.0)
    assert health.errors == {"http_new: RuntimeError: 429": 1}


def test_the_short_form_has_an_attack_of_every_kind() -> None:
    played = {attack.name for _, attack in short_form()}
    assert played >= {"rebinding", "grpc_messages", "heartbeats", "slow_frames", "http_bodies"}
    assert set(short_form()) < set(long_form())


async def test_connections_of_attackers_are_seen_in_the_kernel() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with socket.socket() as client:
        client.bind(("127.0.0.9", 0))
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        assert kernel_count({port}, far=["127.0.0.9"]) == 1
        assert kernel_count({port}, far=["127.0.0.8"]) == 0
        near = {client.getsockname()[1]}
        assert kernel_count({port}, near_ports=near, near="127.0.0.9") == 1
    server.close()
