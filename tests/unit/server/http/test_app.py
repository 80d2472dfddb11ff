import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest

from penstock.config import Config, HttpOptions
from penstock.errors import DiskFull, LeaseLost, NotFound, SequenceConflict, Unavailable
from penstock.server.gateway import Gateway

MESSAGE = {
    "message_id": "01JM0000000000000000000000",
    "partition": 0,
    "sequence": 1,
    "priority": 5,
    "attempts": 0,
    "time_ms": 1,
    "key": b"k",
    "headers": {"a": "b"},
    "payload": b'{"x": 1}',
    "lease_token": "1.0.1.2",
    "deadline_ms": 9,
    "visibility_ms": 30_000,
}


async def test_a_json_payload_is_stored_as_it_was_written(
    http: httpx.AsyncClient, node: Any
) -> None:
    body = '{"topic": "jobs", "payload": {"a" : [1, "é"]}, "priority": -3, "key": "k"}'
    answer = await http.post("/v1/enqueue", content=body.encode())
    assert answer.status_code == 200 and not answer.json()["duplicate"]
    columns = node.enqueues[0][1]
    assert list(columns.binary("payload")) == ['{"a" : [1, "é"]}'.encode()]
    assert columns.fixed("priority").tolist() == [-3]
    assert list(columns.binary("key")) == [b"k"]


async def test_concurrent_enqueues_share_native_ones(http: httpx.AsyncClient, node: Any) -> None:
    node.held = asyncio.Event()
    puts = [
        asyncio.ensure_future(http.post("/v1/enqueue", json={"topic": "jobs", "payload": i}))
        for i in range(40)
    ]
    while sum(r.parts[0].count for r, _ in node.enqueues) < 2:
        await asyncio.sleep(0.005)
    node.held.set()
    ids = {(await put).json()["message_id"] for put in puts}
    assert len(ids) == 40 and len(node.enqueues) < 20


async def test_a_batch_names_the_message_that_is_wrong(http: httpx.AsyncClient, node: Any) -> None:
    messages = [{"payload": 1}, {"payload_base64": "!"}]
    answer = await http.post("/v1/enqueue:batch", json={"topic": "jobs", "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["field"] == "messages[1].payload_base64"
    assert not node.enqueues


async def test_a_batch_is_atomic_and_carries_its_producer(
    http: httpx.AsyncClient, node: Any
) -> None:
    request = {
        "topic": "jobs",
        "messages": [{"payload": None}, {"payload_base64": base64.b64encode(b"\xff").decode()}],
        "producer_id": "p",
        "seq": 4,
    }
    answer = await http.post("/v1/enqueue:batch", json=request)
    assert len(answer.json()["message_ids"]) == 2
    sent, columns = node.enqueues[0]
    assert sent.atomic and list(columns.binary("payload")) == [b"null", b"\xff"]
    assert columns.fixed("run_sequence").tolist() == [4]


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'{"x": 1}', {"payload": {"x": 1}}),
        (b"\xff", {"payload_base64": "/w=="}),
        (b'"\xff"', {"payload_base64": base64.b64encode(b'"\xff"').decode()}),
        (b"", {"payload_base64": ""}),
    ],
)
async def test_a_popped_payload_is_json_or_base64(
    http: httpx.AsyncClient, node: Any, payload: bytes, shown: dict[str, Any]
) -> None:
    node.answers["pop"] = {"messages": [{**MESSAGE, "payload": payload}]}
    answer = await http.post("/v1/pop", json={"topic": "jobs", "limit": 2})
    (message,) = answer.json()["messages"]
    assert shown.items() <= message.items()
    assert message["key"] == "k" and message["lease_token"] == "1.0.1.2"
    assert node.calls[-1] == ("pop", {"topic": "jobs", "limit": 2, "wait_ms": 0, "consumer": ""})


async def test_a_pop_whose_caller_left_gives_its_messages_back(
    gateway: Gateway, node: Any, eventually: Callable[..., Any], unused: Callable[[], Any]
) -> None:
    answered = asyncio.Event()
    session_call = node.call

    def slow(method: str, arguments: dict[str, Any]) -> Any:
        answered.set()
        return session_call(method, arguments)

    node.call = slow
    node.answers["pop"] = {"messages": [MESSAGE]}
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.ports["http"])
    body = b'{"topic":"jobs","wait_ms":5000}'
    await send_and_leave(writer, body, node, asked=answered, forgotten=unused)
    await eventually(lambda: bool(node.settlements))
    assert node.settlements[0].counted is False


async def send_and_leave(
    writer: asyncio.StreamWriter,
    body: bytes,
    node: Any,
    *,
    asked: asyncio.Event,
    forgotten: Callable[[], Any],
) -> None:
    """Ask for a pop whose answer the node holds back until the caller is gone."""
    held: list[Callable[[], None]] = []
    session = node.sessions[0] if node.sessions else None
    if session is None:
        await node_session(writer, node)
        session = node.sessions[0]
    answer = session.answer
    session.answer = lambda number, result: held.append(lambda: answer(number, result))
    writer.write(
        b"POST /v1/pop HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    await asked.wait()
    writer.close()
    await writer.wait_closed()
    await forgotten()
    session.answer = answer
    for release in held:
        release()


async def node_session(writer: asyncio.StreamWriter, node: Any) -> None:
    writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while not node.sessions:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (NotFound("no"), 404, {}),
        (LeaseLost("no"), 412, {}),
        (SequenceConflict("no", sequence=4), 409, {}),
        (DiskFull("no", retry_after_s=1.2), 429, {"retry-after": "2"}),
        (Unavailable("no"), 503, {}),
    ],
)
async def test_errors_keep_their_form_and_status(
    http: httpx.AsyncClient, node: Any, error: Any, status: int, headers: dict[str, str]
) -> None:
    node.answers["peek"] = error
    answer = await http.get("/v1/peek?topic=jobs", headers={"x-request-id": "r1"})
    assert answer.status_code == status
    assert answer.json() == {**error.to_wire(), "request_id": "r1"}
    assert headers.items() <= dict(answer.headers).items()
    assert node.request_ids == ["r1"]


async def test_a_lost_lease_is_a_failed_precondition(http: httpx.AsyncClient, node: Any) -> None:
    node.lost = [0]
    ack = {"topic": "jobs", "lease_token": "1.0.1.2"}
    assert (await http.post("/v1/ack", json=ack)).json()["code"] == "lease_lost"
    assert (await http.post("/v1/nack", json=ack)).status_code == 412
    extend = {**ack, "extend_ms": 10}
    assert (await http.post("/v1/extend", json=extend)).status_code == 412
    many = {"topic": "jobs", "lease_tokens": ["1.0.1.2", "1.0.1.3"]}
    assert (await http.post("/v1/ack:batch", json=many)).json() == {"lost": ["1.0.1.2"]}


@pytest.mark.parametrize("headers", [{"authorization": "Bearer pk_x_y"}, {"x-api-key": "pk_x_y"}])
async def test_a_wrong_key_reads_nothing(
    http: httpx.AsyncClient, node: Any, headers: dict[str, str]
) -> None:
    answer = await http.post("/v1/enqueue", json={"nonsense": 1}, headers=headers)
    assert answer.status_code == 401 and answer.json()["code"] == "unauthenticated"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not node.calls


async def test_public_routes_need_no_key(http: httpx.AsyncClient, node: Any) -> None:
    node.key_required = True
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert (await http.get(path)).status_code == 200
    for path in ("/metrics", "/v1/heaps", "/v1/nowhere"):
        assert (await http.get(path)).status_code == 401
    key = {"x-api-key": "pk_good_secret"}
    assert (await http.get("/metrics", headers=key)).text == "penstock_up 1\n"
    assert (await http.get("/v1/nowhere", headers=key)).status_code == 404


async def test_a_foreign_web_page_is_refused(http: httpx.AsyncClient, node: Any) -> None:
    put = {"topic": "jobs", "payload": 1}
    for origin in ("https://elsewhere.example", "null"):
        answer = await http.post("/v1/enqueue", json=put, headers={"origin": origin})
        assert answer.status_code == 401 and not node.enqueues
    own = {"origin": str(http.base_url).rstrip("/")}
    assert (await http.post("/v1/enqueue", json=put, headers=own)).status_code == 200


SITE = "https://app.example.com"


@pytest.fixture
async def shared(node: Any, options: Config) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that lets pages of one other site in."""
    options = msgspec.structs.replace(options, http=HttpOptions(cors_origins=(SITE,)))
    gateway = Gateway(node.connect, options)
    await gateway.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}") as client:
        yield client
    await gateway.stop()


async def test_a_page_of_a_named_site_is_let_in(shared: httpx.AsyncClient, node: Any) -> None:
    page, put = {"origin": SITE}, {"topic": "jobs", "payload": 1}
    asked = page | {"access-control-request-method": "POST"}
    preflight = await shared.options("/v1/enqueue", headers=asked)
    assert preflight.status_code == 200 and not node.enqueues
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = await shared.post("/v1/enqueue", json=put, headers=page)
    assert answer.status_code == 200 and len(node.enqueues) == 1
    refused = await shared.get("/v1/nowhere", headers=page)  # which the page may read as well
    assert refused.status_code == 404
    for one in (preflight, answer, refused):
        assert one.headers["access-control-allow-origin"] == SITE
        assert one.headers["vary"] == "origin"


async def test_other_sites_stay_out(shared: httpx.AsyncClient, node: Any) -> None:
    put = {"topic": "jobs", "payload": 1}
    for origin in ("https://elsewhere.example", SITE + ".evil.example", "null"):
        answer = await shared.post("/v1/enqueue", json=put, headers={"origin": origin})
        assert answer.status_code == 401 and not node.enqueues
        assert "access-control-allow-origin" not in answer.headers
    plain = await shared.post("/v1/enqueue", json=put)
    assert plain.status_code == 200 and "access-control-allow-origin" not in plain.headers


async def test_a_request_id_is_kept_or_made(http: httpx.AsyncClient) -> None:
    kept = await http.get("/healthz", headers={"x-request-id": "abc"})
    assert kept.headers["x-request-id"] == "abc"
    made = {(await http.get("/healthz")).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    odd = await http.get("/healthz", headers={"x-request-id": "a b" * 100})
    assert len(odd.headers["x-request-id"]) < 40


async def test_destructive_arguments_stand_in_query_or_body(
    http: httpx.AsyncClient, node: Any
) -> None:
    node.answers["purge"] = {"purged": 3}
    answer = await http.post("/v1/purge?force=true&confirm=c1", json={"topic": "jobs"})
    assert answer.json() == {"purged": 3}
    await http.post("/v1/purge", json={"topic": "jobs", "force": True, "confirm": "c1"})
    assert node.calls[0] == node.calls[1]
    await http.delete("/v1/heaps/jobs?force=true&confirm=c2")
    await http.delete("/v1/heaps/jobs")
    assert node.calls[2][1] == {"force": True, "confirm": "c2", "topic": "jobs"}
    assert node.calls[3][1] == {"force": False, "topic": "jobs"}


async def test_a_heap_is_made_and_changed_with_what_was_given(
    http: httpx.AsyncClient, node: Any
) -> None:
    import msgspec

    node.answers["topic_create"] = msgspec.to_builtins(node.topics["jobs"])
    node.answers["topic_update"] = msgspec.to_builtins(node.topics["jobs"])
    answer = await http.post("/v1/heaps", json={"topic": "jobs", "mode": "max", "k": 5})
    assert answer.json()["topic"] == "jobs" and "name" not in answer.json()
    await http.patch("/v1/heaps/jobs", json={"paused": True})
    assert node.calls == [
        ("topic_create", {"config": {"name": "jobs", "mode": "max", "k": 5}, "exists_ok": False}),
        ("topic_update", {"topic": "jobs", "changes": {"paused": True}}),
    ]
    assert (await http.patch("/v1/heaps/jobs", json={})).status_code == 400
    fixed = await http.patch("/v1/heaps/jobs", json={"mode": "min"})
    assert fixed.json()["field"] == "mode"
