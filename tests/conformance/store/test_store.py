"""What a pipeline asks of its store, on every kind there is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument, NotFound, Unavailable
from penstock.spark.store import StoreAddress


def test_what_was_written_is_read_whole_and_in_parts(address: StoreAddress) -> None:
    store = address.open()
    store.write("a/b.bin", [b"one", memoryview(b"two"), b""])
    assert bytes(store.read("a/b.bin")) == b"onetwo"
    assert bytes(store.read_range("a/b.bin", 2, 3)) == b"etw"
    store.write("a/b.bin", [b"other"])
    assert bytes(store.read("a/b.bin")) == b"other"
    store.write("empty", [])
    assert bytes(store.read("empty")) == b""


def test_what_is_not_there_is_not_found(address: StoreAddress) -> None:
    store = address.open()
    with pytest.raises(NotFound, match="none"):
        store.read("a/none")
    with pytest.raises(NotFound, match="none"):
        store.read_range("none", 0, 1)
    assert store.names("nowhere") == []
    store.delete(["none", "a/none"])
    store.delete([])


def test_only_one_creates_an_object(address: StoreAddress) -> None:
    """Sixteen at once, sixteen times over; each round has one winner, whose bytes are there."""
    store = address.open()
    for turn in range(16):
        won: list[int] = []

        def create(number: int, turn: int = turn, won: list[int] = won) -> None:
            if store.create(f"turns/{turn}", [b"%d" % number]):
                won.append(number)

        racing = [threading.Thread(target=create, args=(number,)) for number in range(16)]
        for one in racing:
            one.start()
        for one in racing:
            one.join()
        assert len(won) == 1
        assert bytes(store.read(f"turns/{turn}")) == b"%d" % won[0]
    assert not store.create("turns/0", [b"late"])


def test_names_are_those_right_in_a_folder(address: StoreAddress) -> None:
    store = address.open()
    for name in ("top", "f/one", "f/two", "f/deeper/three", "ff/four"):
        store.write(name, [b"x"])
    assert sorted(store.names("f")) == ["one", "two"]
    store.delete(["f/one", "f/one"])
    assert store.names("f") == ["two"]


def test_more_objects_than_a_server_lists_at_once(address: StoreAddress) -> None:
    store = address.open()
    names = [f"{number:04d}" for number in range(1_100)]
    for name in names:
        store.write(f"many/{name}", [b""])
    assert sorted(store.names("many")) == names
    store.delete(f"many/{name}" for name in names)
    assert store.names("many") == []


def test_a_server_that_is_away_is_unavailable(s3: dict[str, str]) -> None:
    away = s3 | {"aws_endpoint": "http://127.0.0.1:1"}
    store = StoreAddress(url="s3://bucket/place", options=away).open()
    with pytest.raises(Unavailable, match="s3://bucket/place/x"):
        store.read("x")


def test_a_url_that_names_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nosuch"):
        StoreAddress(url="nosuch://place").open()
