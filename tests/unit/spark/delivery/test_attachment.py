"""Sinks from settings: built without connecting, refused by name."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.sinks.protocol import Feed
from penstock.spark.delivery.attachment import RoutedSink, attach, feed_of
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.options import Connecting

NOWHERE = Connecting(url="penstock://127.0.0.1:1")  # a connection to it would fail


def attached(folder: Path, *tables: dict[str, Any]) -> list[RoutedSink]:
    tree = {"name": "p", "topics": ["t"], "state": str(folder), "sink": list(tables)}
    return attach(PipelineSettings.of(tree), pipeline="p-1", node=NOWHERE)


def test_nothing_is_connected_to_before_it_is_opened(tmp_path: Path) -> None:
    remote = {"kind": "remote", "topic": "copy", "url": "penstock://127.0.0.1:2"}
    found = attached(
        tmp_path, {"kind": "lake", "path": str(tmp_path / "lake")}, remote,
        {"kind": "notify", "topic": "news"}, {"kind": "cache", "url": "redis://127.0.0.1:1"},
    )  # fmt: skip
    assert [one.sink.name for one in found] == ["lake", "remote", "notify", "cache"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_what_the_sinks_take(tmp_path: Path) -> None:
    lake = attached(tmp_path, {"kind": "lake", "path": str(tmp_path / "lake")})
    remote = attached(tmp_path, {"kind": "remote", "topic": "copy", "url": "penstock://h:2"})
    cache = attached(tmp_path, {"kind": "cache", "url": "redis://127.0.0.1:1"})
    assert feed_of([]) == Feed(0)
    assert feed_of(remote) == Feed.DELTAS | Feed.PAYLOADS
    assert feed_of(cache) == feed_of(lake) == Feed.STATES | Feed.DELTAS
    assert Feed.PAYLOADS in feed_of([*lake, *remote])


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"kind": "lake"}, "sink[0].path"),
        ({"kind": "lake", "path": "x", "color": 1}, "sink[0].color"),
        ({"kind": "lake", "path": "x", "route": "color=red"}, "sink[0].route"),
        ({"kind": "lakes"}, "sink[0].kind"),
    ],
)
def test_a_table_that_will_not_do_is_named(
    tmp_path: Path, table: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        attached(tmp_path, table)
    assert caught.value.field == field
    assert "sink " in caught.value.message


def test_routes_are_read(tmp_path: Path) -> None:
    table = {"kind": "lake", "path": "x", "route": ["namespace=a", "op=delete"]}
    (one,) = attached(tmp_path, table)
    assert [str(route) for route in one.routes.routes] == ["namespace=a", "op=DELETE"]
