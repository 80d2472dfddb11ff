"""DNS rebinding: requests of a web page that has its own name point at the node."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.hostile.site import HOST, JOBS, OPEN, VECTORS, Site
from tests.hostile.stage import Stage, attack

EVIL = "evil.example"
ANSWER_S_MAX = 10.0
HEAD_BYTES = 64 << 10
MISDIRECTED = 421
SEEN = "rebound"  # what the page would make
# What a page could do: read, follow, create, make itself a key.
REQUESTS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/v1/heaps", None),
    ("GET", "/metrics", None),
    ("GET", f"/v1/peek?topic={JOBS}&limit=1", None),
    ("GET", f"/v1/deltas/{VECTORS}/events", None),
    ("POST", "/v1/heaps", {"topic": SEEN}),
    ("POST", "/v1/enqueue", {"topic": JOBS, "payload": SEEN}),
    ("POST", "/v1/keys", {"name": SEEN}),
)


@attack(short=OPEN)
async def rebinding(stage: Stage) -> None:
    """requests whose Host is a page's own name, missing, doubled or in the target"""
    site = stage.site
    port = site.ports["http"]
    for name in (EVIL, f"{HOST}.{EVIL}", f"localhost.{EVIL}", f"{EVIL}#{HOST}", f"{HOST}@{EVIL}"):
        for method, path, body in REQUESTS:
            host = f"{name}:{port}"
            heads = [f"Host: {host}", f"Origin: http://{host}"]
            found = await _status(stage, method, path, heads, body)
            stage.expect(found == MISDIRECTED, f"{method} {path} with Host {host} got {found}")
    await _malformed(stage)
    for host in (f"{HOST}:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        found = await _status(stage, "GET", "/v1/heaps", [f"Host: {host}"])
        stage.expect(found == 200, f"the valid Host {host} got {found}")
    await _nothing_made(stage)


async def _malformed(stage: Stage) -> None:
    """Where it is not clear which host is meant, none is."""
    good, evil = f"Host: {stage.site.authority}", f"Host: {EVIL}"
    scheme = "https" if stage.site.profile.tls else "http"
    cases = {
        "no Host": ("/v1/heaps", []),
        "an empty Host": ("/v1/heaps", ["Host:"]),
        "two Hosts": ("/v1/heaps", [good, evil]),
        "two Hosts the other way": ("/v1/heaps", [evil, good]),
        "the same Host twice": ("/v1/heaps", [good, good]),
        "another Host in the target": (f"{scheme}://{EVIL}/v1/heaps", [good]),
        "a good target and another Host": (
            f"{scheme}://{stage.site.authority}/v1/heaps",
            [evil],
        ),
        "events without Host": (f"/v1/deltas/{VECTORS}/events", []),
        "events with two Hosts": (f"/v1/deltas/{VECTORS}/events", [good, evil]),
        "events of another Host in the target": (
            f"{scheme}://{EVIL}/v1/deltas/{VECTORS}/events",
            [good],
        ),
    }
    for name, (target, heads) in cases.items():
        found = await _status(stage, "GET", target, heads)
        stage.expect(400 <= found < 500, f"{name} got {found}")
    found = await _status(stage, "GET", "/v1/heaps", [], version="1.0")
    stage.expect(400 <= found < 500, f"HTTP/1.0 without Host got {found}")


async def _nothing_made(stage: Stage) -> None:
    site = stage.site
    topics = await site.call("topic_list")
    keys = await site.call("key_list")
    stage.expect(all(t["name"] != SEEN for t in topics["topics"]), "a page has made a topic")
    stage.expect(all(key["name"] != SEEN for key in keys["keys"]), "a page has made a key")


async def _status(
    stage: Stage,
    method: str,
    target: str,
    heads: list[str],
    body: dict[str, Any] | None = None,
    *,
    version: str = "1.1",
) -> int:
    """Send one request; the answer's status, or 0 if there is none."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {target} HTTP/{version}", *heads, *_key(stage.site)]
    if content:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    whole = ("\r\n".join(lines) + "\r\n\r\n").encode() + content
    stage.tally.tried += 1
    stage.tally.bytes_sent += len(whole)
    found = await status_of(stage.site, whole)
    stage.tally.refused += not 200 <= found < 300
    return found


def _key(site: Site) -> list[str]:
    """A page knows no key; where one is asked for, even who has one must be refused."""
    return [f"X-API-Key: {site.mallory}"] if site.mallory else []


async def status_of(site: Site, whole: bytes) -> int:
    """The status of the answer to a request as bytes; 0: the node hung up."""
    tls = site.tls()
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await asyncio.open_connection(
                HOST, site.ports["http"], ssl=tls, server_hostname=HOST if tls else None,
                limit=HEAD_BYTES,
            )  # fmt: skip
            try:
                writer.write(whole)
                line = await reader.readline()
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return 0
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
