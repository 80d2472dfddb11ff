"""Sinks from their tables."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.sinks.protocol import KINDS, Feed, Sink, Work, build_sink


class Node:
    """A topic writer that remembers how it was opened."""

    opened: dict[str, Any]

    def __call__(self, **how: Any) -> "Node":
        self.opened = how
        return self

    def append(self, topic: str, **what: Any) -> None: ...
    def close(self) -> None: ...


class Mine:
    """A sink as a user writes one."""

    feed, ordered = Feed.STATES, False

    def __init__(self, name: str, *, speed: int, colours: list[str] | None = None) -> None:
        self.name, self.speed, self.colours = name, speed, colours

    def open(self) -> None: ...
    def write(self, work: Work) -> None: ...
    def cursor(self) -> int | None: ...
    def scan(self) -> Any: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


OPTIONS: dict[str, dict[str, Any]] = {
    "lake": {"path": "lake"},
    "index": {"path": "index"},
    "cache": {"url": "redis://127.0.0.1"},
}
MINE = f"{__name__}:Mine"


def made(table: dict[str, Any], node: Node | None = None) -> Sink:
    return build_sink(table, pipeline="id", open_writer=node or Node())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_built_from_few_words(kind: str) -> None:
    sink = made({"kind": kind, **OPTIONS.get(kind, {})})
    assert isinstance(sink, Sink)
    assert sink.name == kind
    assert made({"kind": kind, "name": "own", **OPTIONS.get(kind, {})}).name == "own"


def test_the_lake_is_told_whose_triggers_it_counts() -> None:
    assert made({"kind": "lake", "path": "lake"}).pipeline == "id"  # type: ignore[attr-defined]


def test_a_sink_that_writes_to_topics_may_name_its_node(tmp_path: Path) -> None:
    node = Node()
    (tmp_path / "key").write_text("secret\n")
    made({"kind": "notify"}, node)
    assert node.opened == {"url": None, "api_key": None, "ca": None}
    table = {"kind": "remote", "url": "penstock://h:1", "api_key_file": str(tmp_path / "key")}
    made({**table, "topic": "copy"}, node)
    assert node.opened == {"url": "penstock://h:1", "api_key": "secret", "ca": None}


def test_a_class_of_ones_own_by_its_name() -> None:
    sink = made({"kind": MINE, "name": "mine", "speed": 3, "colours": ["red"]})
    assert isinstance(sink, Mine)
    assert (sink.speed, sink.colours) == (3, ["red"])


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({}, "kind"),
        ({"kind": "laek"}, "kind"),
        ({"kind": "nowhere.at.all:Sink"}, "kind"),
        ({"kind": "lake"}, "path"),
        ({"kind": "lake", "path": 5}, "path"),
        ({"kind": "lake", "path": "lake", "colour": "red"}, "colour"),
        ({"kind": "lake", "path": "lake", "pipeline": "mine"}, "pipeline"),
        ({"kind": "index", "path": "index", "tidy_every": "often"}, "tidy_every"),
        ({"kind": "remote", "url": 5}, "url"),
        ({"kind": "remote", "api_key": "a", "api_key_file": "b"}, "api_key_file"),
        ({"kind": "remote", "api_key_file": "/nowhere/at/all"}, "api_key_file"),
        ({"kind": MINE, "speed": 1, "colours": "red"}, "colours"),
    ],
)
def test_a_table_that_will_not_do_names_the_field(table: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        made(table)
    assert refused.value.field == field
