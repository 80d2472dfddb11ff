import dataclasses
from typing import Any

import msgspec
import pydantic
import pytest

from penstock.client.queue.entries import DEFAULTS, EntryGroup, checked, content_of
from penstock.errors import InvalidArgument


class Job(msgspec.Struct):
    name: str
    size: int = 1


@dataclasses.dataclass
class Task:
    name: str


class Order(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize(
    ("of", "value", "payload"),
    [
        (bytes, b"\x00\xff", b"\x00\xff"),
        (str, "é", "é".encode()),
        (dict, {"a": [1, None]}, b'{"a":[1,null]}'),
        (list[int], [1, 2], b"[1,2]"),
        (Any, 5, b"5"),
        (Job, Job("x"), b'{"name":"x","size":1}'),
        (Task, Task("x"), b'{"name":"x"}'),
        (Order, Order(name="x"), b'{"name":"x"}'),
    ],
)
def test_a_value_becomes_a_payload_and_back(of: Any, value: Any, payload: bytes) -> None:
    content = content_of(of)
    assert content.encode(value) == payload
    assert content.decode(payload) == value


@pytest.mark.parametrize(
    ("of", "value"), [(bytes, "text"), (str, b"raw"), (dict, object()), (Order, Task("x"))]
)
def test_a_value_of_another_type_is_refused(of: Any, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        content_of(of).encode(value)
    assert caught.value.field == "value"


@pytest.mark.parametrize(
    ("of", "payload"), [(str, b"\xff"), (dict, b"{"), (Job, b"{}"), (Order, b"{}")]
)
def test_a_payload_of_another_type_is_refused(of: Any, payload: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        content_of(of).decode(payload)
    assert caught.value.field == "payload"


def test_bytes_like_values_are_copied() -> None:
    raw = bytearray(b"abc")
    payload = content_of(bytes).encode(raw)
    raw[0] = 0
    assert payload == b"abc"


def test_a_type_that_json_cannot_carry_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        content_of(Job | Task)
    assert caught.value.field == "of"


def test_a_body_has_only_the_columns_it_needs() -> None:
    entries = EntryGroup()
    entries.fill([b"a", b""], b"")
    assert entries.columns() == {"payload": (b"a", b"")}
    how: dict[str, Any] = {"key": "k", "delay": 0.005, "headers": {"h": "1"}, "max_retries": 0}
    entries.add(checked(b"c", priority=3, limit=1, **how))
    assert set(entries.columns()) == set(DEFAULTS)
    assert set(entries.columns([0, 1])) == {"payload"}
    alone = entries.only([2])
    assert alone.columns()["max_retries"] == (0,) and alone.columns()["delay_ms"] == (5,)
    assert entries.bytes == sum(entries.only([row]).bytes for row in range(3))
