import pytest

from penstock.errors import InvalidArgument, NotFound
from penstock.server.http.routes import query_fields, routes

ROUTES = routes()


def parse(method: str, path: str, *, query: bytes = b"", body: bytes = b"") -> object:
    match = ROUTES.find(method, path, path.encode())
    return match.route.parse(parameters=match.parameters, query=query, body=body)


@pytest.mark.parametrize(
    ("method", "path", "query", "body", "field"),
    [
        ("POST", "/v1/enqueue", b"", b'{"topic":"a","payload":1,"colour":2}', "colour"),
        ("POST", "/v1/enqueue", b"", b'{"payload":1}', "topic"),
        ("POST", "/v1/enqueue", b"", b'{"topic":"a/b","payload":1}', "topic"),
        ("POST", "/v1/enqueue", b"", b'{"topic":"a\\n","payload":1}', "topic"),
        ("POST", "/v1/enqueue", b"", b'{"topic":"a","payload":1,"priority":"1"}', "priority"),
        ("POST", "/v1/enqueue", b"", b'{"topic":"a","payload":{]}', "body"),
        ("POST", "/v1/enqueue", b"", b"", "body"),
        ("POST", "/v1/enqueue", b"x=1", b'{"topic":"a","payload":1}', "x"),
        ("POST", "/v1/enqueue:batch", b"", b'{"topic":"a","messages":[]}', "messages"),
        (
            "POST",
            "/v1/enqueue:batch",
            b"",
            b'{"topic":"a","messages":[{"payload":1},{"delay_ms":-1}]}',
            "messages[1].delay_ms",
        ),
        ("GET", "/v1/peek", b"topic=a&limit=x", b"", "limit"),
        ("GET", "/v1/peek", b"topic=a&limit=0", b"", "limit"),
        ("GET", "/v1/peek", b"topic=a&topic=b", b"", "topic"),
        ("GET", "/v1/peek", b"topic", b"", "query"),
        ("GET", "/v1/peek", b"", b"", "topic"),
        ("GET", "/v1/peek", b"topic=a&size=1", b"", "size"),
        ("PATCH", "/v1/heaps/a", b"", b'{"topic":"b"}', "topic"),
        ("PATCH", "/v1/heaps/a%2Fb", b"", b'{"k":1}', "topic"),
        ("POST", "/v1/purge", b"force=maybe", b'{"topic":"a"}', "force"),
        ("POST", "/v1/ack", b"", b'{"topic":"a","lease_token":"-1.0.1.1"}', "lease_token"),
        ("POST", "/v1/ack:batch", b"", b'{"topic":"a","lease_tokens":["x"]}', "lease_tokens[0]"),
        ("POST", "/v1/confirm", b"", b'{"method":"erase"}', "method"),
    ],
)
def test_a_wrong_argument_is_named(
    method: str, path: str, query: bytes, body: bytes, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(method, path, query=query, body=body)
    assert refused.value.field == field


def test_a_limit_is_told() -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse("GET", "/v1/peek", query=b"topic=a&limit=2000")
    assert refused.value.limit == 1000


def test_arguments_in_a_query_are_text() -> None:
    request = parse("DELETE", "/v1/heaps/a", query=b"force=true&confirm=1")
    assert (request.topic, request.force, request.confirm) == ("a", True, "1")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("PUT", "/v1/heaps"), ("GET", "/v1/heaps/"), ("GET", "/v1/heaps/a/b")],
)
def test_other_paths_are_not_found(method: str, path: str) -> None:
    with pytest.raises(NotFound):
        ROUTES.find(method, path, path.encode())


def test_an_encoded_colon_finds_its_route() -> None:
    assert ROUTES.find("POST", "/v1/dlq:replay", b"/v1/dlq%3Areplay").route.name == "DlqReplay"


def test_a_query_has_a_bound() -> None:
    with pytest.raises(InvalidArgument):
        query_fields(b"&".join(b"a%d=1" % i for i in range(40)))
